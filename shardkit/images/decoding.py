"""Bytes of a picture → pixels: JPEGs by libjpeg-turbo in simplejpeg's wheel, the rest by Pillow."""

from __future__ import annotations

import importlib.util
import io
import threading
from importlib.metadata import version
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import ConfigurationError, FormatError, MissingDependency

__all__ = [
    "MAX_PIXELS",
    "Mode",
    "PictureReader",
    "check_pixels",
    "decode_picture",
    "find_decoder",
    "versions_of",
]

Mode = Literal["RGB", "L"]
"""Pixels of three bytes, or of one."""

MAX_PIXELS: Final = 89_478_485
"""Pillow's own limit: a quarter of a gibibyte of RGB."""

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_JPEG = b"\xff\xd8\xff"
_COLOURS: Final = {"RGB": "RGB", "L": "GRAY"}
_KEPT_BYTES: Final = 32 << 20  # a larger picture gets memory of its own
_scratch = threading.local()


def decode_picture(payload: bytes, mode: Mode = "RGB") -> NDArray[np.uint8]:
    """The whole picture: (height, width, 3) uint8, or (height, width) for "L".

    Raises:
        FormatError: the bytes are no picture, are cut short, or have more than `MAX_PIXELS` pixels.
    """
    return PictureReader(payload).pixels(mode, own=True)


class PictureReader:
    """One picture: its size from its header, and its pixels, in full or scaled down while they are decoded.

    Args:
        payload: JPEG, PNG, WebP, GIF, BMP, TIFF or PPM; of several frames the first.
        decoder: as `find_decoder` names it.
        max_pixels: a picture of more is refused before memory is taken for it.

    Raises:
        FormatError: the bytes are no picture, or have too many pixels.
    """

    def __init__(self, payload: bytes, decoder: str = "", max_pixels: int = MAX_PIXELS) -> None:
        self._payload, self._image = payload, None
        found = _jpeg_size(payload) if (decoder or find_decoder()) == "simplejpeg" else None
        if found is None:
            self._image = image = _open(payload)
            found = image.height, image.width
        self.height, self.width = found
        if self.height * self.width > max_pixels:
            raise FormatError(
                f"a picture of {self.width} × {self.height} pixels; at most {max_pixels:,} are decoded: pass "
                "max_pixels= if it is one"
            )

    def pixels(self, mode: Mode = "RGB", *, shrink: int = 1, own: bool = False) -> NDArray[np.uint8]:
        """(⌈height / shrink⌉, ⌈width / shrink⌉, 3) uint8, without the 3 for "L".

        EXIF is not looked at, transparency is dropped, CMYK and 16 bits are converted: all as Pillow does it.

        Args:
            mode: of the pixels.
            shrink: 1, 2, 4 or 8: a JPEG's cosine transform gives the smaller picture at once. Other formats are
                decoded in full where it is not 1; look at the shape.
            own: the array is the caller's; else it is good until this thread decodes the next picture.

        Raises:
            FormatError: the bytes are cut short, or damaged where Pillow minds.
        """
        if self._image is None:
            decoded = self._by_turbo(mode, shrink, own)
            if decoded is not None:
                return decoded
            self._image = _open(self._payload)  # whether what libjpeg warns of is an error is Pillow's to say
        image: Any = self._image
        try:
            image.draft(mode, (max(1, self.width // shrink), max(1, self.height // shrink)))
            return np.array(image.convert(mode))
        except Exception as error:  # damaged pictures raise a dozen kinds, MemoryError among them
            raise _unreadable(error) from error

    def _by_turbo(self, mode: Mode, shrink: int, own: bool) -> NDArray[np.uint8] | None:
        import simplejpeg

        high, wide = -(-self.height // shrink), -(-self.width // shrink)
        need = high * wide * len(mode)  # one byte for each letter
        try:
            decoded: NDArray[np.uint8] = simplejpeg.decode_jpeg(
                self._payload, _COLOURS[mode], min_height=high, min_width=wide,
                buffer=None if own or need > _KEPT_BYTES else _buffer(need),
            )  # fmt: skip
        except (ValueError, MemoryError):
            return None
        return decoded[..., 0] if mode == "L" else decoded


def find_decoder() -> str:
    """What decodes JPEGs here: "simplejpeg", or "pillow" without it.

    Raises:
        MissingDependency: there is no Pillow.
    """
    if importlib.util.find_spec("PIL") is None:
        raise MissingDependency('decoding pictures needs Pillow; run: pip install "shardkit[images]"')
    return "pillow" if importlib.util.find_spec("simplejpeg") is None else "simplejpeg"


def versions_of(*packages: str) -> str:
    """What pixels depend on, for the record of a run: "pillow 13.0.0, torch 2.13.0"."""
    return ", ".join(f"{name} {version(name)}" for name in dict.fromkeys(packages))


def check_pixels(max_pixels: int) -> None:
    """Raise ConfigurationError for a limit that is none."""
    if max_pixels < 1:
        raise ConfigurationError(f"max_pixels={max_pixels}: 1 or more is expected")


def _jpeg_size(payload: bytes) -> tuple[int, int] | None:
    """(height, width) of a JPEG that simplejpeg takes: neither CMYK nor anything else that Pillow has to look at."""
    if payload[:3] != _JPEG:
        return None
    import simplejpeg

    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(payload)
    except ValueError:
        return None
    return (height, width) if colours in ("YCbCr", "Gray", "RGB") else None


def _open(payload: bytes) -> Any:
    from PIL import Image

    try:
        return Image.open(io.BytesIO(payload), formats=_FORMATS)
    except Exception as error:
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> FormatError:
    if type(error).__name__ == "UnidentifiedImageError":  # whose text is an address in memory
        return FormatError(f"a picture cannot be decoded: its bytes are none of {', '.join(_FORMATS)}")
    return FormatError(f"a picture cannot be decoded: {type(error).__name__}: {error}")


def _buffer(need: int) -> bytearray:
    """Memory of this thread: to touch fresh pages for each picture costs a tenth of decoding it."""
    kept: bytearray | None = getattr(_scratch, "kept", None)
    if kept is None or len(kept) < need:
        kept = _scratch.kept = bytearray(need)
    return kept
