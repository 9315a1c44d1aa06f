"""The exit codes of all commands, and the mapping from errors to exit codes.

::

    0    success: clean or repaired; all deviations of an audit are explained
    1    the command failed
    2    wrong command line
    3    unchecked: the dataset, run or location does not exist or does not respond
    4    damaged and not repaired, or lost; an audit found a violation
    5    negative answer: runs diverge, an excluded sample was used, slower, not found or absent, would be lost
    130  interrupted

No error has the code of a success or an answer, except that `AbsentError` is a negative answer.
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
    StoreFullError,
    StoreReadOnlyError,
    UsageError,
)


class ExitCode(IntEnum):
    """Exit code of a command; the meaning of a code never changes between releases."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    UNCHECKED = 3
    DAMAGED = 4
    NO = 5
    INTERRUPTED = 130


def exit_code(error: BaseException, *, checking: bool = False) -> ExitCode:
    """Return the exit code of a command that ends with ``error``.

    Args:
        error: Any exception.
        checking: The command is a check, so a missing dataset or a store that does not answer means "unchecked".
    """
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    if isinstance(error, (IntegrityError, FormatError)):
        return ExitCode.DAMAGED
    if isinstance(error, AbsentError):
        return ExitCode.NO
    if isinstance(error, (StoreFullError, StoreReadOnlyError)):
        return ExitCode.FAILED  # also of a check: it can read, but not write down what it finds
    if checking and isinstance(error, (NotFoundError, StoreError)):
        return ExitCode.UNCHECKED
    # Errors of schemas, samples and plans depend on the data, unless their cause is the value of a setting.
    is_setting = any(isinstance(one, ConfigurationError) for one in (error, error.__cause__))
    if type(error) is UsageError or is_setting:
        return ExitCode.USAGE
    return ExitCode.FAILED
