"""Which samples a caller means: numbers, slices and lists of them, and what to say of anything else."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import NotFoundError, UsageError

__all__ = ["is_one", "number_of", "numbers_of"]


def is_one(wanted: object) -> bool:
    """Whether a caller asks for one sample, rightly or wrongly, and not for several."""
    if isinstance(wanted, slice | list | range | tuple):
        return False
    return not hasattr(wanted, "__array__") or np.ndim(wanted) == 0


def number_of(wanted: object, count: int, call: str) -> int:
    """One sample number, 0 to `count` - 1; negative ones count from the end.

    Args:
        wanted: what the caller gave: anything with ``__index__`` but a bool.
        count: samples of the dataset.
        call: how the caller gave it, with … in its place: for messages.

    Raises:
        UsageError: no whole number.
        NotFoundError: no such sample.
    """
    if isinstance(wanted, bool):
        raise _refusal(wanted, count, call)
    try:
        number = operator.index(wanted)  # type: ignore[arg-type]
    except TypeError:
        raise _refusal(wanted, count, call) from None
    if not -count <= number < count:
        raise NotFoundError(f"sample {wanted} does not exist: this dataset has samples 0 to {count - 1}")
    return number + count if number < 0 else number


def numbers_of(wanted: Any, count: int, call: str) -> NDArray[np.int64]:
    """Several sample numbers in the caller's order, (n,) int64; see `number_of`.

    Args:
        wanted: a slice, a range, a list or an array of whole numbers.
        count: see `number_of`.
        call: see there.

    Raises:
        UsageError: something else.
        NotFoundError: one of them does not exist. Slices are cut at the ends, as those of lists.
    """
    if isinstance(wanted, slice):
        try:
            return np.arange(*wanted.indices(count), dtype=np.int64)
        except (TypeError, ValueError):
            raise _refusal(wanted, count, call) from None
    if isinstance(wanted, range):
        ends = [number_of(one, count, call) for one in (wanted[0], wanted[-1])] if wanted else []
        wanted = np.arange(wanted.start, wanted.stop, wanted.step) if ends else np.empty(0, np.int64)
    if isinstance(wanted, list):
        if set(map(type, wanted)) == {int} and max(wanted) < 2**63 and min(wanted) >= -(2**63):
            wanted = np.array(wanted, dtype=np.int64)  # checked as a whole
        else:
            inner = call.replace("…", "[…]")
            return np.array([number_of(one, count, inner) for one in wanted], dtype=np.int64)
    if isinstance(wanted, tuple) or not hasattr(wanted, "__array__"):
        raise _refusal(wanted, count, call)
    array = np.asarray(wanted)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise _refusal(wanted, count, call)
    if array.size:
        for end in (int(array.min()), int(array.max())):
            number_of(end, count, call)
    numbers = array.astype(np.int64)
    return np.where(numbers < 0, numbers + count, numbers)


def _refusal(wanted: object, count: int, call: str) -> UsageError:
    shown = f"{wanted!r:.60}".replace("\n", " ")
    if isinstance(wanted, str):
        advice = "a sample is known by its number; `shardkit find ROOT --field key=KEY` finds that of a key"
    elif isinstance(wanted, tuple):
        advice = "several samples are asked for by a list, such as ds[[3, 5, 8]]"
    elif _is_mask(wanted):
        advice = "True and False are no sample numbers; for a mask ask for np.flatnonzero(mask)"
    else:
        advice = "expected a sample number, a slice, or a list or array of sample numbers"
    return UsageError(f"{call.replace('…', shown)}: {advice}; this dataset has samples 0 to {count - 1}")


def _is_mask(wanted: object) -> bool:
    return isinstance(wanted, bool) or str(getattr(wanted, "dtype", "")).endswith("bool")
