"""A job of several machines, each a network namespace: it grows, one machine dies whole, it grows again."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.audit import audit_run
from shardkit.telemetry.records import read_documents
from shardkit_trainer.run_directory import read_steps
from tests.drills import DRILLS, drill_count
from tests.integration.conftest import arguments_of, descendants
from tests.integration.forked import OUTPUT, Forked, become_agent
from tests.integration.histogram_runs import check_histogram, histogram_settings, starts
from tests.servers.serving import free_port

PATIENCE_S = 1500.0
PORT = 29400
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout


def train(settings: list[str], output: Path, fault: str, space: str = "", **options: Any) -> Forked:
    """``shardkit train …``, in a network namespace, forked as its ranks are: each start would import torch."""
    environment = {**os.environ, "SHARDKIT_TEST_FAULT": fault, OUTPUT: str(output)}
    return Forked(become_agent, settings, space, options, environment=environment)


class Machine:
    """A network namespace that is connected to the switch."""

    def __init__(self, number: int, switch: str):
        self.space, self.address = f"{switch}-{number}", f"10.213.7.{number}"
        wire = f"sk{os.getpid() % 100_000}-{number}"
        ip("netns", "add", self.space)
        ip("-n", switch, "link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", self.space)
        ip("-n", switch, "link", "set", wire, "master", "bridge", "up")
        ip("-n", self.space, "address", "add", f"{self.address}/24", "dev", "eth0")
        for one in ("eth0", "lo"):
            ip("-n", self.space, "link", "set", one, "up")

    def train(self, settings: list[str], output: Path, fault: str, **options: Any) -> Forked:
        return train(settings, output, fault, self.space, **options)

    def kill(self) -> None:
        """Everything at once, as when the power fails."""
        for pid in ip("netns", "pids", self.space).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> None:
        self.kill()
        ip("netns", "delete", self.space)


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    """Five machines on one switch."""
    switch, made = f"shardkit-{os.getpid()}", list[Machine]()
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        made += [Machine(number, switch) for number in range(1, 6)]
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    else:
        yield made
    finally:
        for machine in made:
            machine.remove()
        with suppress(OSError, subprocess.CalledProcessError):
            ip("netns", "delete", switch)


def wait_until(holds: Callable[[], bool], outputs: list[Path]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "\n".join(path.read_text() for path in outputs)
        time.sleep(0.05)


def check_result(run: Path, numbers: str) -> Any:
    """Nothing was lost, the ledger explains every repeat, and the weights are those of an undisturbed run."""
    check_histogram(run, numbers)
    assert [one["step"] for one in read_steps(run)] == list(range(30))
    record = audit_run(run, level=None)
    assert record.exit_code == 0, record.findings
    return record


def last_hash(run: Path) -> str:
    ends = [one for one in read_documents(run / "events.jsonl") if one["event"] == "end"]
    return str(ends[-1]["parameters_sha256"])


def test_a_job_grows_loses_a_machine_and_grows_again(
    tmp_path: Path, numbers: str, machines: list[Machine], fork_trainer: Any
) -> None:
    """2 → 3 machines, one is killed, → 4; a rank waits in steps 5, 12, 15 and 17 for the changes."""
    run, plain = tmp_path / "run", tmp_path / "plain"
    every = {"checkpoint.every": 5}
    assert fork_trainer(1, histogram_settings(plain, numbers, **every)).returncode == 0
    arguments = arguments_of(histogram_settings(run, numbers, **every))
    meeting = {"nnodes": "2:4", "rendezvous": f"{machines[0].address}:{PORT}"}
    pace = "hold2:0:5,hold3:2:12,hold2:0:15,hold3:0:17"  # ranks are in the order of addresses
    outputs = [tmp_path / f"machine-{number}.err" for number in range(5)]

    def start(number: int) -> Forked:
        return machines[number].train(arguments, outputs[number].with_suffix(""), pace, **meeting)

    def ranks_of_starts() -> list[int]:
        return [ranks for _, ranks in starts(run)] if (run / "events.jsonl").exists() else []

    def in_step(step: int) -> bool:
        return bool(steps := read_steps(run)) and steps[-1]["step"] >= step - 1

    trainers = [start(0), start(1)]
    wait_until(lambda: ranks_of_starts() == [2] and in_step(5), outputs[:2])
    trainers.append(start(2))
    wait_until(lambda: 3 in ranks_of_starts() and in_step(12), outputs[:3])
    machines[2].kill()
    assert trainers.pop().wait() == -signal.SIGKILL
    wait_until(lambda: ranks_of_starts()[-1] == 2 and in_step(15), outputs[:3])
    trainers += [start(3), start(4)]
    codes = [one.wait(PATIENCE_S) for one in trainers]
    assert codes == [0, 0, 0, 0], [path.read_text() for path in outputs]
    assert "Traceback" not in "".join(path.read_text() for path in outputs)
    found = starts(run)
    assert found[:3] == [(0, 2), (6, 3), (10, 2)], "the third machine's death costs the steps since step 10"
    assert found[-1][1] == 4
    record = check_result(run, numbers)
    grown, lost, *later = [one["repeats"] for one in record.starts[1:]]
    assert (grown, sum(later)) == (0, 0), "who joins costs nothing"
    assert 2 <= lost <= 3
    assert last_hash(run) == last_hash(plain)


@pytest.mark.drill(only=True)
@pytest.mark.timeout(0 if DRILLS else 1800)
def test_random_sequences_of_kills_leaves_and_joins(tmp_path: Path, numbers: str, fork_trainer: Any) -> None:
    """Commands on one machine that meet at one address; the first one serves it and is left alone."""
    random = np.random.Generator(np.random.PCG64(11))
    plain = tmp_path / "plain"
    assert fork_trainer(1, histogram_settings(plain, numbers)).returncode == 0
    for sequence in range(drill_count(20)):
        run, outputs = tmp_path / f"run-{sequence}", list[Path]()
        more = {"checkpoint.every": 4, "parallel.strategy": str(random.choice(["ddp", "zero1", "zero2"]))}
        settings = arguments_of(histogram_settings(run, numbers, **more))
        meeting: dict[str, Any] = {
            "nnodes": "1:4",
            "rendezvous": f"127.0.0.1:{free_port()}",
            "max_restarts": 20,
            "nproc": 1,
        }
        # rank 0 waits, so that whatever happens to the machines happens while the run goes on
        holds = [f"hold{ranks}:0:{random.integers(2, 29)}" for ranks in (1, 2, 2, 3)]

        def start() -> Forked:
            output = run.with_name(f"{run.name}-{len(outputs)}")  # noqa: B023
            outputs.append(output.with_suffix(".err"))  # noqa: B023
            return train(settings, output, ",".join(holds), **meeting)  # noqa: B023

        first, others = start(), list[Forked]()
        wait_until(lambda: (run / "events.jsonl").exists(), outputs)  # noqa: B023
        deadline, actions = time.monotonic() + PATIENCE_S, 0
        while first.poll() is None:
            assert time.monotonic() < deadline, [path.read_text() for path in outputs]
            others = [one for one in others if one.poll() is None]
            actions += 1
            possible = ["join", "join"] if len(others) < 3 else []
            # after six actions nothing is lost any more, and ranks that wait are released
            possible += [] if not others else ["kill", "leave", "kill rank"] if actions <= 6 else ["leave"]
            doing = str(random.choice(possible))
            if doing == "join":
                others.append(start())
            else:
                one = others[random.integers(len(others))]
                assert one.pid is not None
                pids = [*descendants(one.pid), one.pid]
                for pid in (
                    pids[:1] if doing == "kill rank" else pids[-1:] if doing == "leave" else pids[::-1]
                ):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM if doing == "leave" else signal.SIGKILL)
            before, patience = len(starts(run)), time.monotonic() + 60
            while first.poll() is None and len(starts(run)) == before and time.monotonic() < patience:
                time.sleep(0.2)  # an action may have no consequence: it hit a machine that had not joined
        for one in others:
            one.wait(PATIENCE_S)
        assert first.returncode == 0, [path.read_text() for path in outputs]
        check_result(run, numbers)
        assert last_hash(run) == last_hash(plain)
