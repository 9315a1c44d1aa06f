"""What an importer is, and what a user says of its source: field types, which fields are taken, and under which names.

The build engine asks an importer for its tasks once, hands them to worker processes and may read any of them again
after a kill. So an importer holds settings and file names only, never an open file; it survives pickling; and what it
answers is a function of the source alone, whatever the number of jobs and the order of the calls.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np

from shardkit.dataset.arrow_columns import sample_batch
from shardkit.dataset.encoding import RowOrigin
from shardkit.errors import SampleError, SchemaError, ShardkitError, UsageError
from shardkit.formats import RESERVED_NAMES, FieldType, Schema

_BATCH_BYTES = 1 << 20
_BATCH_ROWS = 4096
_Value = TypeVar("_Value")
_LONGEST_SHOWN = 1000  # characters of a name

MIXED = "mixed"
"""Type text of a field whose values have no common type; only a source that is not checked has such a field."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Settings that importers share.

    Attributes:
        field_types: field → type that replaces the inferred one (``--schema field=type``).
        per: "file" or "line": what one sample of a text source is.
        classes: whether the folders directly below the source are classes; None: yes where there are such folders.
        split_folders: whether the folders directly below the source are splits, which become refs; None: yes where all
            are named train, val, valid, validation, test or dev.
        skip_bad_rows: infer the schema from the rows that can be read, and leave out the others.
        columns: fields that are taken, by the names that the source has; empty: all.
        drop: fields that are left out.
        rename: field of the source → name that it gets.
        flatten: structs and objects become a field for each of their members, ``a.b.c``; those that `field_types` names
            stay whole, as maps and lists do. `columns` and `drop` may name one for all of its members.
        encoding: of CSV; "": UTF-8, or UTF-16 where the file begins with its mark.
        unchecked: rows go to a function that may mend them: values that do not fit are given as the source has them,
            None for a value that is not there, and no field name is refused.
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
    encoding: str = ""
    unchecked: bool = False

    def __post_init__(self) -> None:
        if self.per not in ("file", "line"):
            raise UsageError(f"--per is {self.per!r}; expected 'file' or 'line'")

    @property
    def chooses(self) -> bool:
        """Whether fields are left out or renamed."""
        return bool(self.columns or self.drop or self.rename)

    def keeps(self, name: str) -> bool:
        """Whether a field of the source is taken."""
        return not self._names(self.drop, name) and (not self.columns or self._names(self.columns, name))

    def _names(self, given: Iterable[str], name: str) -> bool:
        """Whether a field is among those given, or a member of one."""
        return name in given or (self.flatten and any(name.startswith(f"{one}.") for one in given))

    def kept(self, fields: Mapping[str, _Value]) -> Mapping[str, _Value]:
        """Fields of a sample without those that are left out."""
        return {name: value for name, value in fields.items() if self.keeps(name)} if self.chooses else fields

    def schema(self, inferred: Mapping[str, str], source: str, *, names: Iterable[str] = ()) -> Schema:
        """The inferred schema with the user's types in place of the inferred ones, without what is left out.

        Args:
            inferred: field → type text, in storage order.
            source: the source as the user gave it, for messages.
            names: of the source's other fields, which were left out already.

        Returns:
            The fields by the names that the source has; `FileImporter` renames them.

        Raises:
            SchemaError: a field is named that the source does not have, or a field name cannot be stored.
        """
        known = list(dict.fromkeys([*inferred, *names]))
        self._check_named(known, source)
        types = {name: self.field_types.get(name, one) for name, one in inferred.items() if self.keeps(name)}
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
            whole = "; --schema FIELD=json keeps an object of many keys whole" if self.flatten else ""
            raise SchemaError(f"{source}: {error}{_other_name(stored) or whole}") from error
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
                is_struct = option in ("--columns", "--drop") and any(
                    self._names([name], one) for one in known
                )
                if name not in known and not is_struct:
                    near = difflib.get_close_matches(name, known, n=1)
                    raise SchemaError(
                        f"{source}: {option} names the field {name!r}, which the source does not have; "
                        + (f"did you mean {near[0]!r}?" if near else f"its fields are {', '.join(known)}")
                    )


class SourceSchema(Schema):
    """Fields by the names that a source has, of which not all can be stored; types may be `MIXED`."""

    def __init__(self, fields: Mapping[str, FieldType]) -> None:
        self._fields = dict(fields)
        self._ordered = tuple(fields.items())


def _other_name(names: Iterable[str]) -> str:
    """What to do about the first name that cannot be stored; nothing where all can."""
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


def shell_word(text: str) -> str:
    """Text as a shell takes it; what cannot be printed is escaped, as bash and zsh read it."""
    if text.isprintable():
        return shlex.quote(text)
    escaped = text.encode("unicode_escape").decode().replace("'", r"\'")
    return "$'" + re.sub(r"\\x(?=[89a-f])", r"\\u00", escaped) + "'"


def array_note(name: str, dtype: str, dimensions: int) -> str:
    """How a field of lists of numbers, which is json where nobody says more, becomes arrays."""
    flag = shell_word(f"{name}={dtype}[{','.join('*' * dimensions)}]")
    shaped = "" if dimensions == 1 else ", where its lists are equally long"
    return f"{name} is json; --schema {flag} makes an array of each row{shaped}"


def parse_field_types(pairs: Iterable[str], option: str = "--schema") -> dict[str, str]:
    """Parse ``field=type`` texts as given on a command line.

    Raises:
        UsageError: a text is not of that form, or the type does not exist.
    """
    types = parse_pairs(pairs, option, "field=type, for example score=float64 or tokens=int32[*]")
    for text in types.values():
        FieldType.parse(text)
    return types


def parse_pairs(texts: Iterable[str], option: str, expected: str) -> dict[str, str]:
    """What stands before and behind the last equals sign of each text."""
    pairs = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        if not (name and value):
            raise UsageError(f"{option} {text!r}: expected {expected}")
        pairs[name] = value
    return pairs


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source."""

    # relative to the source root, `/` between parts; the same on every machine; it goes into the manifest
    name: str
    path: str  # where this machine finds it; it never leaves this machine
    size: int  # in bytes
    # any text that changes when the content does (modification time in ns, ETag): finished work of a killed build is
    # reused only where name, size and stamp are what they were
    stamp: str


@dataclass(frozen=True, slots=True)
class Source:
    """A listed source."""

    given: str  # the source as the user typed it, for messages
    files: tuple[SourceFile, ...]  # sorted by name
    is_single_file: bool = False  # the user named one file, not a folder or a glob
    # what was there and is no sample → why, where the user lets it be left out
    left_out: Mapping[str, str] = field(default_factory=dict)
    # what a person may want to know of it; importers add to them
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SourceTask:
    """A share of the source that one process reads in one go (aim: 16 to 256 MiB)."""

    name: str  # unique within the source, for reports; no path of this machine
    files: tuple[SourceFile, ...]  # what the task reads; a file may appear in several tasks (ranges of it)
    size: int  # bytes that this task reads, to balance work and show progress
    # start, stop: the range of the file, in whatever unit the importer counts (bytes, rows); stop is exclusive and
    # None means the end; meaningful only to the importer
    start: int = 0
    stop: int | None = None
    first_row: int = 0  # number in the file of its first row, where that is known before it is read


@dataclass(frozen=True, slots=True)
class SourceSample:
    """One sample as the source has it, before it is encoded by the schema."""

    sample: Mapping[str, object]  # field → value, as `shardkit.create(...).add` takes it
    # the source's own name of the row (any text; made to fit by `shardkit.formats.fit_key`), unique in the source;
    # None where the source has none: it is then generated from the row's ordinal
    key: str | None
    source_name: str  # `SourceFile.name` of the file that the row comes from
    source_row: int  # its row in that file, counted from 0
    piece: int = 0  # its number among the samples that were made of this row; 0 where there is one only


@dataclass(frozen=True, slots=True)
class SourceFailure:
    """A row that cannot be read although the rows after it can.

    An importer that *raises* ends its task. With ``on_error="skip"`` that costs the rest of the task; a yielded failure
    costs one row. ``error`` is a SourceError or SampleError that names file and row.
    """

    source_name: str
    source_row: int
    error: ShardkitError


def row_name(row: SourceSample | SourceFailure, paths: Mapping[str, str]) -> str:
    """A row by file, number and key, for messages; `paths` of files by their names."""
    text = f"{paths.get(row.source_name, row.source_name)} row {row.source_row}"
    key = row.key if isinstance(row, SourceSample) else None
    return text if key is None else f"{text} (key {key!r})"


@runtime_checkable
class Importer(Protocol):
    """A source of samples."""

    @property
    def schema(self) -> Schema:
        """The fields of every sample, in the order in which they are stored."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the values 0, 1, … of the int64 field ``label``; empty where the source has no such names."""

    def files(self) -> Sequence[SourceFile]:
        """Every file of the source, sorted by name; their digests go into the manifest's sources object."""

    def tasks(self) -> Sequence[SourceTask]:
        """The source cut into shares, in source order: the rows of the source are the rows of its tasks in turn."""

    def read(self, task: SourceTask) -> Iterator[SourceSample | SourceFailure]:
        """The rows of one task, in source order.

        Raises:
            SourceError: names the file and the row that cannot be read.
        """

    def describe(self) -> dict[str, object]:
        """Name and settings for the recipe: text, integers, booleans, lists and dicts of them; no path, no time."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodedRows:
    """Neighbouring rows of a source, decoded."""

    batch: Any  # record batch of `arrow_schema` of the source's schema
    origin: RowOrigin


DecodedStream: TypeAlias = Iterator[DecodedRows | SourceFailure]


def decode_samples(
    samples: Iterable[SourceSample | SourceFailure], schema: Schema, paths: Mapping[str, str]
) -> DecodedStream:
    """Yield samples as record batches; a sample that does not fit the schema is a failure of its row.

    `paths` of files by their names are for messages.
    """
    rows: list[SourceSample] = []
    payloads: list[tuple[bytes, ...]] = []
    size = 0
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
            yield _decoded(rows, payloads, schema)
            rows, payloads, size = [], [], 0
    if rows:
        yield _decoded(rows, payloads, schema)


def decode(importer: Importer, task: SourceTask, seen: FileObserver) -> DecodedStream:
    """Yield the rows of a task as record batches, of any importer."""
    if isinstance(importer, FileImporter):
        return importer.decode(task, seen)
    paths = {file.name: file.path for file in task.files}
    return decode_samples(importer.read(task), importer.schema, paths)


def _failure(row: SourceSample, schema: Schema, paths: Mapping[str, str]) -> SourceFailure:
    """Encode once more with the row's name: making one for every good row would cost more than encoding some."""
    try:
        schema.encode(row.sample, where=row_name(row, paths))
    except SampleError as error:
        return SourceFailure(row.source_name, row.source_row, error)
    raise AssertionError("a sample is encoded the same way twice")


def _decoded(rows: list[SourceSample], payloads: list[tuple[bytes, ...]], schema: Schema) -> DecodedRows:
    origin = RowOrigin(
        [row.source_name for row in rows],
        np.array([row.source_row for row in rows], np.int64),
        [row.key for row in rows] if any(row.key is not None for row in rows) else (),
        [row.piece for row in rows] if any(row.piece for row in rows) else (),
    )
    return DecodedRows(sample_batch(schema, payloads), origin)


SampleStream: TypeAlias = Iterator[SourceSample | SourceFailure]
FileObserver: TypeAlias = Callable[[SourceFile, bytes], None]
"""Called with every file that was read whole, and its bytes, so that it is not read again for its digest."""


def ignore_file(file: SourceFile, data: bytes) -> None:
    """The `FileObserver` of a caller that needs no digests."""


@dataclass(frozen=True, kw_only=True)
class FileImporter:
    """A source format over the files of a source: its units, and how the bytes of one are decoded."""

    name: ClassVar[str]  # of the importer, in the recipe
    reads_whole_files: ClassVar[bool] = (
        False  # every file is read whole, once, and passed to the `FileObserver`
    )

    source: Source  # its files
    options: ImportOptions  # what the user said of them
    fields: Schema  # of every sample, by the names that the source has
    cut: tuple[SourceTask, ...] = ()  # its tasks, where they are known when it is opened
    labels: tuple[str, ...] = ()  # names of the values of the source's field `label`

    @cached_property
    def _stored(self) -> dict[str, str]:
        """Field of the source → stored name."""
        return {name: self.options.rename.get(name, name) for name in self.fields}

    @cached_property
    def schema(self) -> Schema:
        if not self.options.rename:
            return self.fields
        kinds = {self._stored[name]: kind for name, kind in self.fields.items()}
        return SourceSchema(kinds) if self.options.unchecked else Schema(kinds)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the label; none where it is gone, or is another field."""
        return self.labels if self._stored.get("label") == "label" else ()

    def files(self) -> Sequence[SourceFile]:
        return self.source.files

    def tasks(self) -> Sequence[SourceTask]:
        """As they were cut when the source was opened, else one per file."""
        return self.cut or [SourceTask(file.name, (file,), file.size) for file in self.files()]

    def ranges(self, task: SourceTask) -> Sequence[tuple[SourceFile, int, int]]:
        """Return the bytes that a task needs for the fields that are taken: (file, start, stop)."""
        return [(file, 0, file.size) for file in task.files]

    def decode(self, task: SourceTask, seen: FileObserver = ignore_file) -> DecodedStream:
        """Yield the rows of a task as record batches of the schema, in source order; and those that cannot be read.

        Raises:
            SourceError: names the file and the row from which on nothing can be read.
        """
        paths = {file.name: file.path for file in task.files}
        return decode_samples(self._samples(task, seen), self.schema, paths)

    def read(self, task: SourceTask) -> SampleStream:
        """Yield the rows of a task as Python values; a function gets them as the source has them."""
        return self._samples(task, ignore_file)

    def _samples(self, task: SourceTask, seen: FileObserver) -> SampleStream:
        """Yield the rows of a task, under the names that are stored."""
        for found in self._rows(task, seen):
            if self.options.rename and isinstance(found, SourceSample):
                sample = {self._stored.get(name, name): value for name, value in found.sample.items()}
                yield replace(found, sample=sample)
            else:
                yield found

    def _rows(self, task: SourceTask, seen: FileObserver) -> SampleStream:
        """Yield the rows of a task, under the names that the source has."""
        raise NotImplementedError

    def describe(self) -> dict[str, object]:
        chosen = {"fields": self._stored} if self.options.chooses else {}
        return {"importer": self.name, **self._settings(), **chosen}

    def _settings(self) -> dict[str, object]:
        """What decides the samples beside their files, for the recipe."""
        return {"flatten": True} if self.options.flatten else {}
