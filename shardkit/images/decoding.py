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

Mode = Literal["RGB", "L"]
"""Pixels of three bytes, or of one."""

MAX_PIXELS: Final = 89_478_485
"""Pillow's own limit: a quarter of a gibibyte of RGB."""

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_JPEG, _END = b"\xff\xd8\xff", b"\xff\xd9"
_FRAMES: Final = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive; Huffman-coded all
_NO_MORE: Final = b"\xff\xd8" * (
    1 << 15
)  # pictures begun inside the picture, more than one segment can pass over
_SEGMENTS: Final = frozenset(range(0xC0, 0xFF)) - frozenset(
    range(0xD0, 0xDB)
)  # with a length; before the scan
_COLOURS: Final = {"RGB": "RGB", "L": "GRAY"}
_ORIENTATION: Final = 0x0112  # EXIF tag
_EXIF_BYTES: Final = 1 << 17  # two segments: Exif stands in the first or second
_KEPT_BYTES: Final = 32 << 20  # a larger picture gets memory of its own
_scratch = threading.local()


def decode_picture(payload: bytes, mode: Mode = "RGB") -> NDArray[np.uint8]:
    """The whole picture: (height, width, 3) uint8, or (height, width) for "L"."""
    return PictureReader(payload).pixels(mode, own=True)


class PictureReader:
    """One picture: its size from its header, and its pixels, in full or scaled down while they are decoded.

    Args:
        payload: JPEG, PNG, WebP, GIF, BMP, TIFF or PPM; of several frames the first.
        decoder: as `find_decoder` names it.
        max_pixels: a picture of more is refused before memory is taken for it.
        orient: turn and mirror it as its EXIF orientation says; such a picture is decoded whole, by Pillow.

    Raises:
        FormatError: the bytes are no picture, or have too many pixels.
    """

    def __init__(
        self, payload: bytes, decoder: str = "", max_pixels: int = MAX_PIXELS, *, orient: bool = False
    ) -> None:
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
        if orient and (turned := _turned(payload)) is not None:
            self._image, self.height, self.width = turned, turned.height, turned.width

    def pixels(
        self, mode: Mode = "RGB", *, shrink: int = 1, bottom: int = 0, own: bool = False
    ) -> NDArray[np.uint8]:
        """(⌈height / shrink⌉, ⌈width / shrink⌉, 3) uint8, without the 3 for "L".

        Transparency is dropped, CMYK and 16 bits are converted, as Pillow does.
        """
        if self._image is None:
            decoded = self._by_turbo(mode, shrink, bottom or self.height, own)
            if decoded is not None:
                return decoded
            self._image = _open(self._payload)  # whether what libjpeg warns of is an error is Pillow's to say
        image: Any = self._image
        try:
            image.draft(mode, (max(1, self.width // shrink), max(1, self.height // shrink)))
            return np.array(image.convert(mode))
        except Exception as error:  # damaged pictures raise a dozen kinds, MemoryError among them
            raise _unreadable(error) from error

    def _by_turbo(self, mode: Mode, shrink: int, bottom: int, own: bool) -> NDArray[np.uint8] | None:
        import simplejpeg

        rows = (
            bottom + 2 * shrink
        )  # smooth upsampling of colour looks one row of the scaled colour planes further
        cut = _of_height(self._payload, rows) if rows < self.height else None
        high, wide = -(-(self.height if cut is None else rows) // shrink), -(-self.width // shrink)
        need = high * wide * len(mode)  # one byte for each letter
        buffer = np.empty(need, np.uint8) if own or need > _KEPT_BYTES else _buffer(need)
        last = buffer[max(need - 16, need - wide * len(mode)) : need]  # of the last row
        last[:] = range(1, 1 + len(last))
        unwritten = last.tobytes()
        try:
            decoded: NDArray[np.uint8] = simplejpeg.decode_jpeg(
                cut or self._payload, _COLOURS[mode], min_height=high, min_width=wide, strict=cut is None, buffer=buffer
            )  # fmt: skip
        except (ValueError, MemoryError):
            return None
        if cut and (last.tobytes() == unwritten or decoded.shape[:2] != (high, wide)):
            return None  # an error after a warning passes for a warning
        return decoded[..., 0] if mode == "L" else decoded


def _of_height(payload: bytes, rows: int) -> bytes | None:
    """The JPEG with another height in its header, which is where libjpeg ends: its first rows come out the same.

    It warns of the data that it skips, so other warnings go unheard: as in Pillow, which heeds none, unless data ends
    before the picture does. For libjpeg that is a warning too, so what follows the picture is an error to read.
    None: there is no plain frame in the header, or the data has no end.
    """
    at = 2
    while at + 7 <= len(payload) and payload[at] == 0xFF and payload[at + 1] in _SEGMENTS:
        if payload[at + 1] in _FRAMES:
            view = memoryview(payload)
            parts = (view[: at + 5], rows.to_bytes(2, "big"), view[at + 7 :], _NO_MORE)
            return b"".join(parts) if payload.endswith(_END) else None
        at += 2 + int.from_bytes(payload[at + 2 : at + 4], "big")
    return None


def find_decoder() -> str:
    """What decodes JPEGs here: "simplejpeg", or "pillow" without it."""
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


def _turned(payload: bytes) -> Any:
    """The picture as its EXIF orientation says; None where that is how it is stored, or EXIF cannot be read."""
    from PIL import ImageOps

    if b"Exif" not in payload[:_EXIF_BYTES] and payload[:3] == _JPEG:
        return None  # spares most pictures a second look by Pillow
    image = _open(payload)
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001  damaged EXIF raises a dozen kinds; the picture itself may be sound
        return None
    if orientation not in range(2, 9):
        return None
    try:
        return ImageOps.exif_transpose(image)
    except Exception as error:
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> FormatError:
    if type(error).__name__ == "UnidentifiedImageError":  # whose text is an address in memory
        return FormatError(f"a picture cannot be decoded: its bytes are none of {', '.join(_FORMATS)}")
    return FormatError(f"a picture cannot be decoded: {type(error).__name__}: {error}")


def _buffer(need: int) -> NDArray[np.uint8]:
    """Memory of this thread: to touch fresh pages for each picture costs a tenth of decoding it."""
    kept: NDArray[np.uint8] | None = getattr(_scratch, "kept", None)
    if kept is None or len(kept) < need:
        kept = _scratch.kept = np.empty(need, np.uint8)
    return kept
