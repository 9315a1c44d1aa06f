"""Decoders by name: stored bytes → what a model takes. Each raises where the bytes are not what its name says."""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import ConfigurationError, MissingDependency
from shardkit.formats import Schema

__all__ = ["DECODERS", "Decoder", "find_decoders"]

Decoder: TypeAlias = Callable[[Any], Any]
"""Stored value → what the model takes."""

_IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")


def _image(payload: bytes, mode: str) -> NDArray[np.uint8]:
    from PIL import Image

    with Image.open(io.BytesIO(payload), formats=_IMAGE_FORMATS) as image:
        image.draft(mode, None)  # lets the JPEG decoder leave out what the mode does not need
        return np.array(image.convert(mode))


def rgb8(payload: bytes) -> NDArray[np.uint8]:
    """An image file → (height, width, 3) uint8."""
    return _image(payload, "RGB")


def gray8(payload: bytes) -> NDArray[np.uint8]:
    """An image file → (height, width) uint8."""
    return _image(payload, "L")


def numpy_file(payload: bytes) -> NDArray[Any]:
    """The bytes of a .npy file → its array; object arrays are refused (they hold pickles)."""
    array: NDArray[Any] = np.load(io.BytesIO(payload), allow_pickle=False)
    return array


def json_value(payload: bytes | str) -> Any:
    """JSON text → Python values."""
    return json.loads(payload)


def text(payload: bytes) -> str:
    """UTF-8 → str."""
    return payload.decode("utf-8")


DECODERS: Mapping[str, Decoder] = {
    "rgb8": rgb8,
    "gray8": gray8,
    "numpy": numpy_file,
    "json": json_value,
    "text": text,
}
"""Those that are there, by name."""


def find_decoders(decode: Mapping[str, str | Decoder], schema: Schema) -> dict[str, Decoder]:
    """Decoders by field.

    Raises:
        ConfigurationError: an unknown name, or a field that is not bytes (json: str too).
        MissingDependency: images need Pillow.
    """
    found: dict[str, Decoder] = {}
    for name, wanted in decode.items():
        if name not in schema:
            raise ConfigurationError(f"decode: {name!r} is not in the schema; it has {', '.join(schema)}")
        if schema[name].kind not in ("bytes", "str"):
            raise ConfigurationError(
                f"decode: {name!r} is {schema[name]}; only bytes and str fields are decoded"
            )
        if not isinstance(wanted, str):
            found[name] = wanted
            continue
        if wanted not in DECODERS:
            raise ConfigurationError(
                f"decode: {name!r} has decoder {wanted!r}; known are {', '.join(DECODERS)}, or pass a function"
            )
        if wanted in ("rgb8", "gray8") and importlib.util.find_spec("PIL") is None:
            raise MissingDependency(f"decode={{{name!r}: {wanted!r}}} needs Pillow; run: pip install pillow")
        found[name] = DECODERS[wanted]
    return found
