"""What an importer is: a source that says how it is cut into tasks and reads one at a time; what a user may say of it.

The build engine asks an importer for its tasks once, hands them to worker processes and may read any of them again
after a kill. So an importer holds settings and file names only, never an open file; it survives pickling; and what it
answers is a function of the source alone, whatever the number of jobs and the order of the calls.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from shardkit.dataset.extents import ExtentColumn
from shardkit.errors import SchemaError, ShardkitError, UsageError
from shardkit.formats import FieldType, Schema, presence_of

__all__ = [
    "ColumnImporter",
    "ExtentImporter",
    "ImportOptions",
    "Importer",
    "SampleColumns",
    "SourceFailure",
    "SourceFile",
    "SourceSample",
    "SourceTask",
    "WholeFileImporter",
    "one_by_one",
    "parse_field_types",
]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source.

    Attributes:
        name: relative to the source root, ``/`` between parts; the same on every machine. It goes into the manifest.
        path: where this machine finds it. It never leaves this machine.
        size: in bytes.
        stamp: any text that changes when the content does (modification time in ns, ETag). Finished work of a killed
            build is reused only where name, size and stamp are what they were.
    """

    name: str
    path: str
    size: int
    stamp: str


@dataclass(frozen=True, slots=True)
class SourceTask:
    """A share of the source that one process reads in one go (aim: 16 to 256 MiB).

    Attributes:
        name: unique within the source, for reports; no path of this machine.
        files: what the task reads. A file may appear in several tasks (ranges of it).
        size: bytes that this task reads, to balance work and show progress.
        start, stop: the range of the file, in whatever unit the importer counts (bytes, rows); stop is exclusive and
            None means the end. Meaningful only to the importer.
    """

    name: str
    files: tuple[SourceFile, ...]
    size: int
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class SourceSample:
    """One sample as the source has it, before it is encoded by the schema.

    Attributes:
        sample: field → value, as `shardkit.create(...).add` takes it.
        key: the source's own name of the row (any text; made to fit by `shardkit.formats.fit_key`), unique in the
            source; None where the source has none: it is then generated from the row's ordinal.
        source_name: `SourceFile.name` of the file that the row comes from.
        source_row: its row in that file, counted from 0.
        piece: its number among the samples that were made of this row; 0 where there is one only.
    """

    sample: Mapping[str, object]
    key: str | None
    source_name: str
    source_row: int
    piece: int = 0


@dataclass(frozen=True, slots=True)
class SourceFailure:
    """A row that cannot be read although the rows after it can.

    An importer that *raises* ends its task. With ``on_error="skip"`` that costs the rest of the task; a yielded failure
    costs one row. ``error`` is a SourceError or SampleError that names file and row.
    """

    source_name: str
    source_row: int
    error: ShardkitError


@dataclass(frozen=True, slots=True, eq=False)
class SampleColumns:
    """Neighbouring rows of a file without keys, field by field: the same as a `SourceSample` for each.

    Attributes:
        columns: stored column → array (n, …), whose rows are the values of the samples; or where they are.
        source_name: of the file. first_row: the row in it of the first sample; the others follow.
    """

    columns: Mapping[str, NDArray[Any] | ExtentColumn]
    source_name: str
    first_row: int

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def samples(self) -> Iterator[SourceSample]:
        """The samples one by one; their values are here."""
        for row in range(len(self)):
            sample: dict[str, object] = {
                name: column[row]
                for name, column in self.columns.items()
                if not isinstance(column, ExtentColumn)
            }
            for name in self.columns:
                if not sample.pop(presence_of(name), True):
                    sample[name] = None
            yield SourceSample(sample, None, self.source_name, self.first_row + row)


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


@runtime_checkable
class ColumnImporter(Importer, Protocol):
    """An importer that has many samples at once where the source does."""

    def read_columns(self, task: SourceTask) -> Iterator[SampleColumns | SourceSample | SourceFailure]:
        """What `Importer.read` gives, in the same order."""


@runtime_checkable
class ExtentImporter(Importer, Protocol):
    """An importer of files that hold large payloads as they stand, in any order and as often as one likes.

    Where the page cache holds the source, these payloads are read again when their shard is written, instead of being
    written to scratch and read from there.
    """

    def bytes_in_place(self, task: SourceTask) -> int:
        """Bytes of a task that `read_extents` leaves where they are."""

    def read_extents(
        self, task: SourceTask, states: Sequence[int]
    ) -> Iterator[SampleColumns | SourceSample | SourceFailure]:
        """What `Importer.read` gives, in the same order, with extents in the place of large payloads.

        Args:
            task: to be read.
            states: of its files, see `file_state`.
        """


@runtime_checkable
class WholeFileImporter(Importer, Protocol):
    """An importer that reads its files whole, each of them once."""

    def bytes_in_place(self, task: SourceTask) -> int:
        """Bytes of a task that ``read_files(extents=True)`` leaves where they are."""

    def read_files(
        self, task: SourceTask, seen: Callable[[SourceFile, bytes], None], *, extents: bool
    ) -> Iterator[SourceSample | SourceFailure]:
        """What `Importer.read` gives, in the same order.

        Args:
            task: to be read.
            seen: called with every file that was read.
            extents: give extents in the place of large payloads.
        """


def one_by_one(
    found: Iterator[SampleColumns | SourceSample | SourceFailure],
) -> Iterator[SourceSample | SourceFailure]:
    """`Importer.read` out of `ColumnImporter.read_columns`."""
    for item in found:
        if isinstance(item, SampleColumns):
            yield from item.samples()
        else:
            yield item


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Settings that importers share.

    Attributes:
        field_types: field → type that replaces the inferred one (``--schema field=type``).
        per: "file" or "line": what one sample of a text source is.
        classes: whether the folders directly below the source are classes; None: yes where there are such
        folders.
        split_folders: whether the folders directly below the source are splits, which become refs; None: yes where all
            are named train, val, valid, validation, test or dev.
        skip_bad_rows: infer the schema from the rows that can be read, and leave out the others.
    """

    field_types: Mapping[str, str] = field(default_factory=dict)
    per: str = "file"
    classes: bool | None = None
    split_folders: bool | None = None
    skip_bad_rows: bool = False

    def __post_init__(self) -> None:
        if self.per not in ("file", "line"):
            raise UsageError(f"--per is {self.per!r}; expected 'file' or 'line'")

    def schema(self, inferred: Mapping[str, str], source: str) -> Schema:
        """The inferred schema with the user's types in place of the inferred ones.

        Args:
            inferred: field → type text, in storage order.
            source: the source as the user gave it, for messages.

        Raises:
            SchemaError: a type is given for a field that the source does not have, or a field name cannot be
            stored.
        """
        for name in self.field_types:
            if name not in inferred:
                near = difflib.get_close_matches(name, inferred, n=1)
                raise SchemaError(
                    f"{source}: --schema names the field {name!r}, which the source does not have; "
                    + (f"did you mean {near[0]!r}?" if near else f"its fields are {', '.join(inferred)}")
                )
        try:
            return Schema.parse({name: self.field_types.get(name, text) for name, text in inferred.items()})
        except SchemaError as error:
            raise SchemaError(f"{source}: {error}") from error


def parse_field_types(pairs: list[str], option: str = "--schema") -> dict[str, str]:
    """Parse ``field=type`` texts as given on a command line.

    Raises:
        UsageError: a text is not of that form, or the type does not exist.
    """
    types: dict[str, str] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise UsageError(
                f"{option} {pair!r}: expected field=type, for example score=float64 or tokens=int32[*]"
            )
        FieldType.parse(text)
        types[name] = text
    return types
