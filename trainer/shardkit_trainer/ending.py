"""What ends a process from outside: stop signals, and the death of the supervisor that started it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LIFELINE = "SHARDKIT_LIFELINE"
"""Environment variable: descriptor of a pipe whose other end the supervisor holds as long as it lives."""


def end_with_supervisor(name: str) -> None:
    """End this process as soon as its supervisor has died; nothing where it has none.

    Nobody can tell such a rank of a new group, and what it waits for may never come. What it has written is safe
    wherever it stops: a checkpoint that is being written was not there yet.
    """
    descriptor = int(os.environ.pop(LIFELINE, "-1"))

    def follow() -> None:
        os.read(descriptor, 1)  # nothing is ever written: it returns when the other end is closed
        advice = "start the run again: it goes on from its newest checkpoint"
        os.write(2, f"{name}: run: the supervisor has died, and this rank ends; {advice}\n".encode())
        os._exit(1)

    if descriptor >= 0:
        threading.Thread(target=follow, name="lifeline", daemon=True).start()


@contextmanager
def on_stop_signals(handler: Callable[[int, object], None]) -> Iterator[None]:
    """SIGTERM and SIGINT go to ``handler`` inside; only in a process's main thread, elsewhere nothing changes."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT) if main}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
