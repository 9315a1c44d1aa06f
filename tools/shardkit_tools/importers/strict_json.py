"""JSON as a source may hold it: one value per text, no NaN, no key twice."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import NoReturn, TextIO

from shardkit.errors import SourceError
from shardkit_tools.importers.protocol import SourceFile
from shardkit_tools.importers.source_files import open_plain

_PIECE = 1 << 20
_MAX_ITEM = 1 << 28
_BETWEEN = re.compile(r"[ \t\r\n]*")


def parse_json(data: bytes, where: str) -> object:
    """Parse UTF-8 JSON.

    A key that is given twice is refused: parsers keep the first or the last, and a value would be lost in
    silence.

    Args:
        data: the bytes of one JSON value.
        where: file and row, for messages.

    Raises:
        SourceError: the bytes are not UTF-8 or not one JSON value.
    """
    try:
        return _DECODER.decode(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise SourceError(f"{where}: not UTF-8 (byte {error.start}); convert the file to UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{where}: not valid JSON ({error}); mend or remove it") from error


def read_array(file: SourceFile) -> Iterator[object]:
    """The items of a file that holds one JSON array, one of them in memory at a time.

    Raises:
        SourceError: the file is not UTF-8 or not one JSON array, or an item is longer than 256 Mi characters.
    """
    with open_plain(file) as stream, io.TextIOWrapper(stream, encoding="utf-8-sig") as text:
        array, number = _Array(text), 0
        try:
            array.take("[", f"{file.path}: no JSON array")
            more = array.look() != "]"
            while more:
                number += 1
                where = f"{file.path} item {number}"
                yield array.value(where)
                more = (
                    array.take(",]", f"{where}: something other than a comma or the array's end behind it")
                    == ","
                )
            if not number:
                array.take("]", file.path)
        except UnicodeDecodeError as error:
            raise SourceError(
                f"{file.path}: not UTF-8 ({error.reason}); convert the file to UTF-8"
            ) from error
        if array.look():
            raise SourceError(f"{file.path}: something lies behind the end of the array; mend the file")


class _Array:
    """A text that is decoded value by value."""

    def __init__(self, text: TextIO) -> None:
        self._text, self._held, self._at = text, "", 0

    def _fill(self) -> bool:
        """Hold as much more as is held, so that a long value is tried a few times only."""
        piece = self._text.read(max(_PIECE, len(self._held) - self._at))
        self._held, self._at = self._held[self._at :] + piece, 0
        return bool(piece)

    def look(self) -> str:
        """The next character that is no space; none at the end."""
        while True:
            found = _BETWEEN.match(self._held, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._held):
                return self._held[self._at]
            if not self._fill():
                return ""

    def take(self, wanted: str, else_: str) -> str:
        """Pass one of some characters."""
        found = self.look()
        if not found or found not in wanted:
            raise SourceError(f"{else_}{'' if found else ' (it ends there)'}; mend or fetch the file again")
        self._at += 1
        return found

    def value(self, where: str) -> object:
        """Pass a value."""
        self.look()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._held, self._at)
            except (ValueError, RecursionError) as error:
                if len(self._held) - self._at > _MAX_ITEM or not self._fill():
                    said = error.msg if isinstance(error, json.JSONDecodeError) else error
                    raise SourceError(f"{where}: not valid JSON ({said}); mend or remove it") from error
            else:
                if end < len(self._held) or not self._fill():  # a number may go on
                    self._at = end
                    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return result


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse)
