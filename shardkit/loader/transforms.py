"""User functions over samples and batches, with randomness that does not depend on who runs them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import RunError
from shardkit.formats import sha256_digest

__all__ = ["BatchTransform", "SampleTransform", "apply_to_samples", "sample_generator", "stack_samples"]

SampleTransform = Callable[[dict[str, Any], np.random.Generator], Mapping[str, Any]]
BatchTransform = Callable[[dict[str, Any], "LazyGenerators"], Mapping[str, Any]]


def sample_generator(seed: int, step: int, lane: int, slot: int) -> np.random.Generator:
    """The random generator of one place in the grid: the same on any rank, worker or resume.

    Philox keyed by SHA-256 of the place; for augmentation only, plans never draw from it.
    """
    digest = bytes.fromhex(
        sha256_digest(struct.pack("<qqqq", seed, step, lane, slot)).removeprefix("sha256:")
    )
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest[:16], dtype=np.uint64)))


class LazyGenerators(Sequence[np.random.Generator]):
    """The generators of a batch's samples, each made only when it is asked for."""

    def __init__(self, seed: int, step: int, slots: NDArray[np.int64], cell_size: int) -> None:
        self._seed, self._step, self._slots, self._cell_size = seed, step, slots, cell_size

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        lane, slot = divmod(int(self._slots[index]), self._cell_size)
        return sample_generator(self._seed, self._step, lane, slot)


def apply_to_samples(
    transform: SampleTransform,
    fields: Mapping[str, Any],
    samples: NDArray[np.int64],
    generators: LazyGenerators,
    pool: ThreadPoolExecutor | None,
) -> dict[str, Any]:
    """`transform(sample, rng)` over every row, in order, stacked again.

    Raises:
        RunError: the transform raised; names the sample.
    """
    columns = {name: _rows(value) for name, value in fields.items()}

    def one(position: int) -> Mapping[str, Any]:
        sample = {name: row(position) for name, row in columns.items()}
        try:
            return transform(sample, generators[position])
        except Exception as error:
            raise RunError(
                f"the transform failed on sample {int(samples[position])}: {type(error).__name__}: {error}"
            ) from error

    positions = range(len(samples))
    return stack_samples(list(pool.map(one, positions) if pool is not None else map(one, positions)))


def _rows(value: Any) -> Callable[[int], Any]:
    if isinstance(value, tuple):
        values, borders = value
        return lambda i: values[borders[i] : borders[i + 1]]
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return lambda i: value[i].item()
    return lambda i: value[i]


def stack_samples(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows → columns: numbers and equal-shaped arrays are stacked, everything else becomes a list."""
    if not samples:
        return {}
    result: dict[str, Any] = {}
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        first = values[0]
        if hasattr(first, "__array__") and not isinstance(first, np.ndarray):
            values = [np.asarray(value) for value in values]
            first = values[0]
        if isinstance(first, np.ndarray):
            same = all(v.shape == first.shape and v.dtype == first.dtype for v in values)
            result[name] = np.stack(values) if same else values
        elif isinstance(first, (bool, int, float, np.generic)):
            result[name] = np.array(values)
        else:
            result[name] = values
    return result
