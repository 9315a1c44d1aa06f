"""A job of several machines, each a network namespace: one dies whole, the others go on, it comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.audit import audit_run
from shardkit.telemetry.records import read_documents
from tests.integration.conftest import MODULES, arguments_of
from tests.integration.test_trainer_recovery import expected, histogram, settings, starts

PATIENCE_S = 300.0
ADDRESSES = {"a": "10.213.7.1", "b": "10.213.7.2"}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout


class Machine:
    """A network namespace, with nothing but a wire to the other one."""

    def __init__(self, name: str):
        self.space = f"shardkit-{os.getpid()}-{name}"
        ip("netns", "add", self.space)

    def connect(self, interface: str, address: str) -> None:
        ip("link", "set", interface, "netns", self.space)
        ip("-n", self.space, "address", "add", f"{address}/24", "dev", interface)
        for one in (interface, "lo"):
            ip("-n", self.space, "link", "set", one, "up")

    def train(self, *arguments: str, output: Path, fault: str = "") -> subprocess.Popen[bytes]:
        """``shardkit train …`` on this machine."""
        environment = {
            **os.environ,
            "PYTHONPATH": MODULES,
            "SHARDKIT_TEST_FAULT": fault,
            "OMP_NUM_THREADS": "1",
        }
        command = [str(Path(sys.executable).with_name("shardkit")), "train", *arguments]
        with output.open("wb") as told:
            inside = ["ip", "netns", "exec", self.space, *command]
            return subprocess.Popen(inside, env=environment, stdout=told, stderr=subprocess.STDOUT)

    def kill(self) -> None:
        """Everything at once, as when the power fails."""
        for pid in ip("netns", "pids", self.space).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> None:
        self.kill()
        ip("netns", "delete", self.space)


@pytest.fixture
def machines() -> Iterator[dict[str, Machine]]:
    made: dict[str, Machine] = {}
    wires = {name: f"sk{os.getpid() % 100_000}{name}" for name in ADDRESSES}
    try:
        made |= {name: Machine(name) for name in ADDRESSES}
        ip("link", "add", wires["a"], "type", "veth", "peer", "name", wires["b"])
        for name, machine in made.items():
            machine.connect(wires[name], ADDRESSES[name])
    except (OSError, subprocess.CalledProcessError) as error:
        for machine in made.values():
            machine.remove()
        pytest.skip(f"network namespaces cannot be made here: {error}")
    yield made
    for machine in made.values():
        machine.remove()


def until(holds: Callable[[], bool], process: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert process.poll() is None, output.read_text()
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.05)


def test_a_machine_dies_whole_and_comes_back(
    tmp_path: Path, numbers: str, machines: dict[str, Machine], fork_trainer: Any
) -> None:
    """The first machine's rank waits in steps 3, 8 and 12 for the groups to come; nothing is lost or repeated."""
    run, plain = tmp_path / "run", tmp_path / "plain"
    assert fork_trainer(1, settings(plain, numbers)).returncode == 0
    outputs = {name: tmp_path / name for name in ("first", "second", "back")}
    pace = "group1:0:3,group2:0:8,group3:0:12"
    (tmp_path / "run.toml").write_text("")
    given = [str(tmp_path / "run.toml"), *arguments_of(settings(run, numbers))]
    first = machines["a"].train(*given, output=outputs["first"], fault=pace)
    until((run / "job.json").exists, first, outputs["first"])
    assert ADDRESSES["a"] in (run / "job.json").read_text()
    second = machines["b"].train("--join", str(run), output=outputs["second"])
    until(lambda: len(starts(run)) == 2, second, outputs["second"])
    time.sleep(1.0)  # the second machine's rank is in step 8, or on its way
    machines["b"].kill()
    assert second.wait() == -signal.SIGKILL
    until(lambda: len(starts(run)) == 3, first, outputs["first"])
    back = machines["b"].train("--join", str(run), output=outputs["back"])
    assert (first.wait(PATIENCE_S), back.wait(PATIENCE_S)) == (0, 0), [
        o.read_text() for o in outputs.values()
    ]
    assert "does not answer: the others go on without it" in outputs["first"].read_text()
    assert [ranks for _, ranks in starts(run)] == [1, 2, 1, 2]
    np.testing.assert_allclose(histogram(run), expected(numbers), rtol=0, atol=1e-6)
    ends = [
        one for path in (run, plain) for one in read_documents(path / "events.jsonl") if one["event"] == "end"
    ]
    assert ends[0]["parameters_sha256"] == ends[1]["parameters_sha256"]
    steps = [one["step"] for one in read_documents(run / "metrics" / "train.jsonl")]
    assert steps == list(range(30)), "a step was taken twice"
    record = audit_run(run, level=None)
    assert not [one for one in record.findings if one.severity != "note"], record.findings
    assert [one["repeats"] for one in record.starts[1:]] == [0, record.starts[2]["repeats"], 0]
