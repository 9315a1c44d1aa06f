"""Datasets and launches that the trainer's tests share."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from tests.integration.forked import launch_forked

HERE = Path(__file__).parent
MODULES = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))


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


def descendants(pid: int) -> list[int]:
    """Children of a process, and theirs."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


Launch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def launch_trainer(tmp_path: Path) -> Launch:
    """Run the trainer with so many ranks and settings, forked under a forked agent; its output and exit code."""
    launches = count()

    def launch(nproc: int, settings: dict[str, Any], fault: str = "", restarts: int = 0) -> Any:
        environment = {**os.environ, "SHARDKIT_TEST_FAULT": fault}
        output = tmp_path / f"agent-{next(launches)}"
        return launch_forked(nproc, arguments_of(settings), environment, output, restarts)

    return launch


@pytest.fixture
def fork_trainer(tmp_path: Path) -> Launch:
    """Run the trainer likewise, without an agent: no rank is stopped or started again where another has died."""
    launches = count()

    def launch(nproc: int, settings: dict[str, Any], fault: str = "") -> Any:
        environment = {**os.environ, "SHARDKIT_TEST_FAULT": fault}
        output = tmp_path / f"launch-{next(launches)}"
        return launch_forked(nproc, arguments_of(settings), environment, output)

    return launch


def arguments_of(settings: dict[str, Any]) -> list[str]:
    """As the command takes them."""
    return [f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in settings.items()]


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
