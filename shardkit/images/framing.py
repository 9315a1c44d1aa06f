"""Choice of the box of a picture and its size, computed in integers that are equal on every machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache
from math import isqrt
from typing import Final, NamedTuple, TypeAlias

from shardkit.errors import ConfigurationError
from shardkit.plan import Place, draw, draws

_CROP: Final = "random_resized_crop"
_TRIES: Final = 10
ONE: Final = 1 << 32  # 1 in fixed point
_RATIOS: Final = 1024  # number of aspect ratios to draw from, evenly spaced in their logarithm
_SHARP: Final = 3  # a picture scaled in decoding to this multiple of its target is ≥ 50 dB from Pillow's


class View(NamedTuple):
    """A box of the picture, its size after resizing, and the position of the crop in the result; all in pixels."""

    left: int
    top: int
    width: int
    height: int
    resized: tuple[int, int]  # (height, width) of the resized box
    cut: tuple[int, int] = (0, 0)  # (top, left) of the crop in the resized box
    shrink: int = 1  # decoding may scale the picture down by this factor; divides the box
    flip: bool = False


Framing: TypeAlias = Callable[[int, int, Place], View]
"""Maps (height, width, place) to the view of a picture."""


@dataclass(frozen=True)
class RandomCrop:
    """Inception's crop: a random share of the area with a random aspect ratio; after ten failed tries the middle.

    Each sample has 41 draws: one for the flip and four for each try.
    """

    size: tuple[int, int]
    scale: tuple[float, float]
    ratio: tuple[float, float]
    flip: float

    def __post_init__(self) -> None:
        scale, ratio = self.scale, self.ratio
        if not 0 < scale[0] <= scale[1] <= 1:
            raise ConfigurationError(
                f"scale={scale}: shares of the area, 0 < least <= most <= 1, are expected"
            )
        if not 0 < ratio[0] <= ratio[1]:
            raise ConfigurationError(f"ratio={ratio}: width / height, 0 < least <= most, is expected")
        if not 0 <= self.flip <= 1:
            raise ConfigurationError(f"flip={self.flip}: a probability from 0 to 1 is expected")

    def __call__(self, height: int, width: int, place: Place) -> View:
        flip = draw(draws(place, _CROP, 1)[0], ONE) < round(self.flip * ONE)
        box = self._box(height, width, place)
        if box is not None:
            left, top, wide, high = box
            shrink = _shrink(high, wide, self.size)
            left, top, wide, high = (edge - edge % shrink for edge in box)
            return View(left, top, wide, high, self.size, shrink=shrink, flip=flip)
        wide, high = width, height  # the middle, with the allowed ratio nearest to the picture's own
        low, tall = _ratios(self.ratio)[0], _ratios(self.ratio)[-1]
        if wide * ONE < low * high:
            high = max(1, wide * ONE // low)
        elif wide * ONE > tall * high:
            wide = max(1, high * tall // ONE)
        return View((width - wide) // 2, (height - high) // 2, wide, high, self.size, flip=flip)

    def _box(self, height: int, width: int, place: Place) -> tuple[int, int, int, int] | None:
        """Return (left, top, width, height) of a random box from draws 1 to 40; None if no try fits."""
        least, most = (round(share * ONE) for share in self.scale)
        for attempt in range(_TRIES):
            a, b, c, d = draws(place, _CROP, 4, first=1 + 4 * attempt)
            area = height * width * (least + draw(a, most - least + 1))  # fixed point
            drawn = _ratios(self.ratio)[draw(b, _RATIOS)]
            wide, high = _rounded_root(area * drawn, ONE * ONE), _rounded_root(area, drawn)
            if 0 < wide <= width and 0 < high <= height:
                return draw(c, width - wide + 1), draw(d, height - high + 1), wide, high
        return None


@dataclass(frozen=True)
class CenterCrop:
    """The middle of the picture after its shorter side is resized to `shorter` pixels."""

    shorter: int
    size: tuple[int, int]

    def __post_init__(self) -> None:
        if max(self.size) > self.shorter:
            raise ConfigurationError(
                f"resize_center_crop({self.shorter}, {max(self.size)}): the crop is larger than the resized picture"
            )

    def __call__(self, height: int, width: int, place: Place) -> View:
        short = min(height, width)
        resized = self.shorter * height // short, self.shorter * width // short
        cut = round((resized[0] - self.size[0]) / 2), round((resized[1] - self.size[1]) / 2)
        return View(0, 0, width, height, resized, cut, _whole_shrink(height, width, resized))


@dataclass(frozen=True)
class WholePicture:
    """The whole picture, without keeping its aspect ratio."""

    size: tuple[int, int]

    def __call__(self, height: int, width: int, place: Place) -> View:
        return View(0, 0, width, height, self.size, shrink=_whole_shrink(height, width, self.size))


def pair_of(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return (height, width) in pixels; raise ConfigurationError unless both are from 1 to 16,384."""
    high, wide = (size, size) if isinstance(size, int) else size
    if not (1 <= high <= 16_384 and 1 <= wide <= 16_384):
        raise ConfigurationError(f"size={size!r}: pixels or (height, width) are expected, 1 to 16384 each")
    return high, wide


@lru_cache(maxsize=16)
def _ratios(bounds: tuple[float, float]) -> tuple[int, ...]:
    """Return the aspect ratios in fixed point; `decimal` rounds exp and ln correctly, C libraries may not."""
    with localcontext() as context:
        context.prec = 28
        low, high = (Decimal(bound).ln() for bound in bounds)
        step = (high - low) / (_RATIOS - 1)
        return tuple(round((low + step * number).exp() * ONE) for number in range(_RATIOS))


def _rounded_root(value: int, over: int) -> int:
    """Return the integer nearest to √(value / over)."""
    return (isqrt(4 * value // over) + 1) // 2


def _shrink(high: int, wide: int, size: tuple[int, int]) -> int:
    """Return the factor (1, 2, 4 or 8) that decoding may use to scale a box down."""
    spare = min(high // size[0], wide // size[1]) // _SHARP
    return 1 << min(3, max(1, spare).bit_length() - 1)


def _whole_shrink(height: int, width: int, resized: tuple[int, int]) -> int:
    shrink = _shrink(height, width, resized)
    while height % shrink or width % shrink:  # otherwise the last row or column would stand for a part of one
        shrink //= 2
    return shrink
