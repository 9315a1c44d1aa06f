"""Sources of JSON lines, or of one array of objects, in strict JSON: no NaN, no duplicate keys.

The schema is inferred from the first rows and checked on the rest.

    int → int64 (uint64 if a value needs it)       float → float64, which also takes exact ints
    string → str    true, false → bool             object, list → json

A field that is null or missing in some rows is optional. Two of these types in one field are an error that
names both rows: the user decides how to resolve it, and ``--schema field=json`` always works.
"""

from __future__ import annotations

import difflib
import itertools
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar, cast

from shardkit.errors import SourceError
from shardkit.extras import shell_word
from shardkit.formats.strict_json import parse_json
from shardkit_tools.importers.json_arrays import read_array
from shardkit_tools.importers.line_ranges import (
    before_damage,
    cut_lines,
    read_lines,
    rest_as_failure,
    rows_to_infer,
)
from shardkit_tools.importers.protocol import (
    MIXED,
    FileImporter,
    ImportOptions,
    SampleStream,
    Source,
    SourceFailure,
    SourceFile,
    SourceSample,
    SourceTask,
    array_note,
)
from shardkit_tools.importers.source_files import check_suffixes, file_suffix, open_plain

SCAN_ROWS = 100_000
"""Number of rows, in source order, for inferring the schema of a large source: the same for any number of jobs."""


@dataclass(frozen=True, kw_only=True)
class JsonLinesImporter(FileImporter):
    """Files of JSON lines, or of one array of objects, as a source."""

    name: str = "jsonl"
    has_own_fields: ClassVar[bool] = True
    types: Mapping[str, str]
    arrays: frozenset[str]
    """Names of files that hold one JSON array of objects."""
    structs: frozenset[str]
    """Objects whose members are the fields, because of `flatten`; a null in their place is dropped."""

    def _rows(self, task: SourceTask) -> SampleStream:
        """Yield one sample per line; a line that does not parse or fit is a failure of that line only."""
        for file in task.files:
            lines = enumerate(read_lines(file, task.start, task.stop), task.first_row)
            yield from rest_as_failure(file, self.rows_of(file, None if file.name in self.arrays else lines))

    def rows_of(self, file: SourceFile, lines: Iterator[tuple[int, bytes]] | None) -> SampleStream:
        """Yield a sample or a failure for each (number, line) that is not empty; None: for the file's array."""
        for number, where, found in _objects(file, lines, self.options):
            try:
                if isinstance(found, SourceError):
                    raise found
                row = self.options.kept(found)
                if self.structs:
                    row = {n: v for n, v in row.items() if v is not None or n not in self.structs}
                if not self.options.unchecked:
                    check_row(row, self.types, self.options.field_types, where)
            except SourceError as error:
                yield SourceFailure(file.name, number, error)
            else:
                yield SourceSample(row, None, file.name, number, where=where)

    def _settings(self) -> dict[str, object]:
        return {"given": dict(self.options.field_types), **super()._settings()}


def open_json_lines(source: Source, options: ImportOptions) -> JsonLinesImporter:
    """Infer the schema of files of JSON lines."""
    check_suffixes(source, ("jsonl", "ndjson", "json"), "a file of JSON lines")
    # a listing of many files of lines is not read twice: the first file decides
    looked_at = source.files if _is_array(source.files[0]) else _documents(source)
    arrays = frozenset(file.name for file in looked_at if _is_array(file))
    first = _First(source, options, arrays)
    types = infer_types(
        first.rows(), options.field_types, skip=options.skip_bad_rows, unchecked=options.unchecked
    )
    structs = frozenset(first.objects - first.valued)  # objects whose members are fields, or null
    types = {name: kind for name, kind in types.items() if name not in structs}
    # Fields that first appear later: their optional type is given, and dropped fields need not appear.
    types |= {n: kind for n, kind in options.field_types.items() if n not in types and kind.endswith("?")}
    known = [*types, *first.left_out]
    unseen = [name for name in options.drop if not difflib.get_close_matches(name, known, 1)]
    source.notes.extend(f"--drop {shell_word(name)}: no row looked at has this field" for name in unseen)
    first.left_out.update(dict.fromkeys(unseen))
    if not (types or first.left_out):
        raise SourceError(
            f"{source.given}: no fields found (no rows, or empty objects); give a file with samples in it"
        )
    if (
        first.count == 1
        and len(source.files) == 1
        and any(kind.startswith("json") for kind in types.values())
    ):
        source.notes.append(
            f"{source.files[0].name} holds one object, which is one sample; if its members hold several samples, write "
            f"one object a line: {_ONE_A_LINE}, or to_json(orient='records', lines=True) of pandas"
        )
    for name, values in first.lists.items():
        found = _array_of(values)
        if found and types.get(name, "").startswith("json") and name not in options.field_types:
            source.notes.append(array_note(name, *found))
    return JsonLinesImporter(
        source=source,
        fields=options.schema(types, source.given, names=first.left_out),
        options=options,
        types=types,
        cut=cut_lines(source.files, arrays),
        arrays=arrays,
        structs=structs,
    )


class _First:
    """The rows that types are inferred from, and facts collected from them."""

    def __init__(self, source: Source, options: ImportOptions, arrays: Collection[str]) -> None:
        self._source, self._options, self._arrays = source, options, arrays
        self.left_out: dict[str, None] = {}  # dropped fields
        self.objects = set[str]()
        self.valued = set[str]()  # fields with a value other than null
        self.lists: dict[str, list[object]] = {}  # field → its first lists
        self.count = 0

    def rows(self) -> Iterator[tuple[str, Mapping[str, object]]]:
        for where, row in itertools.islice(self._all(), rows_to_infer(self._source.files, SCAN_ROWS)):
            self.count += 1
            found = self._options.kept(row)
            if found is not row:
                self.left_out.update(dict.fromkeys(name for name in row if name not in found))
            for name, value in found.items():
                if type(value) is list and len(seen := self.lists.setdefault(name, [])) < _LISTS_SEEN:
                    seen.append(value)
            if self._options.flatten:
                self.valued.update(name for name, value in found.items() if value is not None)
            yield where, found

    def _all(self) -> Iterator[tuple[str, Mapping[str, object]]]:
        for file in self._source.files:
            lines = None if file.name in self._arrays else enumerate(read_lines(file))
            found, skip = _objects(file, lines, self._options, self.objects), self._options.skip_bad_rows
            for _, where, row in before_damage(found, skip=skip):
                if not isinstance(row, SourceError):
                    yield where, row
                elif not skip:
                    raise row


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


def _objects(
    file: SourceFile,
    lines: Iterator[tuple[int, bytes]] | None,
    options: ImportOptions,
    objects: set[str] | None = None,
) -> Iterator[tuple[int, str, dict[str, object] | SourceError]]:
    """Yield (number from 0, name for messages, object) of the lines, or of the items of the file's array."""
    items: Iterator[tuple[int, object]] = (
        enumerate(read_array(file)) if lines is None else (line for line in lines if line[1].strip())
    )
    for number, item in items:
        where = f"{file.path} {'item' if lines is None else 'line'} {number + 1}"
        try:
            value = _parse_line(item, where) if isinstance(item, bytes) else item
            if not isinstance(value, dict):
                raise SourceError(
                    f"{where}: holds a {type(value).__name__}, not an object; each line must be one JSON object, or "
                    "the file one array of them"
                )
            if options.flatten:
                value = _flat(value, where, options, set() if objects is None else objects)
        except SourceError as error:
            yield number, where, error
        else:
            yield number, where, value


_ONE_A_LINE = "jq -c . FILE, or jq -c '.data[]' FILE if the samples are a list in it"


def _parse_line(line: bytes, where: str) -> object:
    """Return the value of a line."""
    try:
        return parse_json(line, where)
    except SourceError as error:
        if "Extra data" in str(error):
            what = (
                "a comma after the object" if line.rstrip().endswith(b"},") else "several values in one line"
            )
            raise SourceError(
                f"{where}: {what}; write one object a line and nothing else: {_ONE_A_LINE}"
            ) from error
        if not line.lstrip().startswith(b"{") or line.rstrip()[-1:] not in b"{[,":
            raise
        raise SourceError(
            f"{where}: an object that continues on the next line; write one object a line: {_ONE_A_LINE}"
        ) from error


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


_WORDS = {
    bool: "a boolean",
    int: "an integer",
    float: "a number with a fraction",
    str: "a string",
    dict: "an object",
    list: "a list",
}
_KINDS = {bool: "bool", int: "int64", float: "float64", str: "str", dict: "json", list: "json"}
_LOOKED_AT = 4096
_LISTS_SEEN = 16  # lists kept per field, for notes
_INT64 = range(-(2**63), 2**63)
_UINT64 = range(2**64)
_EXACT = 2**53  # float64 holds every integer up to this


@dataclass(slots=True)
class _FieldFacts:
    """Facts about one field: its type so far, and the row that it was inferred from."""

    kind: str
    where: str
    value: object
    unsigned: bool = False  # a value needs uint64
    negative: bool = False
    inexact: int | None = None  # an integer that float64 would change

    def holds(self, value: object) -> bool:
        """Return True if a value certainly changes nothing; False means that `learn` must check it."""
        kind = type(value)
        return _KINDS.get(kind) == self.kind and (kind is not int or 0 <= value <= _EXACT)  # type: ignore[operator]  # it is one

    def learn(self, name: str, value: object, where: str) -> None:
        kind = _KINDS[type(value)]
        if kind != self.kind:
            if {kind, self.kind} != {"int64", "float64"}:
                raise SourceError(
                    f"{where}: field {name!r} is {_short(value)}, but {_short(self.value)} in {self.where}; "
                    f"make them alike, or pass --schema {shell_word(name)}=json"
                )
            self.kind = "float64"
        if type(value) is int:
            self.negative |= value < 0
            self.unsigned |= value not in _INT64
            if not _is_exact(value):
                self.inexact = value
            if value not in _INT64 and value not in _UINT64:
                raise SourceError(
                    f"{where}: field {name!r} is {value}, which no 64-bit integer holds; write it as a string"
                )

    def conclude(self, name: str) -> str:
        """Return the type that holds all values."""
        word = shell_word(name)
        if self.kind == "float64" and self.inexact is not None:
            raise SourceError(
                f"field {name!r} holds {self.inexact}, which float64 would change, and numbers with a fraction "
                f"({self.where} and others); write the numbers as strings, or pass --schema {word}=json"
            )
        if self.kind != "int64" or not self.unsigned:
            return self.kind
        if self.negative:
            raise SourceError(
                f"field {name!r} holds both negative integers and integers from 2**63 on; pass --schema "
                f"{word}=json, or write them as strings"
            )
        return "uint64"


def _of_each(shapes: Mapping[tuple[str, ...], int]) -> dict[str, int]:
    """Return field → number of rows that have it."""
    found: dict[str, int] = {}
    for names, count in shapes.items():
        for name in names:
            found[name] = found.get(name, 0) + count
    return found


def _learn(
    seen: dict[str, _FieldFacts], name: str, value: object, where: str, mixed: set[str] | None
) -> None:
    """Learn from a value; unless `mixed` is None, a conflict adds the field to it instead of raising."""
    if mixed is not None and name in mixed:
        return
    known = seen.get(name)
    if known is None:
        known = seen[name] = _FieldFacts(_KINDS[type(value)], where, value)
    try:
        known.learn(name, value, where)
    except SourceError:
        if mixed is None:
            raise
        mixed.add(name)


def infer_types(
    rows: Iterable[tuple[str, Mapping[str, object]]],
    given: Mapping[str, str],
    *,
    skip: bool = False,
    unchecked: bool = False,
) -> dict[str, str]:
    """Return field types that hold every row.

    Returns:
        field → type text; optional if a row lacks the field or has null; json if it is null in every row.
    """
    seen: dict[str, _FieldFacts] = {}
    mixed: set[str] | None = set() if unchecked and not skip else None
    shapes = Counter[tuple[str, ...]]()  # fields in order → number of rows with exactly these
    nulls = Counter[tuple[str, ...]]()  # the same for fields that are null
    for where, row in rows:
        known = {name: replace(one) for name, one in seen.items()} if skip else seen
        try:
            for name, value in row.items():
                one = known.get(name)
                if one is not None and one.holds(value):
                    continue
                if value is not None and name not in given:
                    _learn(known, name, value, where, mixed)
        except SourceError:
            if not skip:
                raise
            continue
        seen = known
        shapes[tuple(row)] += 1
        if None in row.values():
            nulls[tuple(name for name, value in row.items() if value is None)] += 1
    rows_seen, null_in = shapes.total(), _of_each(nulls)
    types = {}
    for name, count in _of_each(shapes).items():
        is_mixed = mixed is not None and name in mixed
        found = MIXED if is_mixed else _conclude(seen.get(name), name, unchecked=unchecked)
        is_optional = count - null_in.get(name, 0) < rows_seen and found != MIXED
        types[name] = given.get(name) or found + "?" * is_optional
    return types


def _conclude(known: _FieldFacts | None, name: str, *, unchecked: bool) -> str:
    if known is None:
        return "json"
    try:
        return known.conclude(name)
    except SourceError:
        if not unchecked:
            raise
        return MIXED


def check_row(
    row: Mapping[str, object], types: Mapping[str, str], given: Mapping[str, str], where: str
) -> None:
    """Check a row against the inferred types."""
    if row.keys() != types.keys():
        _check_fields(row, types, where)
    for name, value in row.items():
        kind = types[name]
        if name in given or (value is None and kind.endswith("?")):
            continue
        plain = kind.removesuffix("?")
        if _KINDS.get(type(value)) == plain:
            continue
        if type(value) is int and (
            (plain == "uint64" and value in _UINT64) or (plain == "float64" and _is_exact(value))
        ):
            continue
        if value is None:
            raise SourceError(f"{where}: field {name!r} is null, {_unseen(name, kind)}")
        raise SourceError(
            f"{where}: field {name!r} is {_short(value)}, but {kind} was inferred from the rows before it; "
            f"mend the row, or pass --schema {shell_word(name)}={'float64' if isinstance(value, float) else 'json'}"
        )


def _check_fields(row: Mapping[str, object], types: Mapping[str, str], where: str) -> None:
    for name, kind in types.items():
        if name not in row and not kind.endswith("?"):
            raise SourceError(f"{where}: the field {name!r} is missing, {_unseen(name, kind)}")
    added = next((name for name in row if name not in types), None)
    if added is not None:
        raise SourceError(
            f"{where}: has the field {added!r}, which no row has that types were inferred from (the first "
            f"{SCAN_ROWS}); say its type, such as --schema {shell_word(added)}=str?, or leave it out: "
            f"--drop {shell_word(added)}"
        )


def _unseen(name: str, kind: str) -> str:
    return (
        f"and {kind} was inferred from the rows before it; give it a value, leave the row out, or pass --schema "
        f"{shell_word(name)}={kind}?"
    )


def _is_exact(value: int) -> bool:
    return abs(value) <= _EXACT or (abs(value) < 2**64 and int(float(value)) == value)


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


def _short(value: object) -> str:
    text = repr(value)
    return (
        f"{_WORDS[type(value)]} ({text if len(text) <= 40 else text[:37] + '…'})"
        if value is not None
        else "null"
    )
