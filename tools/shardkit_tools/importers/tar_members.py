"""The members of a tar that somebody else wrote, read strictly.

The standard library's tarfile obeys headers that no honest writer makes (a pax ``path`` over a clean name, a
pax ``size=0`` that lets a hidden member appear, a sparse file of a terabyte): it never sees a source here.
This reader takes what common writers produce (ustar, GNU tar with long names, pax headers with times and long
names) and refuses the rest by name of file and member. Links, devices and names with ``..`` are refused,
never skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from shardkit.errors import SourceError

__all__ = ["Member", "read_members"]

_BLOCK = 512
_MAX_HEADER_BYTES = 1 << 20  # of a long name or a pax header; honest ones have a few hundred bytes
_MAX_MEMBER_BYTES = 5 << 30  # the largest sample that a shard takes
_PIECE_BYTES = 16 << 20
_SIZE_FIELD_LIMIT = (
    8**11
)  # what eleven octal digits cannot hold: larger members need another way to say their size
_REFUSED_TYPES = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a pipe",
    b"S": "a GNU sparse file",
    b"M": "a part of a multi-volume tar",
}
# pax records that say nothing about where or what the data is
_HARMLESS_PAX = frozenset(
    {"mtime", "atime", "ctime", "uid", "gid", "uname", "gname", "comment", "LIBARCHIVE.creationtime"}
)
_HARMLESS_PAX_PREFIXES = ("SCHILY.", "LIBARCHIVE.xattr.")


@dataclass(frozen=True, slots=True)
class Member:
    """One file of a tar.

    Attributes:
        name: its path inside the tar, with `/`, never absolute, never with `..`.
        data: its bytes.
    """

    name: str
    data: bytes


@dataclass(slots=True)
class _Override:
    """What an extension header says about the next member."""

    name: str | None = None
    size: int | None = None
    pending: bool = field(default=False)


def read_members(stream: BinaryIO, where: str, *, one_name: bool = False) -> Iterator[Member]:
    """Read a tar from its first byte to its end.

    Args:
        stream: the uncompressed tar; only `read` is called.
        where: the tar's path, for messages.
        one_name: refuse a member whose extension header gives it another name than its own header, not a longer one.

    Raises:
        SourceError: the tar is cut short, damaged, or holds what this reader refuses; names the member.
    """
    override = _Override()
    while True:
        header = _read_exactly(stream, _BLOCK, where, "a header")
        if not any(header):
            if override.pending:
                raise SourceError(
                    f"{where}: an extension header is not followed by a member; write the tar again"
                )
            _check_end(stream, where)
            return
        kind, name, size = _parse_header(header, where)
        if kind in (b"L", b"x", b"g"):
            _read_extension(stream, kind, size, override, where)
            continue
        if one_name and override.name is not None:
            _check_one_name(name, override.name, where)
        name, size, override = (
            override.name or name,
            _effective_size(override, size, name, where),
            _Override(),
        )
        if kind == b"5":
            if size:
                raise SourceError(
                    f"{where}: folder {name!r} claims {size} bytes of data; write the tar again"
                )
            continue
        if kind not in (b"0", b"\0", b"7"):
            what = _REFUSED_TYPES.get(kind, f"of the unknown type {kind!r}")
            raise SourceError(f"{where}: member {name!r} is {what}; only files and folders can be imported")
        name = _checked_name(name, where)
        data = _read_data(stream, size, where, f"member {name!r}")
        yield Member(name, data)


def _parse_header(header: bytes, where: str) -> tuple[bytes, str, int]:
    claimed = _octal(header[148:156], where, "checksum")
    unsigned = sum(header) - sum(header[148:156]) + 8 * 0x20
    if claimed != unsigned:
        raise SourceError(
            f"{where}: a header's checksum is {claimed}, its bytes give {unsigned}; the tar is damaged"
        )
    raw = header[:100].split(b"\0", 1)[0]
    if header[257:263] == b"ustar\0":
        prefix = header[345:500].split(b"\0", 1)[0]
        raw = prefix + b"/" + raw if prefix else raw
    return header[156:157], _text(raw, where), _size(header[124:136], where)


def _size(raw: bytes, where: str) -> int:
    if raw[0] == 0x80:  # GNU and star write what does not fit in octal digits as a big-endian number
        return int.from_bytes(raw[1:], "big")
    if raw[0] & 0x80:
        raise SourceError(f"{where}: a header claims a negative size; the tar is damaged or hostile")
    return _octal(raw, where, "size")


def _octal(raw: bytes, where: str, what: str) -> int:
    digits = raw.strip(b" \0")
    if not digits or not set(digits) <= set(b"01234567"):
        raise SourceError(
            f"{where}: a header's {what} is {raw!r}, not an octal number; the file is not a tar, or damaged"
        )
    return int(digits, 8)


def _read_extension(stream: BinaryIO, kind: bytes, size: int, override: _Override, where: str) -> None:
    if size > _MAX_HEADER_BYTES:
        raise SourceError(
            f"{where}: an extension header claims {size} bytes; at most {_MAX_HEADER_BYTES} are read"
        )
    data = _read_data(stream, size, where, "an extension header")
    if kind == b"L":
        override.pending = True
        override.name = _text(data.split(b"\0", 1)[0], where)
        return
    records = _pax_records(data, where)
    if kind == b"g":
        if {"path", "size"} & records.keys():
            raise SourceError(
                f"{where}: a global pax header sets path or size for all members; write the tar again"
            )
        return
    override.pending = True
    if "path" in records:
        override.name = records["path"]
    if "size" in records:
        if not records["size"].isdecimal():
            raise SourceError(
                f"{where}: a pax header claims the size {records['size']!r}; the tar is damaged or hostile"
            )
        override.size = int(records["size"])


def _pax_records(data: bytes, where: str) -> dict[str, str]:
    records: dict[str, str] = {}
    at = 0
    while at < len(data):
        digits, space, _ = data[at : at + 12].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        record = data[at : at + length]
        if not space or length <= len(digits) + 1 or len(record) != length or record[-1:] != b"\n":
            raise SourceError(f"{where}: a pax header is malformed; the tar is damaged")
        keyword, equals, value = record[len(digits) + 1 : -1].partition(b"=")
        name = _text(keyword, where)
        if not equals or name in records:
            raise SourceError(
                f"{where}: the pax record {name!r} is malformed or given twice; the tar is damaged or hostile"
            )
        if name in ("path", "size"):
            records[name] = _text(value, where)
        elif name not in _HARMLESS_PAX and not name.startswith(_HARMLESS_PAX_PREFIXES):
            raise SourceError(
                f"{where}: the pax record {name!r} changes how members are read; extract the tar and build "
                "from the folder"
            )
        at += length
    return records


def _effective_size(override: _Override, size: int, name: str, where: str) -> int:
    if override.size is not None and override.size != size:
        if (
            override.size < _SIZE_FIELD_LIMIT
        ):  # the header could have said it: two sizes are two readings of one tar
            raise SourceError(
                f"{where}: member {override.name or name!r} has the size {size} in its header and "
                f"{override.size} in its pax record; readers would disagree, so it is refused"
            )
        size = override.size
    if size > _MAX_MEMBER_BYTES:
        raise SourceError(
            f"{where}: member {override.name or name!r} claims {size} bytes; at most {_MAX_MEMBER_BYTES} fit "
            "in a shard"
        )
    return size


def _check_one_name(short: str, long: str, where: str) -> None:
    """Writers put what fits of a long name into the header, and ``?`` or a part of it for what is not ASCII."""
    if long.encode()[: len(short.encode())] == short.encode() and len(short.encode()) >= 99:
        return
    if short == long or (not long.isascii() and long.encode("ascii", "replace").decode()[:100] == short):
        return
    raise SourceError(
        f"{where}: member {long!r} is called {short!r} in its own header; readers would disagree, so it is not "
        "adopted; read it into shards of its own: shardkit build"
    )


def _checked_name(name: str, where: str) -> str:
    parts = [part for part in name.split("/") if part != "."]
    if not parts or ".." in parts or "" in parts or "\0" in name or "\\" in name:
        raise SourceError(
            f"{where}: member {name!r} has a name that leads out of its folder ('..', an absolute or an "
            "empty part); rename it and write the tar again"
        )
    return "/".join(parts)


def _text(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{where}: the member name {raw!r} is not UTF-8; rename it and write the tar again"
        ) from error


def _read_data(stream: BinaryIO, size: int, where: str, what: str) -> bytes:
    data = _read_exactly(stream, size, where, what)
    _read_exactly(stream, -size % _BLOCK, where, what)
    return data


def _read_exactly(stream: BinaryIO, size: int, where: str, what: str) -> bytes:
    pieces: list[bytes] = []
    missing = size
    while missing:
        # in pieces: a header that claims gigabytes must not allocate them before they are there
        piece = stream.read(min(missing, _PIECE_BYTES))
        if not piece:
            raise SourceError(
                f"{where}: the tar ends inside {what} ({size - missing} of {size} bytes); it is cut short, "
                "fetch it again"
            )
        pieces.append(piece)
        missing -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _check_end(stream: BinaryIO, where: str) -> None:
    tail = stream.read(_BLOCK)
    if len(tail) != _BLOCK:
        raise SourceError(
            f"{where}: the tar ends with one zero block instead of two; it is cut short, fetch it again"
        )
    while tail:
        if any(tail):
            raise SourceError(
                f"{where}: data follows the end of the tar (several tars in one file?); it would be lost, so "
                "it is refused"
            )
        tail = stream.read(1 << 20)
