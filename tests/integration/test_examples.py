"""Each example is killed on two ranks, continues on one and on four, and consumes the cells of an undisturbed run."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import shardkit
from shardkit.ledger import CellRecord, read_journal
from tests.servers.serving import free_port

pytest.importorskip("torch")
pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 40  # of 25 an epoch
# Imports an example's framework once, for all ranks: those of each line are forked and told of, then waited for.
LAUNCHER = """
import atexit, gc, importlib, json, os, runpy, sys, threading, time
sys.path.insert(0, os.path.dirname(sys.argv[1]))
importlib.import_module(os.path.basename(sys.argv[1]).removesuffix(".py"))
for name in ("torch._dynamo", "shardkit.dataset.creating", "shardkit.dataset.opening", "shardkit.loader.monitoring"):
    importlib.import_module(name)  # the first is what the first optimizer of a process imports
from shardkit.ledger.journal import Journal

def wait_at(last):
    # a rank that waits after a step cannot end before the signal that kills it
    record = Journal.record_step
    def record_and_wait(journal, step, *rest):
        record(journal, step, *rest)
        if step >= last:
            time.sleep(600)
    Journal.record_step = record_and_wait

gc.freeze()
for line in sys.stdin:
    ranks = []
    for number, (arguments, environment, errors) in enumerate(json.loads(line)):
        ranks.append(os.fork())
        if not ranks[-1]:
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.environ.update(environment)
            if "WAIT_AT" in environment:
                wait_at(int(environment["WAIT_AT"]))
            sys.argv = [sys.argv[1], *arguments]
            runpy.run_path(sys.argv[0], run_name="__main__")
            threading._shutdown()
            atexit._run_exitfuncs()
            os._exit(0)  # without taking a thousand modules apart, which costs more than the training
    print(json.dumps(ranks), flush=True)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]), flush=True)
"""
sys.path.append(str(EXAMPLES))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = str(tmp_path_factory.mktemp("data") / "points")
    import_module("points").make_points(Path(root))
    return root


@pytest.fixture(scope="module")
def undisturbed(data: str, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], str]:
    """(step, lane) → digest of a cell, as a loader without a framework consumes it."""
    ds, run = shardkit.open(data), tmp_path_factory.mktemp("undisturbed")
    with ds.loader(ds.plan(global_batch=32, lanes=8, seed=1), rank=0, world=1, run=run) as loader:
        for _ in range(2):
            for _ in loader:
                pass
    return {(record.step, record.lane): record.digest for record in _records(run) if record.step < STEPS}


class _Launcher:
    """Ranks of an example as torchrun would start them, without its minutes of retry after a kill."""

    def __init__(self, example: str, folder: Path) -> None:
        self._errors = folder
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true",
                       "HF_HUB_OFFLINE": "1"}  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(EXAMPLES / f"{example}.py")],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def start(self, data: str, run: Path, world: int, wait_at: int | None = None) -> list[int]:
        """Process ids of the ranks, which wait after a step if it is given."""
        ranks, port = [], free_port()
        for rank in map(str, range(world)):
            environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
                           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
            if wait_at is not None:
                environment["WAIT_AT"] = str(wait_at)
            arguments = [data, str(run), "--steps", str(STEPS)]
            ranks.append((arguments, environment, str(self._errors / f"{run.name}-{rank}")))
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(ranks) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def wait(self) -> list[int]:
        """Exit codes of the ranks that were started last."""
        return self._answer()

    def errors(self) -> str:
        return "".join(path.read_text()[-2000:] for path in self._errors.iterdir())

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def _answer(self) -> list[int]:
        assert self._process.stdout is not None
        answer: list[int] = json.loads(self._process.stdout.readline())
        return answer


def _records(run: Path) -> list[CellRecord]:
    return [record for path in sorted((run / "journal").glob("*")) for record in read_journal(path)]


def _kill_at(ranks: list[int], run: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not any(record.step >= step for record in _records(run)):
        time.sleep(0.05)
    for rank in ranks:
        os.kill(rank, signal.SIGKILL)


@pytest.mark.parametrize(
    ("example", "package"),
    [
        ("ddp", "torch"),
        ("fsdp2", "torch"),
        ("lightning_trainer", "pytorch_lightning"),
        ("accelerate_loop", "accelerate"),
        ("hf_trainer", "transformers"),
    ],
)
def test_killed_on_two_ranks_and_continued_on_one_and_on_four(
    example: str, package: str, data: str, undisturbed: dict[tuple[int, int], str], tmp_path: Path
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    (tmp_path / "errors").mkdir()
    with contextlib.closing(_Launcher(example, tmp_path / "errors")) as launcher:
        _continue_on_one_and_on_four(launcher, data, undisturbed, tmp_path)


def _continue_on_one_and_on_four(
    launcher: _Launcher, data: str, undisturbed: dict[tuple[int, int], str], folder: Path
) -> None:
    killed = folder / "killed"
    _kill_at(launcher.start(data, killed, 2, wait_at=16), killed, 12)
    assert launcher.wait() == [-signal.SIGKILL] * 2, launcher.errors()
    paths = {path.name for path in (killed / "journal").glob("*")}
    killed_at = max(record.step for record in _records(killed))
    for world in (1, 4):
        run = shutil.copytree(killed, folder / f"on-{world}")
        launcher.start(data, run, world)
        assert launcher.wait() == [0] * world, launcher.errors()
        found: dict[tuple[int, int], set[str]] = defaultdict(set)
        for record in _records(run):
            found[record.step, record.lane].add(record.digest)
        assert {cell: {digest} for cell, digest in undisturbed.items()} == {
            cell: digests for cell, digests in found.items() if cell in undisturbed
        }
        new = [path for path in (run / "journal").glob("*") if path.name not in paths]
        first = min(record.step for path in new for record in read_journal(path))
        assert 0 < first <= killed_at + 1, "it continues, and does not begin again"


def _run(example: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": "0", "CUDA_VISIBLE_DEVICES": ""}  # fmt: skip
    command = [sys.executable, str(EXAMPLES / f"{example}.py"), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_an_example_makes_its_own_data(tmp_path: Path) -> None:
    done = _run("ddp", "run", "--steps", "3", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), "no warning either"
    assert len(shardkit.open(str(tmp_path / "points"))) == 800
    assert {record.step for record in _records(tmp_path / "run")} >= {0, 1, 2}


def test_an_example_says_which_fields_it_takes(tmp_path: Path) -> None:
    with shardkit.create(str(tmp_path / "other"), schema={"x": "float32[4]", "label": "int64"}) as writer:
        writer.add({"x": np.zeros(4, np.float32), "label": 1})
    done = _run("ddp", "other", "run", folder=tmp_path)
    assert done.returncode == 1
    assert "takes {'x': 'float32[8]', 'y': 'int64'}" in done.stderr
    assert "Traceback" not in done.stderr
    for program in EXAMPLES.glob("*.py"):
        assert program.stem in ("points", "demo") or "shardkit.open(" not in program.read_text(), program.name
