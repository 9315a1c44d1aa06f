"""Values, keys and sample numbers as people give them: on the command line, or in files, one a line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardkit.dataset import Dataset
from shardkit.errors import NotFoundError, SourceError


def read_lines(path: Path, *, may_be_empty: bool = False) -> list[str]:
    """The lines of a UTF-8 file without their ends; empty ones are left out."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(
            f"{path}: cannot be read ({error}); give a text file with one value a line"
        ) from error
    if not lines and not may_be_empty:
        raise SourceError(f"{path}: holds no line; give a text file with one value a line")
    return [line.removesuffix("\r") for line in lines]


def read_numbers(path: Path, count: int, *, may_be_empty: bool = False) -> NDArray[np.int64]:
    """Sample numbers below ``count``, ascending, each once."""
    numbers = set()
    for text in " ".join(read_lines(path, may_be_empty=may_be_empty)).split():
        if not text.isascii() or not text.isdecimal() or int(text) >= count:
            raise SourceError(f"{path}: {text[:40]!r} is not a sample number; expected 0 to {count - 1}")
        numbers.add(int(text))
    return np.array(sorted(numbers), dtype=np.int64)


def sample_number(dataset: Dataset, text: str) -> int:
    """The number of a sample that is named by its number or its key."""
    from shardkit.audit import resolve_samples

    if text.isdecimal():
        return int(text)
    samples, _, _ = resolve_samples(dataset, "key", [text])
    if not len(samples):
        raise NotFoundError(f"no sample has the key {text!r}")
    return int(samples[0])
