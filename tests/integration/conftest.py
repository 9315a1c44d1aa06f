"""Datasets and launches that the trainer's tests share."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from tests.integration.forked import launch_forked

HERE = Path(__file__).parent
MODULES = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
LAUNCH = """
import sys
from shardkit_trainer import launch
sys.exit(launch(None, sys.argv[3:], nproc=int(sys.argv[1]), max_restarts=int(sys.argv[2])))
"""


@pytest.fixture(scope="session")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset of 403 samples in three strata."""
    root = tmp_path_factory.mktemp("numbers") / "data"
    schema = {"value": "int64", "kind": "str"}
    with shardkit.create(
        str(root), schema=schema, stratify="kind", shard_size="2KiB", block_size="256B"
    ) as writer:
        for number in range(403):
            writer.add({"value": number, "kind": "aab"[number % 3] if number % 31 else "c"})
    return str(root)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that the first of the suite's processes to ask fills, for all of them; not to be written to."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / name).exists():
            making = base / f"{name}.making"
            shutil.rmtree(making, ignore_errors=True)
            making.mkdir()
            make(making)
            making.rename(base / name)
    return base / name


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """scikit-learn's digits: every fifth for evaluation."""

    def write(folder: Path) -> None:
        from sklearn.datasets import load_digits

        found = load_digits()
        for name, held_out in (("train", False), ("val", True)):
            with shardkit.create(
                str(folder / name), schema={"image": "uint8[8,8]", "label": "int64"}, stratify="label",
                shard_size="64KiB", block_size="4KiB",
            ) as writer:  # fmt: skip
                for i, (image, label) in enumerate(zip(found.images, found.target, strict=True)):
                    if (i % 5 == 0) == held_out:
                        writer.add({"image": image.astype(np.uint8), "label": int(label)})

    folder = made_once(tmp_path_factory, "digits", write)
    return {name: str(folder / name) for name in ("train", "val")}


def run_until(
    command: list[str], environment: dict[str, str], until: str, asked: signal.Signals | None = None
) -> subprocess.CompletedProcess[str]:
    """Read the output up to the line that holds ``until``, then kill what was started.

    With ``asked``, the command gets that signal instead, and ends by itself.
    """
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    read = []
    for line in process.stdout:
        read.append(line)
        if until in line:
            break
    if asked is not None:
        process.send_signal(asked)
        rest, _ = process.communicate(timeout=300)
        return subprocess.CompletedProcess(command, process.returncode, "".join(read) + rest, "")
    children = descendants(process.pid)
    for pid in (process.pid, *children):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    return subprocess.CompletedProcess(command, 1, "".join(read), "")


def descendants(pid: int) -> list[int]:
    """Children of a process, and theirs."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


Launch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def launch_trainer(tmp_path: Path) -> Launch:
    """Run the trainer with so many ranks and settings as a child; its output and exit code come back.

    Where a signal or a kill is to come, all are processes as users start them; else they are forked.
    """
    launches = count()

    def launch(
        nproc: int,
        settings: dict[str, Any],
        fault: str = "",
        until: str = "",
        restarts: int = 0,
        asked: signal.Signals | None = None,
    ) -> Any:
        """Wait for the end, or until ``until`` is in the output; then all is killed, or gets the signal ``asked``."""
        overrides = arguments_of(settings)
        environment = {**os.environ, "PYTHONPATH": MODULES, "SHARDKIT_TEST_FAULT": fault, "OMP_NUM_THREADS": "1",
                       "PYTHONWARNINGS": "error::UserWarning:shardkit"}  # fmt: skip
        command = [sys.executable, "-c", LAUNCH, str(nproc), str(restarts), *overrides]
        if until:
            return run_until(command, environment, until, asked)
        output = tmp_path / f"agent-{next(launches)}"
        return launch_forked(nproc, overrides, environment, output, restarts)

    return launch


def arguments_of(settings: dict[str, Any]) -> list[str]:
    """As the command takes them."""
    return [f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in settings.items()]


@pytest.fixture
def fork_trainer(tmp_path: Path) -> Launch:
    """Run the trainer likewise, with ranks that are forked: where not the start of processes is what is tested."""
    launches = count()

    def launch(nproc: int, settings: dict[str, Any], fault: str = "") -> Any:
        environment = {**os.environ, "SHARDKIT_TEST_FAULT": fault}
        output = tmp_path / f"launch-{next(launches)}"
        return launch_forked(nproc, arguments_of(settings), environment, output)

    return launch


@pytest.fixture(scope="session")
def slowed_run(digits: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory of two ranks of which one was slowed; not to be written to."""

    def train(folder: Path) -> None:
        settings = {
            "run.directory": folder / "run", "run.steps": 70, "data.dataset": digits["train"], "data.global_batch": 24,
            "data.lanes": 12, "model.kind": "trainer_histogram:straggler", "model.width": 8, "model.stages": 1,
            "parallel.exact": "int64", "parallel.rebalance": True, "parallel.rebalance_every": 8,
            "checkpoint.every": 40, "log.telemetry_s": 0.5, "log.price_per_hour": 36.0,
        }  # fmt: skip
        environment = {**os.environ, "SHARDKIT_TEST_FAULT": "slow:1:45"}
        done = launch_forked(2, arguments_of(settings), environment, folder / "launch")
        assert done.returncode == 0, done.stderr

    return made_once(tmp_path_factory, "slowed", train) / "run"
