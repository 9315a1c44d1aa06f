"""Augmentations of one picture after its crop: colours, TrivialAugment, erasing; by Pillow, drawn from its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import ConfigurationError
from shardkit.images.framing import ONE, check_ratio, check_share, random_box
from shardkit.plan import Place, draw, draws
from shardkit.plan.permutation import order

_BINS: Final = 31  # of TrivialAugment's strength
_MEAN: Final = (124, 116, 104)  # of ImageNet, in bytes


@dataclass(frozen=True)
class color_jitter:  # noqa: N801  called like a function
    """Brightness, contrast, saturation and hue, each by a factor around 1, in an order drawn too.

    Args:
        brightness: factors of 1 − brightness to 1 + brightness; contrast and saturation likewise.
        contrast: towards the mean grey.
        saturation: towards the grey picture.
        hue: turns of the colour circle, up to 0.5 either way.

    Raises:
        ConfigurationError: a value out of range.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0

    def __post_init__(self) -> None:
        for name, most in (("brightness", 1), ("contrast", 1), ("saturation", 1), ("hue", 0.5)):
            if not 0 <= getattr(self, name) <= most:
                raise ConfigurationError(f"{name}={getattr(self, name)}: 0 to {most} is expected")

    def __call__(self, pixels: NDArray[np.uint8], place: Place) -> NDArray[np.uint8]:
        from PIL import ImageEnhance

        first, *numbers = draws(place, "color_jitter", 5)
        image = _image(pixels)
        widths = (self.brightness, self.contrast, self.saturation, self.hue)
        shifts = [
            width * (2 * draw(bits, ONE + 1) / ONE - 1) for width, bits in zip(widths, numbers, strict=True)
        ]
        makers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
        for which in order(first, 4).tolist():
            if not widths[which]:
                continue
            image = (
                _turned(image, shifts[3]) if which == 3 else makers[which](image).enhance(1 + shifts[which])
            )
        return np.asarray(image)


@dataclass(frozen=True)
class trivial_augment:  # noqa: N801
    """TrivialAugment, wide (Müller and Hutter 2021): one of 14 operations, of one of 31 strengths."""

    def __call__(self, pixels: NDArray[np.uint8], place: Place) -> NDArray[np.uint8]:
        which, strength, sign = draws(place, "trivial_augment", 3)
        share = draw(strength, _BINS) / (_BINS - 1)
        operation = _OPERATIONS[draw(which, len(_OPERATIONS))]
        return np.asarray(operation(_image(pixels), share, draw(sign, 2) * 2 - 1))


@dataclass(frozen=True)
class random_erasing:  # noqa: N801
    """A box of the picture becomes one colour (Zhong and others 2017).

    Args:
        probability: of a picture to lose a box.
        scale: least and largest share of its area.
        ratio: least and largest width / height.
        value: red, green, blue; by default ImageNet's mean, which is 0 once normalised.

    Raises:
        ConfigurationError: a value out of range.
    """

    probability: float = 0.25
    scale: tuple[float, float] = (0.02, 0.33)
    ratio: tuple[float, float] = (0.3, 3.3)
    value: Sequence[int] = _MEAN

    def __post_init__(self) -> None:
        check_share("probability", self.probability)
        check_ratio(self.scale, self.ratio)
        if len(self.value) != 3 or not all(0 <= one <= 255 for one in self.value):
            raise ConfigurationError(f"value={self.value}: three numbers from 0 to 255 are expected")

    def __call__(self, pixels: NDArray[np.uint8], place: Place) -> NDArray[np.uint8]:
        (chosen,) = draws(place, "random_erasing", 1)
        if draw(chosen, ONE) >= round(self.probability * ONE):
            return pixels
        height, width = pixels.shape[:2]
        box = random_box(height, width, self.scale, self.ratio, place, "random_erasing")
        if box is None:
            return pixels
        left, top, wide, high = box
        erased = pixels.copy()
        erased[top : top + high, left : left + wide] = self.value
        return erased


def _image(pixels: NDArray[np.uint8]) -> Any:
    from PIL import Image

    return Image.fromarray(np.ascontiguousarray(pixels))


def _turned(image: Any, turns: float) -> Any:
    from PIL import Image

    hue, saturation, value = image.convert("HSV").split()
    turned = np.asarray(hue) + np.uint8(round(turns * 255) % 256)  # wraps around
    return Image.merge("HSV", (Image.fromarray(turned), saturation, value)).convert("RGB")


def _affine(image: Any, coefficients: tuple[float, ...]) -> Any:
    from PIL import Image

    return image.transform(image.size, Image.Transform.AFFINE, coefficients, Image.Resampling.NEAREST)


def _enhanced(name: str) -> Callable[[Any, float, int], Any]:
    def apply(image: Any, share: float, sign: int) -> Any:
        from PIL import ImageEnhance

        return getattr(ImageEnhance, name)(image).enhance(1 + sign * 0.99 * share)

    return apply


def _point(name: str, argument: Callable[[float], int] | None = None) -> Callable[[Any, float, int], Any]:
    def apply(image: Any, share: float, sign: int) -> Any:
        from PIL import ImageOps

        operation = getattr(ImageOps, name)
        return operation(image) if argument is None else operation(image, argument(share))

    return apply


_OPERATIONS: Final[Sequence[Callable[[Any, float, int], Any]]] = (
    lambda image, share, sign: image,
    lambda image, share, sign: _affine(image, (1, sign * 0.99 * share, 0, 0, 1, 0)),
    lambda image, share, sign: _affine(image, (1, 0, 0, sign * 0.99 * share, 1, 0)),
    lambda image, share, sign: _affine(image, (1, 0, round(sign * 32 * share), 0, 1, 0)),
    lambda image, share, sign: _affine(image, (1, 0, 0, 0, 1, round(sign * 32 * share))),
    lambda image, share, sign: image.rotate(sign * 135 * share),
    _enhanced("Brightness"),
    _enhanced("Color"),
    _enhanced("Contrast"),
    _enhanced("Sharpness"),
    _point("posterize", lambda share: 8 - round(6 * share)),
    _point("solarize", lambda share: round(255 * (1 - share))),
    _point("autocontrast"),
    _point("equalize"),
)
