"""Values of MDS columns by their encodings."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import SourceError
from shardkit_tools.importers.strict_json import parse_json

__all__ = ["field_type", "value_of"]

_SCALAR = re.compile(r"u?int(?:8|16|32|64)|float(?:16|32|64)")
_SHAPE_DTYPES = ("<u1", "<u2", "<u4", "<u8")
_DTYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
           64: "uint64", 65: "int64", 66: "float64"}  # fmt: skip
_PIXELS = {"L": (), "RGB": (3,), "RGBA": (4,)}
_PLAIN = {"bytes": "bytes", "str": "str", "int": "int64", "str_int": "int64", "str_float": "float64"}
_PLAIN |= {"str_decimal": "str", "jpeg": "bytes", "png": "bytes", "jpeg_array": "bytes", "json": "json"}


def field_type(encoding: str, example: bytes, where: str) -> str:
    """The field type of a column.

    Args:
        encoding: as the index names it.
        example: the column's bytes in the first row; arrays without a declared shape are judged by it.
        where: index and column, for messages.

    Raises:
        SourceError: the encoding is not read.
    """
    name, _, settings = encoding.partition(":")
    if name == "pkl":
        raise SourceError(
            f"{where}: a pickle can run any code when it is loaded, so it is never read; write it as json"
        )
    if _SCALAR.fullmatch(name):
        return name
    if name in _PLAIN:
        return _PLAIN[name]
    if name == "ndarray":
        dtype, _, shape = settings.partition(":")
        array = _array(settings, example, where)
        if not shape and array.ndim == 1:
            return f"{array.dtype.name}[*]"
        return f"{dtype or array.dtype.name}[{shape or ','.join(map(str, array.shape))}]"
    if name == "pil":
        return f"uint8[{','.join(map(str, _image(example, where).shape))}]"
    raise SourceError(
        f"{where}: the encoding {encoding!r} is not read; write the column as bytes, json or an array"
    )


def value_of(encoding: str, data: bytes, where: str) -> object:
    """The value of one field.

    Raises:
        SourceError: the bytes are not what the encoding writes.
    """
    name, _, settings = encoding.partition(":")
    if name == "json":
        return parse_json(data, where)
    if name == "ndarray":
        return _array(settings, data, where)
    if name == "pil":
        return _image(data, where)
    if name == "int" or _SCALAR.fullmatch(name):
        dtype = np.dtype("int64" if name == "int" else name).newbyteorder("<")
        if len(data) != dtype.itemsize:
            raise SourceError(
                f"{where}: {len(data)} bytes, expected the {dtype.itemsize} of {name}; fetch it again"
            )
        return np.frombuffer(data, dtype)[0]
    if _PLAIN.get(name) == "bytes":
        return data
    try:
        text = data.decode()
        return int(text) if name == "str_int" else float(text) if name == "str_float" else text
    except ValueError as error:
        raise SourceError(f"{where}: {data[:40]!r} is not what {name} writes; fetch it again") from error


def _array(settings: str, data: bytes, where: str) -> NDArray[np.generic]:
    """An array with dtype and shape in the settings or, where they are not, before the values."""
    dtype, _, text = settings.partition(":")
    at = 0
    try:
        if not dtype:
            dtype, at = _DTYPES[data[0]], 1
        if text:
            shape = tuple(map(int, text.split(",")))
        else:
            axes, width = data[at] >> 2, 1 << data[at] % 4
            shape = tuple(np.frombuffer(data, _SHAPE_DTYPES[data[at] % 4], axes, at + 1).tolist())
            at += 1 + axes * width
        if dtype not in _DTYPES.values():
            raise ValueError(f"dtype {dtype!r}")
        return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"), offset=at).reshape(shape)
    except (ValueError, IndexError, KeyError) as error:
        raise SourceError(f"{where}: not an array as MDS writes it ({error}); fetch it again") from error


def _image(data: bytes, where: str) -> NDArray[np.uint8]:
    """A raw image: width, height, length of the mode (u32 each), mode, pixels."""
    try:
        width, height, length = np.frombuffer(data, "<u4", 3).tolist()
        mode = data[12 : 12 + length].decode("ascii")
        if mode not in _PIXELS:
            raise ValueError(f"mode {mode!r}: L, RGB and RGBA are read")
        return np.frombuffer(data, np.uint8, offset=12 + length).reshape(height, width, *_PIXELS[mode])
    except ValueError as error:
        raise SourceError(
            f"{where}: not a raw image that is read ({error}); write the column as png or jpeg"
        ) from error
