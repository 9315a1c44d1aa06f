"""Decoding of pictures: JPEGs by libjpeg-turbo from simplejpeg's wheel, other formats by Pillow."""

from __future__ import annotations

import importlib.util
import io
import threading
from importlib.metadata import version
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import FormatError, MissingDependency
from shardkit.extras import install_command

Mode = Literal["RGB", "L"]
"""Three bytes per pixel, or one."""

MAX_PIXELS: Final = 89_478_485
"""Default limit of pixels per picture; Pillow's own limit, a quarter of a gibibyte of RGB."""

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_JPEG, _END = b"\xff\xd8\xff", b"\xff\xd9"
_FRAMES: Final = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive; all Huffman-coded
_NO_MORE: Final = b"\xff\xd8" * (
    1 << 15
)  # start-of-image markers, which libjpeg rejects; longer than one segment can skip
_SEGMENTS: Final = frozenset(range(0xC0, 0xFF)) - frozenset(
    range(0xD0, 0xDB)
)  # segments before the scan that have a length
_COLOURS: Final = {"RGB": "RGB", "L": "GRAY"}
_ORIENTATION: Final = 0x0112  # EXIF tag
_EXIF_BYTES: Final = 1 << 17  # two segments; Exif is in the first or second
_KEPT_BYTES: Final = 32 << 20  # larger pictures get new memory
_scratch = threading.local()


def decode_picture(payload: bytes, mode: Mode = "RGB") -> NDArray[np.uint8]:
    """Decode a whole picture to (height, width, 3) uint8, or (height, width) for "L".

    Raises:
        FormatError: the bytes are not a picture, are damaged, or have too many pixels.
    """
    return PictureReader(payload).pixels(mode, own=True)


class PictureReader:
    """One picture: its size from the header, and its pixels, optionally scaled down during decoding.

    Args:
        payload: JPEG, PNG, WebP, GIF, BMP, TIFF or PPM; the first of several frames is taken.
        decoder: library that decodes JPEGs, as `find_decoder` returns it; "" looks it up.
        max_pixels: pictures with more pixels are refused before memory is allocated.
        orient: turn and mirror according to the EXIF orientation; Pillow decodes such a picture whole.

    Attributes:
        height: rows of the picture, after it is turned.
        width: columns of the picture, after it is turned.

    Raises:
        FormatError: the bytes are not a picture, or have too many pixels.
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
        if orient and (turned := _turn(payload)) is not None:
            self._image, self.height, self.width = turned, turned.height, turned.width

    def pixels(
        self, mode: Mode = "RGB", *, shrink: int = 1, bottom: int = 0, own: bool = False
    ) -> NDArray[np.uint8]:
        """Return the pixels: (rows, columns, 3) uint8, or (rows, columns) for "L".

        Transparency is dropped, and CMYK is converted, as Pillow does. The upper 8 bits of 16-bit grey levels are
        kept, as Pillow and libpng do for colours of 16 bits; Pillow's own conversion makes all levels from 255 on
        white.

        Args:
            mode: colours of the result.
            shrink: 1, 2, 4 or 8; the result may be smaller by this factor or have full size.
            bottom: rows below this one may be missing; 0 for all rows.
            own: return new memory; otherwise it may be a buffer that this thread's next picture overwrites.

        Raises:
            FormatError: the picture is damaged.
        """
        if self._image is None:
            decoded = self._by_turbo(mode, shrink, bottom or self.height, own)
            if decoded is not None:
                return decoded
            self._image = _open(self._payload)  # Pillow decides whether a warning of libjpeg is an error
        image: Any = self._image
        try:
            image.draft(mode, (max(1, self.width // shrink), max(1, self.height // shrink)))
            if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
                image = _of_eight_bits(image)
            return np.array(image.convert(mode))
        except Exception as error:  # damaged pictures raise a dozen types of errors, MemoryError among them
            raise _unreadable(error) from error

    def _by_turbo(self, mode: Mode, shrink: int, bottom: int, own: bool) -> NDArray[np.uint8] | None:
        import simplejpeg

        rows = bottom + 2 * shrink  # smooth upsampling reads one more row of the colour planes
        cut = _of_height(self._payload, rows) if rows < self.height else None
        high, wide = -(-(self.height if cut is None else rows) // shrink), -(-self.width // shrink)
        need = high * wide * len(mode)  # one byte per letter of the mode
        buffer = np.empty(need, np.uint8) if own or need > _KEPT_BYTES else _buffer(need)
        last = buffer[max(need - 16, need - wide * len(mode)) : need]  # end of the last row
        last[:] = range(1, 1 + len(last))
        unwritten = last.tobytes()
        try:
            decoded: NDArray[np.uint8] = simplejpeg.decode_jpeg(
                cut or self._payload, _COLOURS[mode], min_height=high, min_width=wide, strict=cut is None, buffer=buffer
            )  # fmt: skip
        except (ValueError, MemoryError):
            return None
        if cut and (last.tobytes() == unwritten or decoded.shape[:2] != (high, wide)):
            return None  # simplejpeg reports an error after a warning like a warning
        return decoded[..., 0] if mode == "L" else decoded


def _of_height(payload: bytes, rows: int) -> bytes | None:
    """Return the JPEG with height `rows` in its header, so that libjpeg stops there; the rows before it are the same.

    libjpeg warns about the data that it skips, so other warnings cannot be noticed. Pillow ignores warnings too, except
    for data that ends before the picture. libjpeg only warns about that, so markers that it rejects are appended.
    Returns None if the header has no Huffman-coded frame, or the data has no end-of-image marker.
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
    """Return the library that decodes JPEGs: "simplejpeg" if it is installed, otherwise "pillow".

    Raises:
        MissingDependency: Pillow is not installed.
    """
    if importlib.util.find_spec("PIL") is None:
        raise MissingDependency(f"decoding pictures needs Pillow; run: {install_command('images')}")
    return "pillow" if importlib.util.find_spec("simplejpeg") is None else "simplejpeg"


def versions_of(*packages: str) -> str:
    """Return the versions of the packages that pixels depend on, such as "pillow 13.0.0, torch 2.13.0"."""
    return ", ".join(f"{name} {version(name)}" for name in dict.fromkeys(packages))


def _jpeg_size(payload: bytes) -> tuple[int, int] | None:
    """Return (height, width) of a JPEG that simplejpeg decodes; None for CMYK and other pictures."""
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


def _of_eight_bits(image: Any) -> Any:
    """Return a grey picture of 16 bits with the upper 8 of each level."""
    from PIL import Image

    levels = np.asarray(image)  # Pillow reads some files of 16 bits into 32
    return Image.fromarray((levels.astype(np.uint16) >> 8).astype(np.uint8))


def _turn(payload: bytes) -> Any:
    """Return the picture turned by its EXIF orientation; None if it needs no turn or EXIF cannot be read."""
    from PIL import ImageOps

    if b"Exif" not in payload[:_EXIF_BYTES] and payload[:3] == _JPEG:
        return None  # most pictures need not be opened by Pillow again
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
    if type(error).__name__ == "UnidentifiedImageError":  # its text is a memory address
        return FormatError(f"a picture cannot be decoded: its bytes are none of {', '.join(_FORMATS)}")
    return FormatError(f"a picture cannot be decoded: {type(error).__name__}: {error}")


def _buffer(need: int) -> NDArray[np.uint8]:
    """Return this thread's buffer; touching new pages for each picture costs a tenth of decoding it."""
    kept: NDArray[np.uint8] | None = getattr(_scratch, "kept", None)
    if kept is None or len(kept) < need:
        kept = _scratch.kept = np.empty(need, np.uint8)
    return kept
