"""Ranks of one machine that go on when one of them dies: the parent of ``parallel.recovery = "in-process"``.

torchrun stops all ranks when one dies. This supervisor tells the survivors to form a new group instead, and starts a
new process in the dead one's place, which joins when it is ready: seconds of import do not hold the others up.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardkit.exit_codes import ExitCode

from .configuration import Configuration
from .distributed import ADDRESS, NAME, publish
from .ending import LIFELINE, on_stop_signals

__all__ = ["supervise"]


class _Supervisor:
    """Children by name, in rank order, and the store that tells them of each other."""

    def __init__(self, script: Sequence[str], config: Configuration, restarts: int):
        self._script, self._config, self._restarts = script, config, restarts
        timeout = timedelta(seconds=config.parallel.timeout_s)
        served: Any = dist.TCPStore  # type: ignore[attr-defined]
        self._store = served("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self._generation, self._started = -1, 0
        self._members: list[str] = []  # of the newest generation
        self._formed: list[str] = []  # of the newest one whose process group stands
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._joining: list[str] = []
        self._stopping_since: float | None = None
        self._finished = False
        # its end tells the children that nobody looks after them any more: only this process holds the other one
        self._lifeline, self._held = os.pipe()

    def run(self, nproc: int) -> int:
        failed = 0
        with on_stop_signals(lambda _number, _frame: self._stop_all()):
            try:
                self._members = [self._start() for _ in range(nproc)]
                self._announce()
                while self._children:
                    if self._store.check([f"formed/{self._generation}"]):
                        self._formed = list(self._members)
                    ended = self._look_after_children()
                    failed = failed or ended
                    self._let_ready_ones_join()
                    self._kill_accused()
                    self._kill_late_ones()
                    time.sleep(0.02)
            finally:
                for child in self._children.values():
                    child.kill()
                    child.wait()
                os.close(self._lifeline)
                os.close(self._held)
        return failed

    def _start(self) -> str:
        name = f"process-{self._started}"
        self._started += 1
        told = {ADDRESS: f"127.0.0.1:{self._store.port}", NAME: name, LIFELINE: str(self._lifeline)}
        command, environment = [sys.executable, *self._script], {**os.environ, **told}
        self._children[name] = subprocess.Popen(command, env=environment, pass_fds=[self._lifeline])
        return name

    def _announce(self) -> None:
        self._generation += 1
        publish(self._store, self._generation, self._members)

    def _look_after_children(self) -> int:
        """Deal with those that have ended; the exit code where the run has failed."""
        ended = {name: child.returncode for name, child in self._children.items() if child.poll() is not None}
        if not ended:
            return 0
        for name in ended:
            del self._children[name]
        if 0 in ended.values() and not self._finished:
            self._dismiss_late_comers()
        gave_up = max(0, *ended.values())
        if self._finished:
            return gave_up
        died = [name for name, code in ended.items() if code < 0]
        if gave_up:
            self._stop_all()  # a rank gave up and said why: so would the others
            return gave_up
        if not died:
            return 0
        for name in died:
            _say(f"{name} was killed by signal {-ended[name]}")
        changed = any(name in died for name in self._members)
        self._members = [name for name in self._members if name not in died]
        self._joining = [name for name in self._joining if name not in died]
        if self._stopping_since is None and self._restarts >= len(died):
            self._restarts -= len(died)
            self._joining += [self._start() for _ in died]
        if not self._members:
            # nobody is left to go on: those that join make the next group, from the newest checkpoint
            self._members, self._joining = self._joining, []
        if self._members and changed:
            self._announce()
        return 0 if self._members else ExitCode.FAILED

    def _dismiss_late_comers(self) -> None:
        """The run has ended: processes that the ranks have not met any more need not begin."""
        self._finished = True
        for name, child in self._children.items():
            if name not in self._formed:
                child.kill()

    def _kill_accused(self) -> None:
        """Ranks that the others of the newest group have found frozen cannot be waited for."""
        key = f"accused/{self._generation}"
        if self._store.check([key]):
            for name in self._store.get(key).decode().split():
                if name in self._children and self._children[name].poll() is None:
                    _say(f"{name} does not answer and is killed")
                    self._children[name].kill()

    def _let_ready_ones_join(self) -> None:
        if self._joining and all(self._store.check([f"ready/{name}"]) for name in self._joining):
            self._members, self._joining = self._members + self._joining, []
            self._announce()

    def _stop_all(self) -> None:
        """Ask every child to save and end; those that join need not begin."""
        self._stopping_since = self._stopping_since or time.monotonic()
        for child in self._children.values():
            child.send_signal(signal.SIGTERM)

    def _kill_late_ones(self) -> None:
        since = self._stopping_since
        if since is not None and time.monotonic() - since > self._config.parallel.shutdown_s:
            for child in self._children.values():
                child.kill()


def _say(text: str) -> None:
    print(f"supervisor: {text}", file=sys.stderr, flush=True)


def supervise(script: Sequence[str], config: Configuration, *, nproc: int, restarts: int) -> int:
    """Run ``python *script`` as ``nproc`` ranks; returns the exit code."""
    return _Supervisor(script, config, restarts).run(nproc)
