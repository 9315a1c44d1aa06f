"""torchrun as ``shardkit train`` starts it: failed ranks are a line each, and it does not outlive the command."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time

from shardkit.exit_codes import ExitCode


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
