"""Read the members of foreign tars strictly.

The standard library's tarfile follows headers that no honest writer makes (a pax ``path`` over a clean name,
a pax ``size=0`` that reveals a hidden member, a sparse file of a terabyte), so it is not used for sources.
This reader accepts the output of common writers (ustar, GNU tar with long names, pax headers with times and
long names) and refuses the rest with the names of file and member. Names with ``..`` are refused; a link, a device or
a name that is not UTF-8 makes its sample unreadable.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple, NoReturn, Protocol
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import SourceError
from shardkit.formats.compression import PACKED_HEADS
from shardkit.formats.tar_members import padded
from shardkit_tools.importers.source_files import MEDIA

_BLOCK = 512
_MAX_HEADER_BYTES = 1 << 20  # limit for a long name or a pax header; honest ones have a few hundred bytes
_MAX_MEMBER_BYTES = 5 << 30  # the largest sample that fits in a shard
_PIECE_BYTES = 16 << 20
_BUFFER_BYTES = 1 << 20
_FEW_HEADERS = 32
_USTAR = np.frombuffer(b"ustar\0", np.uint8)
_OCTAL_PLACES = 8 ** np.arange(10, -1, -1)
_PLAIN_NAMES = re.compile(
    rb"(?:[\w ()+,=@~-][\w ()+,=@~.-]*(?:/[\w ()+,=@~-][\w ()+,=@~.-]*)*(?:\n(?!\Z)|\Z))*"
)
_TIME_RECORD = re.compile(rb"([1-9][0-9]*) [amc]time=[0-9.]+\n")
_SIZE_FIELD_LIMIT = 8**11  # limit of eleven octal digits: larger members state their size elsewhere
_FILE_TYPES = (b"0", b"\0", b"7")
_REFUSED_TYPES = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a pipe",
}
_ADVICE = {
    b"1": "; write the tar again with tar --hard-dereference",
    b"2": "; write the tar again with tar --dereference",
    b"S": "; write the tar again without --sparse",
}
_LEAVE_OUT = "; write the tar again without it"
_REFUSED_DATA = {b"S": "a GNU sparse file", b"M": "a part of a multi-volume tar"}
# pax records that affect neither the name nor the data of a member
_HARMLESS_PAX = frozenset(
    {"mtime", "atime", "ctime", "uid", "gid", "uname", "gname", "comment", "LIBARCHIVE.creationtime"}
)
_HARMLESS_PAX_PREFIXES = ("SCHILY.", "LIBARCHIVE.xattr.", "RHT.security.")

TEXTS = frozenset(["txt", "text", "transcript"])
FIELD_OF_EXTENSION = {
    "cls": "label",
    "json": "meta",
    "jsn": "meta",
    "npy": "array",
    "bin": "blob",
} | dict.fromkeys(TEXTS, "text")
FIELD_OF_EXTENSION |= {suffix: name for name, suffixes in MEDIA.items() for suffix in suffixes}
"""Extension of a member without a name of its own → its field."""
_ENCODED = re.compile(r"[a-z0-9_-]*(?:%[0-9a-f]{2}[a-z0-9_-]*)+")


class _DamagedHeaderError(SourceError):
    """A header has another checksum than it states; headers after it may be intact."""


class Stream(Protocol):
    """A stream that a tar is read from."""

    def read(self, size: int = -1, /) -> bytes: ...


class Member(NamedTuple):
    """A file in a tar."""

    name: str  # path inside the tar, with `/`, never absolute or with `..`
    buffer: bytes  # bytes of the tar that contain the content
    begin: int  # offset of the content in them
    size: int  # bytes of the content
    start: int  # offset in the tar of its first header
    offset: int  # offset in the tar of its content
    why: str = ""  # why its sample cannot be read

    @property
    def data(self) -> bytes:
        """The content."""
        return self.buffer[self.begin : self.begin + self.size]

    @property
    def end(self) -> int:
        """Offset in the tar of the end of its padding."""
        return self.offset + padded(self.size)

    @property
    def extension(self) -> str:
        """The part of the file name after its first dot, in lower case."""
        return split_name(self.name)[1]


def split_name(name: str) -> tuple[str, str]:
    """Return the name up to the first dot of the file name, and the rest in lower case; a hidden file has neither."""
    start = name.rfind("/") + 1
    dot = name.find(".", start)
    if dot == start:
        return "", ""
    return (name, "") if dot < 0 else (name[:dot], name[dot + 1 :].lower())


def field_of(extension: str) -> str:
    """Return the field name for the extension of a member."""
    *parts, suffix = extension.split(".")
    # names that a tar cannot hold, as shardkit encodes them
    if len(parts) == 1 and _ENCODED.fullmatch(parts[0]):
        with contextlib.suppress(UnicodeDecodeError):
            return unquote(parts[0], errors="strict")
    return ".".join(parts) or FIELD_OF_EXTENSION.get(suffix, suffix)


def members_and_damage(
    stream: BinaryIO | Stream, where: str, *, one_name: bool = False, skip: bool = False
) -> Iterator[Member | SourceError]:
    """Yield the members of a tar, read from its first byte to its end.

    With `skip`, yield the error of a damaged header if a valid one follows.

    Raises:
        SourceError: The rest of the tar cannot be read.
    """
    reader = _Reader(stream, where, one_name=one_name)
    while True:
        try:
            yield from reader.members()
        except _DamagedHeaderError as error:
            start = reader.find_header() if skip else None
            if start is None:
                raise
            yield SourceError(f"{error}; the members up to byte {start} are lost")
        else:
            return


class _Headers(NamedTuple):
    """Headers of members that follow one another in memory."""

    names: list[bytes]
    starts: NDArray[np.int64]  # offset of the first header of each
    offsets: NDArray[np.int64]  # of the content
    sizes: NDArray[np.int64]  # bytes of the content


_NO_HEADERS = _Headers([], *[np.empty(0, np.int64)] * 3)


def plain_headers(data: bytes, start: int, most: int) -> _Headers:
    """Return the members that are in `data` from `start` on, as long as their headers are plain, at most `most`.

    A plain header has a short name, no prefix, and what common writers write in its other fields. It may follow an
    extension header that has nothing but a time, as `webdataset.TarWriter` writes them. All other headers, and damaged
    ones, are read one by one.
    """
    heads: list[int] = []
    at, end = start, len(data) - _BLOCK
    with contextlib.suppress(ValueError):
        while start <= at <= end and len(heads) < most:
            heads.append(at)
            at += (int(data[at + 124 : at + 135], 8) + 2 * _BLOCK - 1) & -_BLOCK
    if not heads:
        return _NO_HEADERS
    borders = np.array([*heads, at], np.int64)
    table = np.lib.stride_tricks.sliding_window_view(np.frombuffer(data, np.uint8), _BLOCK)[borders[:-1]]
    size = table[:, 124:135] - np.uint8(ord("0"))
    checksum = table[:, 148:154] - np.uint8(ord("0"))
    kinds = table[:, 156]
    is_time = kinds == ord("x")
    totals = table.sum(axis=1, dtype=np.uint32) - table[:, 148:156].sum(axis=1, dtype=np.uint32) + 8 * 0x20
    plain = (borders[1:] <= len(data)) & (size < 8).all(axis=1) & ((table[:, 135] & 0xDF) == 0)
    plain &= (checksum < 8).all(axis=1) & ((table[:, 154:156] & 0xDF) == 0).all(axis=1)
    plain &= checksum @ _OCTAL_PLACES[-6:] == totals
    plain &= is_time | (kinds == ord("0")) | (kinds == 0) | (kinds == ord("7"))
    plain &= (table[:, 345] == 0) | (table[:, 257:263] != _USTAR).any(axis=1)
    sizes = size @ _OCTAL_PLACES
    for place in np.flatnonzero(is_time & plain).tolist():
        content, length = heads[place] + _BLOCK, int(sizes[place])
        record = _TIME_RECORD.fullmatch(data, content, content + length)
        plain[place] = record is not None and int(record[1]) == length
    plain[1:] &= ~(is_time[1:] & is_time[:-1])
    count = len(heads) if bool(plain.all()) else int(np.argmin(plain))
    count -= count > 0 and bool(is_time[count - 1])  # its member is not there
    own = np.flatnonzero(~is_time[:count])
    first = own - (is_time[own - 1] & (own > 0))
    names = table[own, :100].copy().view("S100").ravel().tolist()
    return _Headers(names, borders[first], borders[own] + _BLOCK, sizes[own])


def _text_or_why(raw: bytes) -> tuple[str, str]:
    """Return a name, and why its member cannot be read: it is not UTF-8, and the name has "?" for its bytes."""
    try:
        return raw.decode(), ""
    except UnicodeDecodeError:
        shown = raw.decode("ascii", errors="replace").replace("\ufffd", "?")
        return shown, f"the member name {raw!r} is not UTF-8; rename it and write the tar again"


class _Reader:
    def __init__(self, stream: BinaryIO | Stream, where: str, *, one_name: bool) -> None:
        self._stream, self._where, self._one_name = stream, where, one_name
        self._at = 0
        self._buffer, self._next = b"", 0  # bytes that were read ahead, and the place of the next one
        # headers that are parsed at once, or one by one, from now on
        self._most, self._skip = _FEW_HEADERS, 0
        # values from extension headers for the next member
        self._long_name: str | None = None
        self._large_size: int | None = None
        self._is_extended = False

    def _refuse(self, why: str) -> NoReturn:
        raise SourceError(f"{self._where}: {why}")

    def find_header(self) -> int | None:
        """Read on to the next valid header of a file, and return its offset; None if there is none."""
        self._long_name, self._large_size, self._is_extended = None, None, False
        while self._fill(_BLOCK) >= _BLOCK:
            block = self._buffer[self._next : self._next + _BLOCK]
            if block[257:262] == b"ustar" and block[156:157] in (*_FILE_TYPES, b"L", b"x"):
                with contextlib.suppress(SourceError):
                    self._header(block)
                    return self._at
            self._skip_bytes(_BLOCK)
        return None

    def members(self) -> Iterator[Member]:
        start = 0
        while True:
            if not self._is_extended:
                yield from self._plain_members()
                start = self._at
            header = self._read(_BLOCK, "a header")
            if not any(header):
                if self._is_extended:
                    self._refuse("an extension header is not followed by a member; write the tar again")
                self._check_end()
                return
            kind, raw, size = self._header(header)
            if kind in (b"L", b"x", b"g"):
                self._read_extension(kind, size)
                continue
            if self._one_name and self._long_name is not None:
                self._check_one_name(raw, self._long_name)
            name, why = (self._long_name, "") if self._long_name else _text_or_why(raw)
            size = self._effective_size(size, name)
            self._long_name, self._large_size, self._is_extended = None, None, False
            if kind == b"5":
                if size:
                    self._refuse(f"folder {name!r} claims {size} bytes of data; write the tar again")
                continue
            if kind in _REFUSED_TYPES:
                why = f"member {name!r} is {_REFUSED_TYPES[kind]}; only files and folders can be imported"
                why += _ADVICE.get(kind, _LEAVE_OUT)
                size = 0
            elif kind not in _FILE_TYPES:
                what = _REFUSED_DATA.get(kind, f"of the unknown type {kind!r}")
                advice = _ADVICE.get(kind, _LEAVE_OUT)
                self._refuse(f"member {name!r} is {what}; only files and folders can be imported{advice}")
            name = self._checked_name(name)
            self._need(padded(size), f"member {name!r}")
            buffer, begin, offset = self._buffer, self._next, self._at
            self._skip_bytes(padded(size))
            yield Member(name, buffer, begin, size, start, offset, why)
            start = self._at

    def _plain_members(self) -> Iterator[Member]:
        """Yield the members at hand, up to the first without a plain header; headers are parsed at once."""
        if self._skip:
            self._skip -= 1
            return
        self._fill(1)
        data, origin = self._buffer, self._at - self._next  # place of the buffer in the tar
        heads = plain_headers(data, self._next, self._most)
        # runs of few plain headers would cost more than they save
        count = len(heads.names)
        self._skip = 0 if count or self._most > _FEW_HEADERS else _FEW_HEADERS
        self._most = 2 * count + _FEW_HEADERS
        if not count:
            return
        self._skip_bytes(int(heads.offsets[-1] + padded(int(heads.sizes[-1]))) - self._next)
        columns = (heads.offsets, heads.sizes, heads.starts + origin, heads.offsets + origin)
        facts = [itertools.repeat(data), *(column.tolist() for column in columns)]
        joined = b"\n".join(heads.names)
        if _PLAIN_NAMES.fullmatch(joined) and joined.count(b"\n") == count - 1:
            made = functools.partial(tuple.__new__, Member)  # in C
            yield from map(made, zip(joined.decode().split("\n"), *facts, itertools.repeat("")))
            return
        for member, raw in zip(map(Member, itertools.repeat(""), *facts), heads.names, strict=True):
            name, why = _text_or_why(raw.partition(b"\0")[0])
            yield member._replace(name=self._checked_name(name), why=why)

    def _header(self, header: bytes) -> tuple[bytes, bytes, int]:
        """Return (kind, name, size); the name may be cut within a character if an extension has it whole."""
        claimed = self._octal(header[148:156], "checksum")
        unsigned = sum(header) - sum(header[148:156]) + 8 * 0x20
        if claimed != unsigned:
            raise _DamagedHeaderError(
                f"{self._where}: a header's checksum is {claimed}, its bytes give {unsigned}; the tar is damaged"
            )
        raw = header[:100].split(b"\0", 1)[0]
        if header[257:263] == b"ustar\0":
            prefix = header[345:500].split(b"\0", 1)[0]
            raw = prefix + b"/" + raw if prefix else raw
        size = header[124:136]
        if size[0] == 0x80:  # GNU and star write sizes beyond the octal digits as big-endian numbers
            return header[156:157], raw, int.from_bytes(size[1:], "big")
        if size[0] & 0x80:
            self._refuse("a header claims a negative size; the tar is damaged or hostile")
        return header[156:157], raw, self._octal(size, "size")

    def _octal(self, raw: bytes, what: str) -> int:
        digits = raw.strip(b" \0")
        if not digits or not set(digits) <= set(b"01234567"):
            self._refuse(
                f"a header's {what} is {raw!r}, not an octal number; the file is not a tar, is damaged, or "
                "is compressed without an extension that says so, such as .tar.gz"
            )
        return int(digits, 8)

    def _read_extension(self, kind: bytes, size: int) -> None:
        if size > _MAX_HEADER_BYTES:
            self._refuse(f"an extension header claims {size} bytes; at most {_MAX_HEADER_BYTES} are read")
        data = self._read(padded(size), "an extension header")[:size]
        if kind == b"L":
            self._is_extended = True
            self._long_name = self._text(data.split(b"\0", 1)[0])
            return
        records = self._pax_records(data)
        if kind == b"g":
            if records:
                self._refuse("a global pax header sets path or size for all members; write the tar again")
            return
        self._is_extended = True
        self._long_name = records.get("path", self._long_name)
        if "size" in records:
            if not records["size"].isdecimal():
                self._refuse(
                    f"a pax header claims the size {records['size']!r}; the tar is damaged or hostile"
                )
            self._large_size = int(records["size"])

    def _pax_records(self, data: bytes) -> dict[str, str]:
        """Return path and size; other records must be harmless."""
        records: dict[str, str] = {}
        at = 0
        while at < len(data):
            digits, space, _ = data[at : at + 12].partition(b" ")
            length = int(digits) if digits.isdigit() else 0
            record = data[at : at + length]
            if not space or length <= len(digits) + 1 or len(record) != length or record[-1:] != b"\n":
                self._refuse("a pax header is malformed; the tar is damaged")
            keyword, equals, value = record[len(digits) + 1 : -1].partition(b"=")
            name = self._text(keyword)
            if not equals or name in records:
                self._refuse(
                    f"the pax record {name!r} is malformed or given twice; the tar is damaged or hostile"
                )
            if name in ("path", "size"):
                records[name] = self._text(value)
            elif name not in _HARMLESS_PAX and not name.startswith(_HARMLESS_PAX_PREFIXES):
                self._refuse(
                    f"the pax record {name!r} changes how members are read; extract the tar and build from the folder"
                )
            at += length
        return records

    def _effective_size(self, size: int, name: str) -> int:
        if self._large_size is not None and self._large_size != size:
            # the header could hold this size: with two sizes, readers would disagree
            if self._large_size < _SIZE_FIELD_LIMIT:
                self._refuse(
                    f"member {name!r} has the size {size} in its header and {self._large_size} in its pax record; "
                    "readers would disagree, so it is refused"
                )
            size = self._large_size
        if size > _MAX_MEMBER_BYTES:
            self._refuse(f"member {name!r} claims {size} bytes; at most {_MAX_MEMBER_BYTES} fit in a shard")
        return size

    def _check_one_name(self, short: bytes, long: str) -> None:
        """Refuse different names: the header may only truncate a name or replace non-ASCII characters."""
        if long.encode()[: len(short)] == short and len(short) >= 99:
            return
        if short == long.encode() or (not long.isascii() and long.encode("ascii", "replace")[:100] == short):
            return
        shown = short.decode(errors="replace")
        self._refuse(
            f"member {long!r} is called {shown!r} in its own header; readers would disagree, so it is not adopted; "
            "read it into shards of its own: shardkit build"
        )

    def _checked_name(self, name: str) -> str:
        parts = [part for part in name.split("/") if part != "."]
        if not parts or ".." in parts or "" in parts or "\0" in name or "\\" in name:
            self._refuse(
                f"member {name!r} has a name that leads out of its folder ('..', an absolute or an empty part); "
                "rename it and write the tar again"
            )
        return "/".join(parts)

    def _text(self, raw: bytes) -> str:
        text, why = _text_or_why(raw)
        if why:
            self._refuse(why)
        return text

    def _fill(self, size: int) -> int:
        """Read until the buffer has `size` bytes ahead or the file ends, and return how many it has."""
        ahead = len(self._buffer) - self._next
        if ahead < size:
            pieces = [self._buffer[self._next :]] if ahead else []
            # In pieces, so that a header that claims gigabytes does not allocate them before they are read.
            # After bytes that are ahead, only what is missing, so that little is copied.
            while ahead < size:
                size_read = size - ahead if ahead else max(size, _BUFFER_BYTES)
                piece = self._stream.read(min(size_read, _PIECE_BYTES))
                if not piece:
                    break
                pieces.append(piece)
                ahead += len(piece)
            self._buffer, self._next = b"".join(pieces), 0
        return ahead

    def _read(self, size: int, what: str) -> bytes:
        self._need(size, what)
        self._skip_bytes(size)
        return self._buffer[self._next - size : self._next]

    def _need(self, size: int, what: str) -> None:
        """Read ahead until the buffer has `size` more bytes; refuse the tar if it ends before."""
        ahead = self._fill(size)
        if ahead < size:
            if not self._at and self._buffer.startswith(tuple(PACKED_HEADS)):
                self._refuse("it is compressed; name it by its compression, such as .tar.gz or .tar.zst")
            self._refuse(
                f"the tar ends inside {what} ({ahead} of {size} bytes); it is cut short, fetch it again"
            )

    def _skip_bytes(self, size: int) -> None:
        self._next += size
        self._at += size

    def _check_end(self) -> None:
        if self._fill(_BLOCK) < _BLOCK:
            self._refuse("the tar ends with one zero block instead of two; it is cut short, fetch it again")
        while self._fill(1):
            if any(self._buffer[self._next :]):
                self._refuse(
                    "data follows the end of the tar (several tars in one file?); it would be lost, so it is refused: "
                    "unpack it with tar --ignore-zeros, and write it again"
                )
            self._next = len(self._buffer)
