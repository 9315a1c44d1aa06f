"""Decoders that write a picture directly into its row of the batch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import ConfigurationError
from shardkit.images.decoding import MAX_PIXELS, PictureReader, find_decoder, versions_of
from shardkit.images.framing import CenterCrop, Framing, RandomCrop, View, WholePicture, pair_of
from shardkit.plan import Place

Normalise: TypeAlias = Literal["imagenet"] | tuple[Sequence[float], Sequence[float]] | None
"""Means and standard deviations of the three channels, for values from 0 to 1; None keeps uint8."""

Layout: TypeAlias = Literal["CHW", "HWC"]
"""Order of dimensions: planes, as torch's convolutions take them, or pixels."""

IMAGENET: Final = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class PictureDecoder:
    """A decoder for ``decode=``: the loader allocates (rows, *shape) and passes each call its own row.

    It can be pickled. Its libraries are chosen when it is made, so that a worker process uses the same ones.
    """

    frame: Framing  # chooses the part of each picture
    size: tuple[int, int]  # (height, width)
    normalise: tuple[Sequence[float], Sequence[float]] | None  # mean and standard deviation, or None
    layout: Layout  # of a row
    max_pixels: int  # larger pictures are refused
    orient: bool  # turn pictures as EXIF says
    decoder: str  # the library that decodes
    resizer: str  # the library that resizes
    made_by: str  # the same, with the versions that pixels depend on

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a row: (3, height, width) or (height, width, 3)."""
        return (3, *self.size) if self.layout == "CHW" else (*self.size, 3)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of a row: float32 if it is normalised, otherwise uint8."""
        return np.dtype(np.uint8 if self.normalise is None else np.float32)

    def __call__(self, payload: bytes, *, place: Place, out: NDArray[Any]) -> None:
        """Decode a picture into all of `out`, an array of `shape` and `dtype`.

        Raises:
            FormatError: the bytes are not a picture, are truncated, or have too many pixels.
        """
        reader = PictureReader(payload, self.decoder, self.max_pixels, orient=self.orient)
        view = self.frame(reader.height, reader.width, place)
        pixels = reader.pixels(shrink=view.shrink, bottom=view.top + view.height)
        shrunk = 1 if pixels.shape[1] == reader.width else view.shrink
        seen = _resize_view(pixels, view, self.size, self.resizer, shrunk)
        if self.layout == "CHW":
            seen = seen.transpose(2, 0, 1)
        if self.normalise is None:
            out[...] = seen
        else:
            mean, factor = scaling(self.normalise, self.layout)
            np.subtract(seen, mean, out=out)
            out *= factor

    def for_device(self, device: Any) -> tuple[PictureDecoder, Callable[[Any], Any]] | None:
        """Return a decoder of uint8 rows and a function that normalises a batch of them on a torch device.

        Returns None if this decoder does not normalise.
        """
        if self.normalise is None:
            return None
        import torch

        mean, factor = (torch.from_numpy(one).to(device) for one in scaling(self.normalise, self.layout))
        # two rounded operations, as on the host, for bit-identical results
        return replace(self, normalise=None), lambda rows: torch.sub(rows, mean).mul_(factor)


def scaling(
    normalise: tuple[Sequence[float], Sequence[float]], layout: Layout
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the float32 arrays to subtract from and multiply with uint8 pixels; both broadcast over a row."""
    shape = (3, 1, 1) if layout == "CHW" else (3,)
    mean, deviation = (np.array(values, dtype=np.float64).reshape(shape) * 255 for values in normalise)
    return mean.astype(np.float32), (1 / deviation).astype(np.float32)


def random_resized_crop(
    size: int | tuple[int, int],
    *,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: float = 0.5,
    normalise: Normalise = None,
    layout: Layout = "CHW",
    max_pixels: int = MAX_PIXELS,
    orient: bool = False,
) -> PictureDecoder:
    """Return a decoder for training: crops a random box, resizes it with antialiasing and mirrors it at random.

    The box depends only on (seed, step, lane, slot) and is computed in integers, so it is the same on every machine.

    Args:
        size: pixels of each side of the result, or (height, width).
        scale: smallest and largest share of the picture's area.
        ratio: smallest and largest width / height; its logarithm is drawn uniformly.
        flip: probability that the picture is mirrored.
        normalise: ``"imagenet"`` or (means, deviations) for float32 rows; None for uint8 rows.
        layout: order of dimensions of a row.
        max_pixels: pictures with more pixels are refused.
        orient: turn and mirror the picture according to its EXIF orientation before it is cropped.

    Raises:
        ConfigurationError: a value is out of range.
        MissingDependency: Pillow is not installed.
    """
    pair = pair_of(size)
    framing = RandomCrop(pair, scale, ratio, flip)
    return _decoder(framing, pair, normalise, layout, max_pixels, orient)


def resize_center_crop(
    shorter: int,
    size: int | tuple[int, int],
    *,
    normalise: Normalise = None,
    layout: Layout = "CHW",
    max_pixels: int = MAX_PIXELS,
    orient: bool = False,
) -> PictureDecoder:
    """Return a decoder for validation: resizes the shorter side to `shorter` pixels and crops the middle.

    Args:
        shorter: pixels of the shorter side.
        size: pixels of each side of the result, or (height, width); at most `shorter`.
        normalise: see `random_resized_crop`.
        layout: see `random_resized_crop`.
        max_pixels: see `random_resized_crop`.
        orient: see `random_resized_crop`.

    Raises:
        ConfigurationError: a value is out of range.
        MissingDependency: Pillow is not installed.
    """
    pair = pair_of(size)
    return _decoder(CenterCrop(shorter, pair), pair, normalise, layout, max_pixels, orient)


def resize(
    size: int | tuple[int, int],
    *,
    normalise: Normalise = None,
    layout: Layout = "CHW",
    max_pixels: int = MAX_PIXELS,
    orient: bool = False,
) -> PictureDecoder:
    """Return a decoder that resizes the whole picture without keeping its aspect ratio.

    Args:
        size: pixels of each side of the result, or (height, width).
        normalise: see `random_resized_crop`.
        layout: see `random_resized_crop`.
        max_pixels: see `random_resized_crop`.
        orient: see `random_resized_crop`.

    Raises:
        ConfigurationError: a value is out of range.
        MissingDependency: Pillow is not installed.
    """
    pair = pair_of(size)
    return _decoder(WholePicture(pair), pair, normalise, layout, max_pixels, orient)


def _decoder(
    framing: Framing,
    size: tuple[int, int],
    normalise: Normalise,
    layout: Layout,
    max_pixels: int,
    orient: bool,
) -> PictureDecoder:
    if layout not in ("CHW", "HWC"):
        raise ConfigurationError(f"layout={layout!r}: 'CHW' or 'HWC' is expected")
    if max_pixels < 1:
        raise ConfigurationError(f"max_pixels={max_pixels}: 1 or more is expected")
    chosen = _check_normalise(normalise)
    decoder, resizer = find_decoder(), _find_resizer()
    made_by = versions_of(decoder, "pillow", resizer)
    return PictureDecoder(framing, size, chosen, layout, max_pixels, orient, decoder, resizer, made_by)


def _check_normalise(normalise: Normalise) -> tuple[Sequence[float], Sequence[float]] | None:
    if normalise is None:
        return None
    found = IMAGENET if normalise == "imagenet" else normalise
    try:
        mean, deviation = (tuple(float(value) for value in values) for values in found)
    except (TypeError, ValueError):
        mean = deviation = ()
    if len(mean) != 3 or len(deviation) != 3 or not all(value > 0 for value in deviation):
        raise ConfigurationError(
            f"normalise={normalise!r}: None, 'imagenet' or three means and three deviations above 0 are expected"
        )
    return mean, deviation


# ---- resizing with antialiasing, by torch's uint8 kernel or by Pillow's; the two differ by at most one level


def _find_resizer() -> str:
    """Return the library that resizes: "torch" if it is installed, which takes a third of the time, or "pillow"."""
    return "pillow" if importlib.util.find_spec("torch") is None else "torch"


def _resize_view(
    pixels: NDArray[np.uint8], view: View, size: tuple[int, int], resizer: str, shrunk: int
) -> NDArray[np.uint8]:
    """Return the view of a picture, (*size, 3) uint8 with arbitrary strides, in new memory."""
    left, top, wide, high = (edge // shrunk for edge in view[:4])
    resize = _by_torch if resizer == "torch" else _by_pillow
    return resize(pixels[top : top + high, left : left + wide], view, size)


def _by_torch(box: NDArray[np.uint8], view: View, size: tuple[int, int]) -> NDArray[np.uint8]:
    import torch

    # a contiguous channels-last batch of one picture: for other strides torch makes planes, which is slower
    planes = torch.from_numpy(np.ascontiguousarray(box)).view(1, *box.shape).permute(0, 3, 1, 2)
    if box.shape[:2] == view.resized:
        seen = planes.clone()
    else:
        seen = torch.nn.functional.interpolate(planes, view.resized, mode="bilinear", antialias=True)
    top, left = view.cut
    seen = seen[0, :, top : top + size[0], left : left + size[1]]
    if view.flip:
        seen = seen.flip(2)
    found: NDArray[np.uint8] = seen.permute(1, 2, 0).numpy()
    return found


def _by_pillow(box: NDArray[np.uint8], view: View, size: tuple[int, int]) -> NDArray[np.uint8]:
    from PIL import Image

    (top, left), (high, wide) = view.cut, view.resized
    down, right = box.shape[0] / high, box.shape[1] / wide
    edges = (left * right, top * down, (left + size[1]) * right, (top + size[0]) * down)
    image = Image.fromarray(box).resize((size[1], size[0]), Image.Resampling.BILINEAR, box=edges)
    return np.array(image)[:, ::-1] if view.flip else np.array(image)
