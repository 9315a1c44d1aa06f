"""How processes of a run end: by stop signals, with the one that started them, or as torchrun reports it.

``python -m shardkit_trainer.agent …`` is torchrun whose failed ranks are a line each, and that does not outlive the
command.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardkit.exit_codes import ExitCode

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


def main(arguments: list[str]) -> int:
    """Run torchrun with its own arguments; returns the exit code."""
    # its loggers take their levels from here when they are made; what it has to say is said below, in a line
    os.environ.setdefault("LOGLEVEL", "CRITICAL")
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    try:
        run.main(arguments)
    except SignalException:
        return ExitCode.INTERRUPTED
    except ChildFailedError as error:
        codes = set()
        for rank, failure in sorted(error.failures.items()):
            code = failure.exitcode
            codes.add(code)
            ended = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
            print(f"torchrun: rank {rank} (process {failure.pid}) {ended}", file=sys.stderr, flush=True)
        # the others were stopped by a signal, or failed in turn because one was gone
        told = {ExitCode(code) for code in codes & {*ExitCode}} - {ExitCode.FAILED}
        return told.pop() if len(told) == 1 else ExitCode.FAILED
    return ExitCode.DONE


def _follow(parent: int) -> None:
    """Stop the ranks (they save) when the command that started them is gone."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
