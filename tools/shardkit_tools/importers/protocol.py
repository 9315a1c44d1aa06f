"""The importer protocol, and the options of a source: field types, selected fields and their names.

The build engine asks an importer for its tasks once, sends them to worker processes, and may read any of them
again after a kill. An importer therefore holds only settings and file names, no open files; it can be
pickled; and its results depend only on the source, not on the number of jobs or the order of calls.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol, Self, TypeAlias, TypeVar, runtime_checkable

import numpy as np

from shardkit.dataset.encoding import RowOrigin, sample_batch
from shardkit.errors import SampleError, SchemaError, ShardkitError, SourceError, UsageError
from shardkit.extras import shell_word
from shardkit.formats import RESERVED_NAMES, FieldType, Schema
from shardkit.formats.arrow_writing import index_array
from shardkit.formats.schema import MAX_FIELDS

_BATCH_BYTES = 1 << 20
_BATCH_ROWS = 4096
_Value = TypeVar("_Value")
_LONGEST_SHOWN = 1000  # characters of a name

MIXED = "mixed"
"""Type text of a field whose values have no common type; only possible with `ImportOptions.unchecked`."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Settings that importers share.

    Attributes:
        field_types: field → type that replaces the inferred one (``--schema field=type``).
        per: "file" or "line": unit of a sample in a text source.
        classes: whether the folders directly below the source are classes; None: yes if there are such
            folders.
        split_folders: whether the folders directly below the source are splits, which become refs; None: yes
            if all are named train, val, valid, validation, test or dev.
        skip_bad_rows: infer the schema from the readable rows, and leave out rows that cannot be read.
        columns: fields to import, by their names in the source; empty: all.
        drop: fields to leave out.
        rename: field of the source → new name.
        flatten: structs and objects become a field for each of their members, ``a.b.c``; those named in
            `field_types` stay whole, as maps and lists do. `columns` and `drop` may name one for all of its
            members.
        dtype: type of the tokens in a file that states none, such as "uint16".
        row: tokens of a row in such a file.
        arrays: several ``.npy`` files are parts of one array ("rows"), a sample each ("files"), or a field each
            ("fields"); "": their names and shapes decide.
        encoding: encoding of CSV; "": UTF-8, or UTF-16 if the file begins with its byte-order mark.
        quote: what encloses cells of CSV: '"', or "none" if quotes are plain characters; "": '"', except for TSV
            whose quotes do not enclose cells.
        keys: keys of samples in tars, and in tables with a column of keys: "source"; "prefixed" with the name of the
            file; "none": generated; "": "prefixed" if the first keys of several tars are equal, otherwise "source".
        check: "decode": pictures of a folder, and all values of adopted files, are decoded, so that damaged ones are
            found; "none": only what is needed is decoded, and the first bytes of pictures are checked; "": as "none",
            but JPEG, PNG and GIF with a size are decoded in folders of up to 100,000 files.
        follow_links: symbolic links out of the source, and to folders, are followed.
        unchecked: rows go to a function that may fix them: values that do not fit are passed as they are in
            the source, missing values as None, and no field name is refused.
    """

    field_types: Mapping[str, str] = field(default_factory=dict)
    per: str = "file"
    classes: bool | None = None
    split_folders: bool | None = None
    skip_bad_rows: bool = False
    columns: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    flatten: bool = False
    dtype: str = ""
    row: int = 0
    arrays: Literal["", "rows", "files", "fields"] = ""
    encoding: str = ""
    quote: str = ""
    keys: str = ""
    check: Literal["", "decode", "none"] = ""
    follow_links: bool = False
    unchecked: bool = False

    def __post_init__(self) -> None:
        if self.per not in ("file", "line"):
            raise UsageError(f"--per is {self.per!r}; expected 'file' or 'line'")
        if self.keys not in ("", "source", "prefixed", "none"):
            raise UsageError(f"--keys is {self.keys!r}; expected source, prefixed or none")
        if self.arrays not in ("", "rows", "files", "fields"):
            raise UsageError(f"--arrays is {self.arrays!r}; expected rows, files or fields")
        if self.check not in ("", "decode", "none"):
            raise UsageError(f"--check is {self.check!r}; expected decode or none")
        if self.quote not in ("", '"', "none"):
            raise UsageError(f"--quote is {self.quote!r}; expected '\"' or none")

    @property
    def chooses(self) -> bool:
        """Whether fields are left out or renamed."""
        return bool(self.columns or self.drop or self.rename)

    def keeps(self, name: str) -> bool:
        """Return True if a field of the source is imported."""
        return not self._names(self.drop, name) and (not self.columns or self._names(self.columns, name))

    def _names(self, given: Iterable[str], name: str) -> bool:
        """Return True if a field is among the given ones, or a member of one."""
        return name in given or (self.flatten and any(name.startswith(f"{one}.") for one in given))

    def kept(self, fields: Mapping[str, _Value]) -> Mapping[str, _Value]:
        """Return the imported fields of a sample."""
        return {name: value for name, value in fields.items() if self.keeps(name)} if self.chooses else fields

    def schema(self, inferred: Mapping[str, str], source: str, *, names: Iterable[str] = ()) -> Schema:
        """Return the inferred schema with the user's types, without fields that are left out.

        Args:
            inferred: field → type text, in storage order.
            source: the source as the user gave it, for messages.
            names: other fields of the source, which were left out already.

        Returns:
            The fields under their names in the source; `FileImporter` renames them.

        Raises:
            SchemaError: An option names an unknown field, or a field name cannot be stored.
        """
        known = list(dict.fromkeys([*inferred, *names]))
        self._check_named(known, source)
        types = {name: self.field_types.get(name, one) for name, one in inferred.items() if self.keeps(name)}
        if not known:
            raise SchemaError(f"{source}: it has no fields; give a source with some")
        if not types:
            raise SchemaError(
                f"{source}: --columns and --drop leave no field; its fields are {', '.join(known)}"
            )
        stored = {self.rename.get(name, name): text for name, text in types.items()}
        if len(stored) < len(types):
            names_of = [self.rename.get(name, name) for name in types]
            twice = next(name for name in names_of if names_of.count(name) > 1)
            raise SchemaError(
                f"{source}: two fields would be called {twice!r}; --rename one of them otherwise"
            )
        if self.unchecked:
            kinds = {n: FieldType(MIXED) if t == MIXED else FieldType.parse(t) for n, t in types.items()}
            return SourceSchema(kinds)
        try:
            schema = Schema.parse(stored)
        except SchemaError as error:
            whole = " or keep an object of many keys whole with --schema FIELD=json" * self.flatten
            fewer = f"; choose fields with --columns FIELD,…{whole}" * (len(stored) > MAX_FIELDS)
            raise SchemaError(f"{source}: {error}{_other_name(stored) or fewer}") from error
        return SourceSchema(dict(zip(types, schema.values(), strict=True))) if self.rename else schema

    def _check_named(self, known: list[str], source: str) -> None:
        named = {
            "--schema": self.field_types,
            "--columns": self.columns,
            "--drop": self.drop,
            "--rename": self.rename,
        }
        for option, asked in named.items():
            for name in asked:
                is_struct = option in ("--columns", "--drop") and any(self._names([name], k) for k in known)
                if name not in known and not is_struct:
                    near = difflib.get_close_matches(name, known, n=1)
                    raise SchemaError(
                        f"{source}: {option} names the field {name!r}, which the source does not have; "
                        + (f"did you mean {near[0]!r}?" if near else f"its fields are {', '.join(known)}")
                    )


class SourceSchema(Schema):
    """A schema with the names of the source, which may not be storable; types may be `MIXED`."""

    def __init__(self, fields: Mapping[str, FieldType]) -> None:
        self._fields = dict(fields)
        self._ordered = tuple(fields.items())


def _other_name(names: Iterable[str]) -> str:
    """Return advice on the first name that cannot be stored, or "" if all can."""
    for name in names:
        try:
            Schema.parse({name: "int64"})
        except SchemaError:
            if len(name) > _LONGEST_SHOWN:
                return "; give it another name where it comes from"
            near = re.sub(r"[^A-Za-z0-9]+", "_", name[:40]).strip("_").lower() or "field"
            near = near if near[0].isalpha() else f"field_{near}"
            near += "_" * (near in RESERVED_NAMES)
            rename, drop = shell_word(f"{name}={near}"), shell_word(name)
            return f"; give it another name, such as --rename {rename}, or leave it out: --drop {drop}"
    return ""


def array_note(name: str, dtype: str, dimensions: int) -> str:
    """Return a note on how a field of lists of numbers, json by default, becomes arrays."""
    flag = shell_word(f"{name}={dtype}[{','.join('*' * dimensions)}]")
    shaped = "" if dimensions == 1 else ", where its lists are equally long"
    return f"{name} is json; --schema {flag} makes an array of each row{shaped}"


def parse_field_types(pairs: Iterable[str], option: str = "--schema") -> dict[str, str]:
    """Parse ``field=type`` texts from a command line."""
    types = parse_pairs(pairs, option, "field=type, for example score=float64 or tokens=int32[*]")
    for text in types.values():
        FieldType.parse(text)
    return types


def parse_pairs(texts: Iterable[str], option: str, expected: str) -> dict[str, str]:
    """Split each text at its last equals sign and return a mapping."""
    pairs = {}
    for text in texts:
        name, equals, value = text.rpartition("=")
        if not (equals and value):
            raise UsageError(f"{option} {text!r}: expected {expected}")
        pairs[name] = value
    return pairs


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of a source."""

    # relative to the source root, with `/`; the same on every machine; recorded in the manifest
    name: str
    path: str  # path or URL on this machine; not recorded
    size: int  # in bytes
    # text that changes with the content (modification time in ns, ETag): finished work of a killed build is
    # reused only if name, size and stamp are unchanged
    stamp: str


@dataclass(frozen=True, slots=True)
class Source:
    """A listed source."""

    given: str  # source as the user typed it, for messages
    files: tuple[SourceFile, ...]  # sorted by name
    is_single_file: bool = False  # True if the user named one file, not a folder or a glob
    # file that is not a sample → reason, if the user allows to leave it out
    left_out: Mapping[str, str] = field(default_factory=dict)
    # remarks for the user; importers add to them
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SourceTask:
    """A part of the source that one process reads at once (target: 16 to 256 MiB)."""

    name: str  # unique in the source, for reports; not a path of this machine
    files: tuple[SourceFile, ...]  # files to read; a file may be in several tasks (ranges of it)
    size: int  # bytes to read, for balancing and progress
    # range in a unit of the importer (bytes, rows); stop is exclusive, None means the end
    start: int = 0
    stop: int | None = None
    first_row: int = 0  # number in the file of the task's first row, if it is known before reading


@dataclass(frozen=True, slots=True)
class SourceSample:
    """A sample of the source, before it is encoded by the schema."""

    sample: Mapping[str, object]  # field → value, as `shardkit.create(...).add` takes it
    # name of the row in the source (any text; see `shardkit.formats.fit_key`), unique; None: the key is
    # generated from the row's ordinal
    key: str | None
    source_name: str  # `SourceFile.name` of the row's file
    source_row: int  # its row in that file, counted from 0
    piece: int = 0  # number among the samples made from this row; 0 if there is only one
    where: str = ""  # name of the row for messages, if the format does not count rows from 0


@dataclass(frozen=True, slots=True)
class SourceFailure:
    """A row that cannot be read, although later rows can.

    An importer that *raises* ends its task: with ``on_error="skip"``, the rest of the task is lost. A yielded
    failure loses one row, or the rest of the file if its row is -1. ``error`` is a SourceError or SampleError that
    names file and row.
    """

    source_name: str
    source_row: int
    error: ShardkitError


def row_name(row: SourceSample | SourceFailure, paths: Mapping[str, str]) -> str:
    """Describe a row by file, number and key, for messages; `paths` maps file names to paths."""
    if isinstance(row, SourceSample) and row.where:
        return row.where
    text = f"{paths.get(row.source_name, row.source_name)} row {row.source_row}"
    key = row.key if isinstance(row, SourceSample) else None
    return text if key is None else f"{text} (key {key!r})"


@runtime_checkable
class Importer(Protocol):
    """A source of samples."""

    @property
    def schema(self) -> Schema:
        """Fields of every sample, in storage order."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the values 0, 1, … of the int64 field ``label``; empty if the source has no such names."""

    def files(self) -> Sequence[SourceFile]:
        """Return every file of the source, sorted by name; the sources object records their digests."""

    def tasks(self) -> Sequence[SourceTask]:
        """Return tasks in source order: the rows of the source are the rows of its tasks in sequence."""

    def read(self, task: SourceTask) -> Iterator[SourceSample | SourceFailure]:
        """Yield the rows of a task, in source order.

        Raises:
            SourceError: The rest of the task cannot be read; the message names file and row.
        """

    def describe(self) -> dict[str, object]:
        """Return name and settings for the recipe: plain JSON values without paths or times."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodedRows:
    """Consecutive decoded rows of a source."""

    batch: Any  # record batch of `arrow_schema` of the source's schema
    origin: RowOrigin

    def without(self, bad: Collection[int]) -> DecodedRows:
        """Return the other rows."""
        if not bad:
            return self
        good = np.delete(np.arange(len(self.origin)), list(bad))
        return DecodedRows(self.batch.take(index_array(good)), self.origin.take(good))


DecodedStream: TypeAlias = Iterator[DecodedRows | SourceFailure]


def decode_samples(
    samples: Iterable[SourceSample | SourceFailure], schema: Schema, paths: Mapping[str, str]
) -> DecodedStream:
    """Yield samples as record batches; a sample that does not fit the schema is a failure of its row.

    `paths` maps file names to paths, for messages.

    Raises:
        SourceError: `samples` raised it; the samples before it were yielded.
    """
    rows: list[SourceSample] = []
    payloads: list[tuple[bytes, ...]] = []
    size = 0
    damage: SourceError | None = None
    try:
        for found in samples:
            if isinstance(found, SourceFailure):
                yield found
                continue
            try:
                encoded = schema.encode(found.sample, where="")
            except SampleError:
                yield _failure(found, schema, paths)
                continue
            rows.append(found)
            payloads.append(encoded)
            size += sum(map(len, encoded))
            if size >= _BATCH_BYTES or len(rows) >= _BATCH_ROWS:
                yield _decode_rows(rows, payloads, schema)
                rows, payloads, size = [], [], 0
    except SourceError as error:
        damage = error
    if rows:  # also those before damage
        yield _decode_rows(rows, payloads, schema)
    if damage is not None:
        raise damage


def decode(importer: Importer, task: SourceTask, seen: FileObserver) -> DecodedStream:
    """Yield the rows of a task of any importer as record batches."""
    if isinstance(importer, FileImporter):
        return importer.decode(task, seen)
    paths = {file.name: file.path for file in task.files}
    return decode_samples(importer.read(task), importer.schema, paths)


def _failure(row: SourceSample, schema: Schema, paths: Mapping[str, str]) -> SourceFailure:
    """Encode again with the row's name, which is too slow to make for every row, and return the failure."""
    try:
        schema.encode(row.sample, where=row_name(row, paths))
    except SampleError as error:
        return SourceFailure(row.source_name, row.source_row, error)
    raise AssertionError("a sample is encoded the same way twice")


def _decode_rows(rows: list[SourceSample], payloads: list[tuple[bytes, ...]], schema: Schema) -> DecodedRows:
    origin = RowOrigin(
        [row.source_name for row in rows],
        np.array([row.source_row for row in rows], np.int64),
        [row.key for row in rows] if any(row.key is not None for row in rows) else (),
        [row.piece for row in rows] if any(row.piece for row in rows) else (),
    )
    return DecodedRows(sample_batch(schema, payloads), origin)


SampleStream: TypeAlias = Iterator[SourceSample | SourceFailure]
FileObserver: TypeAlias = Callable[[SourceFile, bytes], None]
"""Called with each file that was read as a whole and its bytes, to avoid a second read for its digest."""


def ignore_file(file: SourceFile, data: bytes) -> None:
    """Do nothing: the `FileObserver` of a caller that needs no digests."""


@dataclass(frozen=True, kw_only=True)
class FileImporter:
    """Base class of importers over a list of files."""

    name: str = ""  # name of the importer in the recipe
    # every file is read once as a whole and passed to the `FileObserver`
    reads_whole_files: ClassVar[bool] = False
    has_own_fields: ClassVar[bool] = False  # each row names its fields, so that all may lack an optional one

    source: Source  # the files
    options: ImportOptions  # options of the user
    fields: Schema  # fields of every sample, under their names in the source
    cut: tuple[SourceTask, ...] = ()  # the tasks, if they are known when the source is opened
    labels: tuple[str, ...] = ()  # names of the values of the source's field `label`

    @cached_property
    def _stored_names(self) -> dict[str, str]:
        """Field of the source → stored name."""
        return {name: self.options.rename.get(name, name) for name in self.fields}

    @cached_property
    def schema(self) -> Schema:
        if not self.options.rename:
            return self.fields
        kinds = {self._stored_names[name]: kind for name, kind in self.fields.items()}
        return SourceSchema(kinds) if self.options.unchecked else Schema(kinds)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the label values; empty if the field is left out or renamed."""
        return self.labels if self._stored_names.get("label") == "label" else ()

    def in_order(self, names: Iterable[str]) -> Self:
        """Return the importer with its fields in an order of stored names; the same one if these are not its fields."""
        sources = {self._stored_names[name]: name for name in self.fields}
        order = list(names)
        if set(order) != set(sources) or order == list(sources):
            return self
        fields = {sources[name]: self.fields[sources[name]] for name in order}
        return replace(self, fields=SourceSchema(fields))

    def files(self) -> Sequence[SourceFile]:
        return self.source.files

    def tasks(self) -> Sequence[SourceTask]:
        """Return the tasks made when the source was opened, otherwise one per file."""
        return self.cut or [SourceTask(file.name, (file,), file.size) for file in self.files()]

    def decode(self, task: SourceTask, seen: FileObserver = ignore_file) -> DecodedStream:
        """Yield the rows of a task as record batches of the schema, in source order, and failures."""
        paths = {file.name: file.path for file in task.files}
        return decode_samples(self._renamed(self._rows(task)), self.schema, paths)

    def read(self, task: SourceTask) -> SampleStream:
        """Yield the rows of a task as Python values; with `unchecked`, they are as in the source."""
        return self._renamed(self._rows(task))

    def _renamed(self, rows: SampleStream) -> SampleStream:
        """Yield rows with their fields under the stored names."""
        for found in rows:
            if self.options.rename and isinstance(found, SourceSample):
                sample = {self._stored_names.get(name, name): value for name, value in found.sample.items()}
                yield replace(found, sample=sample)
            else:
                yield found

    def _rows(self, task: SourceTask) -> SampleStream:
        """Yield the rows of a task under their names in the source."""
        raise NotImplementedError

    def describe(self) -> dict[str, object]:
        chosen = {"fields": self._stored_names} if self.options.chooses else {}
        return {"importer": self.name, **self._settings(), **chosen}

    def _settings(self) -> dict[str, object]:
        """Return further settings that decide the samples, for the recipe."""
        return {"flatten": True} if self.options.flatten else {}
