"""Trainer processes that are forked from one with torch in it: a start costs no import, which takes seconds of CPU.

For tests of what ranks do. How processes are started and ended (torchrun, the command, its signals) is tested with
processes that start as users start them.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.servers.serving import free_port

sys.path.append(
    str(Path(__file__).parent)
)  # settings name models of these modules, here and in forked processes
PRELOADED = [__name__, "trainer_ranks", "trainer_histogram", "shardkit_trainer.training", "torch._dynamo"]
"""The last is what the first optimizer of a process imports: half of what a short run costs."""
multiprocessing.set_forkserver_preload(PRELOADED)
OUTPUT = "SHARDKIT_TEST_OUTPUT"
"""Environment variable: where a forked process writes what it prints, with .out and .err behind it."""


class Forked:
    """What is asked of `subprocess.Popen`, for ``work(*arguments)`` in a forked process of that environment."""

    def __init__(
        self,
        work: Callable[..., None],
        *arguments: Any,
        environment: Mapping[str, str],
        method: str = "forkserver",
    ):
        context: Any = multiprocessing.get_context(method)
        self._process: BaseProcess = context.Process(target=_work, args=(dict(environment), work, *arguments))
        self._process.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self._process.name), timeout or 0)
        return self.returncode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, number)


def _work(environment: dict[str, str], work: Callable[..., None], *arguments: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    if OUTPUT in environment:
        for number, kind in ((1, "out"), (2, "err")):
            descriptor = os.open(f"{environment[OUTPUT]}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, number)
            os.close(descriptor)
    warnings.filterwarnings("error", category=UserWarning, module=r"shardkit\Z")
    with patch.object(os, "fsync", lambda _descriptor: None):  # as tests/conftest.py has it
        work(*arguments)


def become_rank(arguments: Sequence[str]) -> None:
    """``python -m shardkit_trainer …``."""
    from shardkit_trainer.__main__ import main

    sys.exit(main(list(arguments)))


def become_agent(overrides: Sequence[str], space: str, options: Mapping[str, Any]) -> None:
    """``shardkit train`` with several ranks, which its agent starts, watches and restarts: they are forked too.

    With ``space``, in that network namespace.
    """
    if space:
        with open(f"/run/netns/{space}", "rb") as entered:
            assert ctypes.CDLL(None).setns(entered.fileno(), 0x40000000) == 0  # CLONE_NEWNET
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    from shardkit_trainer import launch

    def start(_handler: object, arguments: Sequence[str], environment: Mapping[str, str]) -> Forked:
        # after python -m shardkit_trainer; a fork server of the agent would import torch for itself
        return Forked(_lead_session, arguments[3:], environment=environment, method="fork")

    with patch.object(SubprocessHandler, "_popen", start):
        sys.exit(launch(None, overrides, **options))


def _lead_session(arguments: Sequence[str]) -> None:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in a process of its own: the agent's handler raises
    become_rank(arguments)


def become_command(arguments: Sequence[str]) -> None:
    """``shardkit …``."""
    from shardkit_tools.main import run

    run(arguments)


def become_program(folder: Path, words: Sequence[str]) -> None:
    """``python words…`` in a folder."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.argv = list(words)
    runpy.run_path(words[0], run_name="__main__")


def train_alone(overrides: Sequence[str]) -> None:
    """``shardkit train`` with one rank."""
    from shardkit_trainer import launch

    sys.exit(launch(None, overrides, nproc=1))


def start_ranks(
    ranks: int, work: Callable[..., None], *arguments: Any, environment: Mapping[str, str]
) -> list[Forked]:
    """Processes of one group, which are told of each other as torchrun tells them."""
    group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        Forked(work, *arguments, environment={**environment, **group, "RANK": str(n), "LOCAL_RANK": str(n)})
        for n in range(ranks)
    ]


def side_by_side(
    ranks: int, work: Callable[..., None], *arguments: Any, environment: Mapping[str, str]
) -> list[int | None]:
    """Exit codes of so many ranks of one group."""
    return [one.wait() for one in start_ranks(ranks, work, *arguments, environment=environment)]


def launch_forked(
    nproc: int,
    overrides: Sequence[str],
    environment: Mapping[str, str],
    output: Path,
    restarts: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """`shardkit_trainer.launch` with forked ranks; without `restarts` none is killed where another has died."""
    environment = {**environment, OUTPUT: str(output)}
    if restarts is not None:
        options = {"nproc": nproc, "max_restarts": restarts}
        code = Forked(become_agent, overrides, "", options, environment=environment).wait() or 0
    elif nproc == 1:
        code = Forked(train_alone, overrides, environment=environment).wait() or 0
    else:
        code = max(code or 0 for code in side_by_side(nproc, become_rank, overrides, environment=environment))
    paths = [output.with_name(f"{output.name}.{kind}") for kind in ("out", "err")]
    out, err = (path.read_text() if path.exists() else "" for path in paths)
    return subprocess.CompletedProcess(["forked", *overrides], code, out, err)
