"""Sources of JSON lines, or of one array of objects, in strict JSON: no NaN, no duplicate keys.

A field that is null or missing in some rows is optional. `json_types` infers the types.
"""

from __future__ import annotations

import difflib
import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import ShardkitError, SourceError
from shardkit.extras import shell_word
from shardkit.formats.json_values import MAX_JSON_DEPTH
from shardkit.formats.line_blocks import ONE_A_LINE, json_rows, line_starts, object_of
from shardkit_tools.importers.json_arrays import read_array
from shardkit_tools.importers.json_types import SCAN_ROWS, TypeInference, check_rows
from shardkit_tools.importers.line_importer import (
    LineBlock,
    LineImporter,
    ParseLines,
    blocks_to_infer,
    note_partitions,
    parse_pieces,
)
from shardkit_tools.importers.line_ranges import cut_lines, read_pieces
from shardkit_tools.importers.protocol import ImportOptions, Source, SourceFile, SourceTask, array_note
from shardkit_tools.importers.source_files import LeftOut, check_suffixes, file_suffix, open_plain

_LOOKED_AT = 4096
_LISTS_SEEN = 16  # lists kept per field, for notes
_HALF_CHARACTER = re.compile(rb"\\u[dD]")  # begins escapes that JSON may have alone, and UTF-8 may not
_ITEMS = 1024  # of an array, in a block


@dataclass(frozen=True, kw_only=True)
class JsonLinesImporter(LineImporter):
    """Files of JSON lines, or of one array of objects, as a source."""

    name: str = "jsonl"
    has_own_fields: ClassVar[bool] = True
    types: Mapping[str, str]
    arrays: frozenset[str]
    """Names of files that hold one JSON array of objects."""
    structs: frozenset[str]
    """Objects whose members are the fields, because of `flatten`; a null in their place is dropped."""

    @cached_property
    def ranges(self) -> tuple[SourceTask, ...]:
        return cut_lines(self.files(), self.arrays)

    def parser(self, file: SourceFile) -> ParseLines:
        return json_rows

    def plain_rows(self, lines: bytes) -> NDArray[np.int64] | None:
        octets, starts = np.frombuffer(lines, np.uint8), line_starts(lines)
        if (octets[starts] != ord("{")).any() or (b"\\" in lines and _HALF_CHARACTER.search(lines)):
            return None
        may_nest = any(kind.kind == "json" for kind in self.fields.values())
        if may_nest and lines.count(b"{") + lines.count(b"[") > len(starts) + MAX_JSON_DEPTH:
            opens = (octets == ord("{")) | (octets == ord("["))
            if (np.add.reduceat(opens, starts, dtype=np.int64) > MAX_JSON_DEPTH).any():
                return None  # a line may nest too deeply
        return starts

    def blocks(self, file: SourceFile, pieces: Iterable[bytes], first_line: int = 0) -> Iterator[LineBlock]:
        return _blocks(file, None if file.name in self.arrays else pieces, self.options, set(), first_line)

    def samples(self, block: LineBlock) -> LineBlock:
        rows = _kept(block.rows, self.options)
        if self.structs:
            rows = [
                row
                if isinstance(row, ShardkitError)
                else {n: v for n, v in row.items() if v is not None or n not in self.structs}
                for row in rows
            ]
        if not self.options.unchecked:
            rows = check_rows(rows, self.types, self.options.field_types, block.name_of)
        return block._replace(rows=rows)

    def _settings(self) -> dict[str, object]:
        return {"given": dict(self.options.field_types), **super()._settings()}


def open_json_lines(source: Source, options: ImportOptions) -> JsonLinesImporter:
    """Infer the schema of files of JSON lines."""
    check_suffixes(source, ("jsonl", "ndjson", "json"), "a file of JSON lines")
    # a listing of many files of lines is not read twice: the first file decides
    looked_at = source.files if _is_array(source.files[0]) else _documents(source)
    arrays = frozenset(file.name for file in looked_at if _is_array(file))
    note_partitions(source)
    objects = set[str]()  # objects whose members are fields
    left_out: dict[str, None] = {}  # dropped fields
    lists: dict[str, list[object]] = {}  # field → its first lists
    bad = LeftOut(options.skip_bad_rows)
    inference = TypeInference(options.field_types, bad, unchecked=options.unchecked)

    def blocks_of(file: SourceFile) -> Iterator[LineBlock]:
        return _blocks(file, None if file.name in arrays else read_pieces(file), options, objects)

    for block in blocks_to_infer(source, blocks_of, SCAN_ROWS, bad):
        rows = _kept(block.rows, options)
        inference.add(rows, block.name_of)
        if rows is not block.rows:
            named = [row for row in block.rows if isinstance(row, dict)]
            left_out.update(
                (name, None)
                for name in dict.fromkeys(n for row in named for n in row)
                if not options.keeps(name)
            )
        for name in inference.json_fields:
            seen = lists.setdefault(name, [])
            if len(seen) < _LISTS_SEEN:
                found = (row.get(name) for row in rows if isinstance(row, dict))
                seen += islice((value for value in found if type(value) is list), _LISTS_SEEN - len(seen))
    types = inference.types()
    structs = frozenset(objects - inference.valued)
    types = {name: kind for name, kind in types.items() if name not in structs}
    # Fields that first appear later: their optional type is given, and dropped fields need not appear.
    types |= {n: kind for n, kind in options.field_types.items() if n not in types and kind.endswith("?")}
    known = [*types, *left_out]
    unseen = [name for name in options.drop if not difflib.get_close_matches(name, known, 1)]
    source.notes.extend(f"--drop {shell_word(name)}: no row looked at has this field" for name in unseen)
    left_out.update(dict.fromkeys(unseen))
    if not (types or left_out):
        raise bad.no_samples(
            source.given, "no fields found (no rows, or empty objects); give a file with samples in it"
        )
    if (
        inference.rows == 1
        and len(source.files) == 1
        and any(kind.startswith("json") for kind in types.values())
    ):
        source.notes.append(
            f"{source.files[0].name} holds one object, which is one sample; if its members hold several samples, write "
            f"one object a line: {ONE_A_LINE}, or to_json(orient='records', lines=True) of pandas"
        )
    for name, values in lists.items():
        array = _array_of(values)
        if array and types.get(name, "").startswith("json") and name not in options.field_types:
            source.notes.append(array_note(name, *array))
    return JsonLinesImporter(
        source=source,
        fields=options.schema(types, source.given, names=left_out),
        options=options,
        types=types,
        arrays=arrays,
        structs=structs,
    )


def _is_array(file: SourceFile) -> bool:
    """Return True if a file holds one array instead of lines."""
    with (
        suppress(SourceError),
        open_plain(file) as stream,
    ):  # it is an error, or skipped, when the file is read
        return stream.read(_LOOKED_AT).removeprefix(BOM_UTF8).lstrip().startswith(b"[")
    return False


def _documents(source: Source) -> list[SourceFile]:
    return [file for file in source.files if file_suffix(file.name) == "json"]


def _blocks(
    file: SourceFile,
    pieces: Iterable[bytes] | None,
    options: ImportOptions,
    objects: set[str],
    first_line: int = 0,
) -> Iterator[LineBlock]:
    """Yield the objects of a file: of `pieces`, which are whole lines, or if there are none, the items of its array."""
    found = _items(file) if pieces is None else parse_pieces(file, pieces, json_rows, first_line)
    for block in found:
        if options.flatten or pieces is None:
            rows = [
                _object(row, block.name_of(number), options, objects) for number, row in enumerate(block.rows)
            ]
            block = block._replace(rows=rows)
        yield block


def _items(file: SourceFile) -> Iterator[LineBlock]:
    """Yield the items of the array of a file."""
    items, first, damage = read_array(file), 0, None
    while damage is None:
        rows: list[Any] = []
        try:
            rows.extend(islice(items, _ITEMS))
        except SourceError as error:  # the items before it are in the list
            damage = error
        if not rows and damage is None:
            return
        numbers = np.arange(first, first + len(rows))
        first += len(rows)
        yield LineBlock(file, b"", 0, numbers, rows, numbers, "item")
    raise damage


def _object(row: object, where: str, options: ImportOptions, objects: set[str]) -> object:
    """Return a value of JSON as a row, or the error that says why it is none."""
    try:
        if isinstance(row, SourceError):
            return row
        found = object_of(row, where)
        return _flat(found, where, options, objects) if options.flatten else found
    except SourceError as error:
        return error


def _kept(rows: list[Any], options: ImportOptions) -> list[Any]:
    """Return rows with their imported fields only."""
    if not options.chooses:
        return rows
    return [row if isinstance(row, ShardkitError) else options.kept(row) for row in rows]


def _flat(
    value: dict[str, object], where: str, options: ImportOptions, objects: set[str], prefix: str = ""
) -> dict[str, object]:
    """Return an object with nested objects replaced by their members; their names are added to `objects`."""
    row: dict[str, object] = {}
    for name, one in value.items():
        path = prefix + name
        inner = {path: one}
        if isinstance(one, dict) and path not in options.field_types:
            objects.add(path)
            inner = _flat(one, where, options, objects, f"{path}.")
        for field, member in inner.items():
            if field in row:
                raise SourceError(
                    f"{where}: two values are called {field!r}; build without --flatten, or keep one object whole with "
                    "--schema FIELD=json"
                )
            row[field] = member
    return row


def _array_of(values: list[object]) -> tuple[str, int] | None:
    """Return dtype and dimensions of lists of numbers of equal depth, or None for other lists."""
    dimensions = 0
    while values and all(type(value) is list for value in values):
        values = [one for value in values for one in cast("list[object]", value)]
        dimensions += 1
    kinds = {type(value) for value in values}
    if not kinds or not kinds <= {int, float}:
        return None
    return ("float64" if float in kinds else "int64"), dimensions
