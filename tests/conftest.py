"""What holds for all tests: fast ones first, ids that are equal in every worker, hypothesis that does not time.

With ``CI=true`` a skipped test is a failed one, unless ``allowed_skips.toml`` lists it with the reason why.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import re
import shutil
import signal
import sys
import tomllib
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from shardkit.loader import gather, plain_rows
from tests.drills import DRILLS
from tests.servers.fault_proxy import FaultProxy
from tests.servers.object_stores import moto, s3_environment

# Correctness tests must not depend on timing, and their machines are shared.
settings.register_profile(
    "shardkit", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("shardkit"))
_PROFILE = os.environ.get("SHARDKIT_HYPOTHESIS", "shardkit")
settings.load_profile(_PROFILE)

# A shell without job control lets what it starts in the background ignore SIGINT, and so would every command here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# There are more workers than processors, and threads of OpenMP that wait for each other keep a processor busy.
os.environ["OMP_NUM_THREADS"] = "1"

# Every worker rewrites the assertions of all tests, and every process that a test starts compiles what it imports,
# unless the first that does it leaves the bytecode to the others.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What tests write goes to memory where there is room, and goes away with the test unless that failed: a disk that keeps
# up with a journal is half the time of tests that copy, kill and compare. Drills write more than that.
_MEMORY = Path("/dev/shm")
_NEEDED_BYTES = 4 << 30
if (
    not DRILLS
    and os.access(_MEMORY, os.W_OK)
    and not os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC  # tests run what they install
    and shutil.disk_usage(_MEMORY).free > _NEEDED_BYTES
):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))

_ORDER = ("unit", "property", "slow", "simulation", "integration", "compat", "faults")


def pytest_configure(config: pytest.Config) -> None:
    """Let each worker begin to collect elsewhere: it compiles a share of the tests, and finds the rest compiled."""
    if "PYTEST_XDIST_WORKER" in os.environ and config.args == config.getini("testpaths"):
        number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        files = sorted(str(path) for path in Path(__file__).parent.glob("*/**/test_*.py"))
        first = len(files) * number // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        config.args[:] = files[first:] + files[:first]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cheap rooms first, so that a mistake shows early, in as many shares as there are workers.

    What `make drills` alone runs is left out elsewhere.

    With ``--dist worksteal`` each worker gets a share and steals from others when it is done. A file's tests stay
    together, because what a file's tests share is made once per worker.
    """

    def rank(item: pytest.Item) -> tuple[int, Path]:
        room = item.path.relative_to(Path(__file__).parent).parts[0]
        if item.get_closest_marker("slow") and room in {"unit", "property"}:
            room = "slow"
        return _ORDER.index(room) if room in _ORDER else len(_ORDER), item.path

    if not DRILLS:
        left_out = [item for item in items if any(mark.kwargs for mark in item.iter_markers("drill"))]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    shares: list[list[pytest.Item]] = [[] for _ in range(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))]
    for _, file in itertools.groupby(sorted(items, key=rank), key=rank):
        min(shares, key=len).extend(file)
    items[:] = itertools.chain.from_iterable(shares)
    if _PROFILE == "quick":
        _try_fewer_examples(
            {getattr(test, "__func__", test) for test in (getattr(i, "obj", None) for i in items)}
        )
    if DRILLS:
        for item in items:
            item.add_marker(pytest.mark.timeout(0))


def pytest_collection_finish() -> None:
    """Leave what collection made, a million objects, out of every later search for cycles."""
    gc.collect()
    gc.freeze()


def _try_fewer_examples(tests: Iterable[Any]) -> None:
    """Let property tests try a third of their examples, at least 4: `make test` tries all."""
    for test in tests:
        own: settings | None = getattr(test, "_hypothesis_internal_use_settings", None)
        if own is not None and own.max_examples > 4:
            test._hypothesis_internal_use_settings = settings(own, max_examples=max(4, own.max_examples // 3))


# ---- skips

_ALLOWED = Path(__file__).with_name("allowed_skips.toml")
_ON_CI = os.environ.get("CI", "").lower() in {"1", "true", "yes"}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that skips."""
    report = yield
    if not hasattr(report, "wasxfail"):
        _refuse_unlisted(report, item.nodeid)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module that skips all of its tests."""
    report = yield
    _refuse_unlisted(report, collector.nodeid)
    return report


def _refuse_unlisted(report: pytest.TestReport | pytest.CollectReport, name: str) -> None:
    """Make a skip a failure, on CI and if it is not listed."""
    if not (_ON_CI and report.skipped):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    for entry in tomllib.loads(_ALLOWED.read_text(encoding="utf-8")).get("skip", []):
        if re.fullmatch(entry["test"], name) and re.search(entry["reason"], reason):
            assert entry["because"].strip(), f"{_ALLOWED.name} says nothing about {entry['test']}"
            return
    report.outcome = "failed"
    report.longrepr = (
        f"{name} was skipped: {reason}\nOn CI that is a failure. Install what is missing (tools/install.sh, .ci/run), "
        f"or list the test in tests/{_ALLOWED.name} and say there why it cannot run on CI's machine."
    )


# ---- what tests share


@pytest.fixture(scope="session", autouse=True)
def _no_sync() -> Iterator[None]:
    """Wait for no disk: only a power cut would show it, and tests/faults/crash_states.py enumerates those."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _descriptor: None)
        yield


@pytest.fixture
def ordinary_rights() -> Iterator[None]:
    """Root gets the rights of anybody else: permissions of files hold in this thread, and in those that it starts."""
    if os.geteuid() != 0:
        yield
    elif sys.platform != "linux":
        pytest.skip("root may write everywhere, and only Linux lets it do without that")
    else:
        with _without_capabilities(1 << 1 | 1 << 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
            yield


@contextlib.contextmanager
def _without_capabilities(left_out: int) -> Iterator[None]:
    """Clear effective capabilities of this thread for a while: capset(2), of which Python knows nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    held = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: the lower 32, then the higher
    assert libc.capget(header, held) == 0, os.strerror(ctypes.get_errno())
    fewer = (ctypes.c_uint32 * 6)(held[0] & ~left_out, *held[1:])
    assert libc.capset(header, fewer) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        assert libc.capset(header, held) == 0, os.strerror(ctypes.get_errno())


@pytest.fixture(scope="module", params=["compiled", "in Python"])
def copies(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test of a file, with the compiled copies and without them."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "in Python":
            patch.setattr(gather, "block_rows", plain_rows)
        elif gather.block_rows is plain_rows:
            pytest.skip("the module is not compiled here")
        yield


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """S3 as moto serves it, with the buckets that the test's module names in ``BUCKETS``; its endpoint."""
    with moto(*request.module.BUCKETS) as endpoint:
        yield endpoint


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy before the server, to which the AWS environment points."""
    with FaultProxy(server) as made:
        for name, value in s3_environment(made.endpoint).items():
            monkeypatch.setenv(name, value)
        yield made
