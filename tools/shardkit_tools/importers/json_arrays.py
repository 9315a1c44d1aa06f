"""Files that hold one JSON array, read item by item in bounded memory."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import TextIO

from shardkit.errors import SourceError
from shardkit.formats.strict_json import JSON_DECODER
from shardkit_tools.importers.protocol import SourceFile
from shardkit_tools.importers.source_files import open_plain

_PIECE = 1 << 20
_MAX_ITEM = 1 << 28
_BETWEEN = re.compile(r"[ \t\r\n]*")


def read_array(file: SourceFile) -> Iterator[object]:
    """Yield the items of a file with one JSON array, one at a time in memory."""
    with open_plain(file) as stream, io.TextIOWrapper(stream, encoding="utf-8-sig") as text:
        array, number = _Array(text), 0
        try:
            array.take("[", f"{file.path}: no JSON array")
            more = array.look() != "]"
            while more:
                number += 1
                where = f"{file.path} item {number}"
                yield array.value(where)
                more = array.take(",]", f"{where}: expected a comma or the end of the array after it") == ","
            if not number:
                array.take("]", file.path)
        except UnicodeDecodeError as error:
            raise SourceError(
                f"{file.path}: not UTF-8 ({error.reason}); convert the file to UTF-8"
            ) from error
        if array.look():
            raise SourceError(f"{file.path}: there is text after the end of the array; fix the file")


class _Array:
    """A text that is decoded value by value."""

    def __init__(self, text: TextIO) -> None:
        self._text, self._held, self._at = text, "", 0

    def _fill(self) -> bool:
        """Double the buffer, so that a long value is parsed only a few times."""
        piece = self._text.read(max(_PIECE, len(self._held) - self._at))
        if piece:
            self._held, self._at = self._held[self._at :] + piece, 0
        return bool(piece)

    def look(self) -> str:
        """Return the next character that is not a space, or "" at the end."""
        while True:
            found = _BETWEEN.match(self._held, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._held):
                return self._held[self._at]
            if not self._fill():
                return ""

    def take(self, wanted: str, else_: str) -> str:
        """Consume and return one of the wanted characters."""
        found = self.look()
        if not found or found not in wanted:
            raise SourceError(f"{else_}{'' if found else ' (it ends there)'}; fix or fetch the file again")
        self._at += 1
        return found

    def value(self, where: str) -> object:
        """Consume and return a value."""
        self.look()
        while True:
            try:
                value, end = JSON_DECODER.raw_decode(self._held, self._at)
            except (ValueError, RecursionError) as error:
                if len(self._held) - self._at > _MAX_ITEM or not self._fill():
                    said = error.msg if isinstance(error, json.JSONDecodeError) else error
                    raise SourceError(f"{where}: not valid JSON ({said}); fix or remove it") from error
            else:
                # a number may continue: 12e-5 that is cut off is decoded as 12, with two characters after it
                if end + 2 < len(self._held) or not self._fill():
                    self._at = end
                    return value
