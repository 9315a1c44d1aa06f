"""Each example is killed and resumed at another world size, and consumes exactly the plan."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import shardkit
from shardkit.ledger import CellRecord, read_journal

pytest.importorskip("torch")
pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 40  # of 25 an epoch
sys.path.append(str(EXAMPLES))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = str(tmp_path_factory.mktemp("data") / "points")
    import_module("points").make_points(Path(root))
    return root


def _start(example: str, data: str, run: Path, world: int) -> list[subprocess.Popen[bytes]]:
    """The ranks as torchrun would start them, without its minutes of retry after a kill."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(world):
        environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                       "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                       "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true",
                       "HF_HUB_OFFLINE": "1"}  # fmt: skip
        command = [sys.executable, str(EXAMPLES / f"{example}.py"), data, str(run), "--steps", str(STEPS)]
        ranks.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        )
    return ranks


def _records(run: Path) -> list[CellRecord]:
    return [record for path in sorted((run / "journal").glob("*")) for record in read_journal(path)]


def _kill_at(ranks: list[subprocess.Popen[bytes]], run: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and all(rank.poll() is None for rank in ranks):
        if any(record.step >= step for record in _records(run)):
            break
        time.sleep(0.01)
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
    for rank in ranks:
        assert rank.stderr is not None
        rank.stderr.close()
        rank.wait(30)


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
def test_killed_and_resumed_at_another_world_size(
    example: str, package: str, data: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    plan = shardkit.open(data).plan(global_batch=32, lanes=8, seed=1)
    run = tmp_path / "run"
    _kill_at(_start(example, data, run, 2), run, 12)
    paths = set((run / "journal").glob("*"))
    killed_at = max(record.step for record in _records(run))
    for rank in _start(example, data, run, 1):
        _, errors = rank.communicate(timeout=300)
        assert rank.returncode == 0, errors.decode()[-2000:]
    records = _records(run)
    resumed = [r for path in sorted(set((run / "journal").glob("*")) - paths) for r in read_journal(path)]
    assert all(record.digest == plan.cell_digest(record.step, record.lane) for record in records)
    cells = {(record.step, record.lane) for record in records}
    assert {(step, lane) for step in range(STEPS) for lane in range(8)} <= cells
    assert 0 < min(record.step for record in resumed) <= killed_at + 1  # it went on, and did not begin again


def _run(example: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # fmt: skip
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
