"""Values of a WebDataset sample's members, by the extensions that webdataset's decoders know.

The decoders that can run code (pickle, torch) have no counterpart here: such members are refused by name.

    jpg png … → image: bytes    wav mp3 … → audio: bytes     mp4 … → video: bytes
    cls → label: int64          index, count, id, inx, cls2 → int64
    txt text transcript → text: str                          json → meta: json
    npy → its dtype and shape   bin → blob: bytes            anything else → bytes, named by its extension

A longer extension names its field: ``17.left.png`` is the field ``left``, ``17.tokens.npy`` the field
``tokens``.
"""

from __future__ import annotations

import contextlib
import io
import re
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import SourceError
from shardkit_tools.importers.detection import MEDIA
from shardkit_tools.importers.numpy_rows import array_type, read_header
from shardkit_tools.importers.strict_json import parse_json

_INTEGERS = frozenset(["cls", "cls2", "index", "count", "id", "inx"])
_TEXTS = frozenset(["txt", "text", "transcript"])
_NAMES = {"cls": "label", "json": "meta", "jsn": "meta", "npy": "array", "bin": "blob"} | dict.fromkeys(
    _TEXTS, "text"
)
_NAMES |= {suffix: name for name, suffixes in MEDIA.items() for suffix in suffixes}
_ENCODED = re.compile(r"[a-z0-9_-]*(?:%[0-9a-f]{2}[a-z0-9_-]*)+")
_PICKLED = frozenset(["pyd", "pickle", "pkl", "pth", "pt"])
_UNREAD = {
    "ten": "tensor",
    "tb": "tensor",
    "mp": "MessagePack",
    "msgpack": "MessagePack",
    "cbor": "CBOR",
    "npz": "zipped NumPy",
}


def field_of(extension: str, where: str) -> str:
    """The field that a member becomes.

    Args:
        extension: what follows the first dot of the member's last name part, in lower case.
        where: tar and member, for messages.

    Raises:
        SourceError: the member is of a kind that is not read.
    """
    *parts, suffix = extension.split(".")
    if suffix in _PICKLED:
        raise SourceError(
            f"{where}: a pickle can run any code when it is loaded, so it is never read; convert the member "
            "to .npy or .json"
        )
    if suffix in _UNREAD:
        raise SourceError(
            f"{where}: {_UNREAD[suffix]} members are not read; convert the member to .npy or .json"
        )
    if len(parts) == 1 and _ENCODED.fullmatch(parts[0]):  # as shardkit writes names that a tar cannot hold
        with contextlib.suppress(UnicodeDecodeError):
            return unquote(parts[0], errors="strict")
    return ".".join(parts) or _NAMES.get(suffix, suffix)


def field_type_of(extension: str, data: bytes, where: str) -> str:
    """The field type of one member.

    Raises:
        SourceError: the member is not what its extension says.
    """
    suffix = extension.rpartition(".")[2]
    if suffix in _INTEGERS:
        return "int64"
    if suffix in _TEXTS:
        return "str"
    if suffix in ("json", "jsn"):
        return "json"
    if suffix == "npy":
        array = _array(data, where)
        return array_type(array.dtype, array.shape)
    return "bytes"


def common_array(known: str, found: str) -> str | None:
    """The type that holds arrays of both types: where they differ in a size, it is free. None where there is none."""
    (dtype, _, sizes), (other, _, other_sizes) = (text.rstrip("]").partition("[") for text in (known, found))
    pairs = list(zip(sizes.split(","), other_sizes.split(","), strict=False))
    if dtype != other or not (sizes and other_sizes) or sizes.count(",") != other_sizes.count(","):
        return None
    return f"{dtype}[{','.join(a if a == b else '*' for a, b in pairs)}]"


def value_of(extension: str, kind: str, data: bytes, where: str) -> object:
    """The value of one member.

    Args:
        extension: as for `field_of`.
        kind: the field's type; `bytes` leaves any member as it is.
        data: the member's bytes.
        where: tar and member, for messages.

    Raises:
        SourceError: the member is not what its extension says; the field's type is checked later, by the
        schema.
    """
    suffix = extension.rpartition(".")[2]
    if kind == "bytes":
        return data
    if suffix in _INTEGERS:
        text = data.strip()
        if not re.fullmatch(rb"[+-]?[0-9]{1,20}", text):
            raise SourceError(
                f"{where}: {text[:40]!r} is not an integer; mend it, or read it as text with --schema …=str"
            )
        return int(text)
    if suffix in ("json", "jsn"):
        return parse_json(data, where)
    if suffix == "npy":
        return _array(data, where)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{where}: not UTF-8 (byte {error.start}); mend it, or keep the bytes with --schema …=bytes"
        ) from error


def _array(data: bytes, where: str) -> NDArray[np.generic]:
    stream = io.BytesIO(data)
    header = read_header(stream, where, len(data), has_rows=False)
    values = np.frombuffer(data, header.dtype, offset=header.offset)
    return values.reshape(header.shape, order="F" if header.columns_first else "C")
