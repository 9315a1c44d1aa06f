"""Read lists of keys, values or sample numbers from the command line or from text files, one per line.

All commands use this reader. `shardkit.dataset.lookups.list_samples` finds the samples that a list names.
"""

from __future__ import annotations

import os
import stat
import unicodedata
from pathlib import Path
from typing import Annotated, Final

from shardkit.dataset import Dataset
from shardkit.dataset.lookups import KEY, list_samples
from shardkit.errors import AbsentError, SourceError, UsageError
from shardkit_tools.options import option

MAX_BYTES: Final = 1 << 30
_QUOTES: Final = "\"'`´«»‘’‚“”„‹›"
_JOINERS: Final = "\u200c\u200d"  # parts of words and of emoji

AbsentOption = Annotated[
    bool, option("--allow-absent", "Leave out entries of the list that the dataset does not hold.")
]


def read_values(path: Path, *, may_be_empty: bool = False, quoted: bool = False) -> list[str]:
    """Return the values of a text file, one per line.

    If `quoted`, a value may be a JSON string.

    The file is UTF-8, with or without a byte order mark. Empty lines are skipped. Lines with control characters, or
    with blanks or quotes at either end, are refused, since these may or may not belong to the value.

    Raises:
        SourceError: the file cannot be read, holds no value, or a line is refused.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not block us
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                raise SourceError(f"{path}: expected a regular file of at most {MAX_BYTES >> 20} MiB")
            text = file.read(MAX_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SourceError(
            f"{path}: cannot be read ({reason}); give a UTF-8 text file, one value a line"
        ) from error
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    values = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            wrong = _wrong_with(line, quoted=quoted)
            if wrong:
                raise SourceError(f"{path} line {number}: {line[:80]!r} {wrong}; remove it")
            values.append(line)
    if not values and not may_be_empty:
        raise SourceError(f"{path}: holds no line; give a text file with one value a line")
    return values


def split_values(text: str, name: str) -> list[str]:
    """Return the comma-separated values of an option.

    Raises:
        UsageError: a value is empty, or is refused as in `read_values`.
    """
    values = text.split(",")
    for value in values:
        wrong = _wrong_with(value) if value else "is empty"
        if wrong:
            raise UsageError(
                f"{name}: {value[:80]!r} {wrong}; remove it, or give a file with one value a line"
            )
    return values


def _wrong_with(text: str, *, quoted: bool = False) -> str:
    for character in text:
        kind = unicodedata.category(character)
        if kind in ("Cc", "Cs", "Zl", "Zp") or (kind == "Cf" and character not in _JOINERS):
            return f"holds the control character U+{ord(character):04X}"
    if text != text.strip():
        return "begins or ends with a blank"
    if not quoted and (text[0] in _QUOTES or text[-1] in _QUOTES):
        return "begins or ends with a quote"
    return ""


def sample_number(dataset: Dataset, text: str, field: str | None = None) -> int:
    """Return the number of the sample that a text names by number or by key.

    Raises:
        AbsentError: the dataset has no such sample.
        UsageError: the text is the number of one sample and the key of another.
    """
    if field is None:
        is_key = len(list_samples(dataset, [text], KEY).samples)
        field = None if is_key or not text.isdecimal() else "number"
    listed = list_samples(dataset, [text], field)
    if listed.absent:
        raise AbsentError(
            f"--sample: {text[:80]!r} is neither a key nor a number of a sample of this dataset"
        )
    return int(listed.samples[0])
