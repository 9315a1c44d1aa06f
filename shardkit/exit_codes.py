"""How a command ends: the one table of exit codes, and the one place that gives an error its code.

::

    0    done: clean, or made clean; an audit whose deviations are all explained
    1    could not do its work
    2    wrong command line
    3    could not check: a dataset, run or location that is asked about is not there or does not answer
    4    damaged and not repaired, lost; or an audit violated
    5    the answer is no: runs diverge, an excluded sample was used, slower, not found or absent, would be lost
    130  interrupted

An error never shares a code with a success or an answer.
"""

from __future__ import annotations

from enum import IntEnum

from shardkit.errors import (
    AbsentError,
    ConfigurationError,
    FormatError,
    IntegrityError,
    NotFoundError,
    StoreError,
    UsageError,
)


class ExitCode(IntEnum):
    """See above; the meaning of a code never changes between releases."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    UNCHECKED = 3
    DAMAGED = 4
    NO = 5
    INTERRUPTED = 130


def exit_code(error: BaseException, *, checking: bool = False) -> ExitCode:
    """What a command that ends with ``error`` tells a script.

    Args:
        error: anything that was raised.
        checking: the command's work is to find out whether something is sound, so what it cannot reach is unchecked.
    """
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    if isinstance(error, (IntegrityError, FormatError)):
        return ExitCode.DAMAGED
    if isinstance(error, AbsentError):
        return ExitCode.NO
    if checking and isinstance(error, (NotFoundError, StoreError)):
        return ExitCode.UNCHECKED
    # Schemas, samples and plans fail by what the data is; these two by what was typed alone.
    if type(error) is UsageError or isinstance(error, ConfigurationError):
        return ExitCode.USAGE
    return ExitCode.FAILED
