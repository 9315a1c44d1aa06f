"""Samples of a batch mixed with one another, inside their cell: the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import ConfigurationError
from shardkit.plan import Place, cell_key, draw, draws
from shardkit.plan.permutation import order

_PARTS: Final = 256  # in which shares are counted
_QUANTILES: Final = 1024


class _Places(Protocol):
    """What the loader hands to a batch transform."""

    cell_size: int

    def place(self, index: int) -> Place: ...
    def __len__(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class _Mix:
    """What both ways to mix share."""

    classes: int
    alpha: float = 1.0
    image: str = "image"
    label: str = "label"

    def __post_init__(self) -> None:
        if not 0.01 <= self.alpha <= 100 or self.classes < 1:
            raise ConfigurationError(
                f"alpha={self.alpha}, classes={self.classes}: 0.01 to 100, and 1 or more"
            )

    def __call__(self, fields: dict[str, Any], places: _Places) -> Mapping[str, Any]:
        pictures, labels = fields[self.image], np.asarray(fields[self.label])
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.classes:
            raise ConfigurationError(f"classes={self.classes}, and field {self.label!r} holds {labels.max()}")
        name, mixed = type(self).__name__, np.empty_like(pictures)
        shares = np.zeros((len(labels), self.classes), dtype=np.float32)
        for one, other in _partners(places, name):
            place = places.place(one)
            share = self._mix(mixed[one], pictures[one], pictures[other], place, name)
            shares[one, labels[one]] += share
            shares[one, labels[other]] += 1 - share
        return {**fields, self.image: mixed, self.label: shares}

    def _mix(
        self, out: NDArray[Any], one: NDArray[Any], other: NDArray[Any], place: Place, name: str
    ) -> float:
        raise NotImplementedError

    def _parts(self, bits: int) -> int:
        return _beta(self.alpha)[draw(bits, _QUANTILES)]


class mixup(_Mix):  # noqa: N801  called like a function
    """A `batch_transform` that blends every picture with another of its cell (Zhang and others 2018).

    Labels become (rows, classes) float32 shares. Cells are the same whoever works them, and so is what is mixed.

    Args:
        classes: how many there are.
        alpha: shares are drawn from Beta(alpha, alpha), in 256ths.
        image: field of pictures, (rows, 3, height, width), uint8 or float32.
        label: field of integers.

    Raises:
        ConfigurationError: a value out of range, or cells of one sample, which has nobody to be mixed with.
    """

    def _mix(
        self, out: NDArray[Any], one: NDArray[Any], other: NDArray[Any], place: Place, name: str
    ) -> float:
        parts = self._parts(*draws(place, name, 1))
        if out.dtype == np.uint8:  # 255 · 256 + 128 fits
            blend = one * np.uint16(parts) + other * np.uint16(_PARTS - parts) + np.uint16(_PARTS // 2)
            np.right_shift(blend, 8, out=out, casting="unsafe")
        else:
            np.multiply(one, np.float32(parts / _PARTS), out=out)
            out += other * np.float32(1 - parts / _PARTS)
        return parts / _PARTS


class cutmix(_Mix):  # noqa: N801
    """A `batch_transform` that pastes a box of another picture of the cell into each (Yun and others 2019).

    Arguments, labels and errors are those of `mixup`.
    """

    def _mix(
        self, out: NDArray[Any], one: NDArray[Any], other: NDArray[Any], place: Place, name: str
    ) -> float:
        bits, down, right = draws(place, name, 3)
        height, width = out.shape[1:]
        rest = _PARTS - self._parts(bits)
        high, wide = (isqrt(side * side * rest // _PARTS) for side in (height, width))
        top, left = draw(down, height) - high // 2, draw(right, width) - wide // 2
        rows, columns = slice(max(0, top), max(0, top + high)), slice(max(0, left), max(0, left + wide))
        out[...] = one
        out[:, rows, columns] = other[:, rows, columns]
        return 1 - int(out[0, rows, columns].size) / int(height * width)


def _partners(places: _Places, name: str) -> Iterator[tuple[int, int]]:
    """(row, the row that it is mixed with): one circle through each cell, in an order that the cell draws."""
    if places.cell_size < 2:
        raise ConfigurationError(
            f"{name}: cells of one sample have nobody to mix; make the plan with fewer lanes"
        )
    cells: dict[int, list[int]] = {}
    for row in range(len(places)):
        cells.setdefault(places.place(row).lane, []).append(row)
    for rows in cells.values():
        circle = [rows[i] for i in order(cell_key(places.place(rows[0]), name), len(rows)).tolist()]
        yield from zip(circle, circle[1:] + circle[:1], strict=True)


@lru_cache(maxsize=8)
def _beta(alpha: float) -> tuple[int, ...]:
    """Quantiles of Beta(alpha, alpha) in 256ths, so coarse that no C library rounds them otherwise."""
    from scipy.special import betaincinv

    found = betaincinv(alpha, alpha, (np.arange(_QUANTILES) + 0.5) / _QUANTILES)
    return tuple(int(one) for one in np.round(found * _PARTS))
