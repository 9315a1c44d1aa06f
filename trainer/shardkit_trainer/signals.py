"""Stop requests to a rank, and the exit code that says why it ended."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

RESTART = 75
"""Exit code (EX_TEMPFAIL) of a rank that saved and ended because another rank was asked to stop."""

LAUNCHER = "SHARDKIT_LAUNCHER"
"""Environment variable: process id of the command that started the rank."""


@contextmanager
def on_stop_signals(handler: Callable[[int, object], None], *, ending: bool = False) -> Iterator[None]:
    """Send SIGTERM and SIGINT to ``handler`` inside the context; outside the main thread, do nothing.

    Args:
        handler: called with the signal's number and the frame.
        ending: ignore both signals afterwards. The process ends next, and its exit code must show how training ended.
    """
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT) if main}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, signal.SIG_IGN if ending else earlier)


class StopRequest:
    """A request to end this rank after the current step.

    A signal requests it. So does the death of the command that started the rank, since no other process can stop it.
    """

    def __init__(self) -> None:
        self._asked = threading.Event()
        launcher = int(os.environ.get(LAUNCHER, "0"))
        self.launcher = launcher if launcher == os.getppid() else 0  # 0: no command started this rank

    def ask(self, number: int = signal.SIGTERM, _frame: object = None) -> None:
        """Handle a signal; the second SIGINT interrupts at once."""
        if self._asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._asked.set()

    def is_set(self) -> bool:
        return self._asked.is_set() or bool(self.launcher and os.getppid() != self.launcher)
