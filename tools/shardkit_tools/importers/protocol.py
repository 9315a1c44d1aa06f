"""What an importer is: a source that says how it is cut into tasks and reads one at a time.

The build engine asks an importer for its tasks once, hands them to worker processes and may read any of them again
after a kill. So an importer holds settings and file names only, never an open file; it survives pickling; and what it
answers is a function of the source alone, whatever the number of jobs and the order of the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, runtime_checkable

from numpy.typing import NDArray

from shardkit.dataset.encoding import ExtentColumn
from shardkit.errors import ShardkitError
from shardkit.formats import Schema, presence_of
from shardkit_tools.importers.options import ImportOptions, SourceSchema

_Value = TypeVar("_Value")


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
class Source:
    """A listed source.

    Attributes:
        given: the source as the user typed it, for messages.
        files: sorted by name.
        is_single_file: the user named one file, not a folder or a glob.
        left_out: what was there and is no sample → why, where the user lets it be left out.
        notes: what a person may want to know of it; importers add to them.
    """

    given: str
    files: tuple[SourceFile, ...]
    is_single_file: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


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


SampleStream: TypeAlias = Iterator[SampleColumns | SourceSample | SourceFailure]


@dataclass(frozen=True, slots=True)
class ReadMode:
    """How a build reads a task.

    Attributes:
        in_place: large payloads may stay in the source: extents stand in their place, and they are read again when
            their shard is written.
        states: of the task's files (`file_state`), which those extents are bound to; empty where files are read whole.
        seen: called with every file that was read whole, and its bytes, so that nobody reads it again for its digest.
    """

    in_place: bool = False
    states: Sequence[int] = ()
    seen: Callable[[SourceFile, bytes], None] = lambda file, data: None


@dataclass(frozen=True, kw_only=True)
class FileImporter:
    """An `Importer` that gives neighbouring rows at once where the source does, and may leave payloads where they are.

    Attributes:
        name: of the importer, in the recipe.
        source: its files.
        options: what the user said of them.
        fields: of every sample, by the names that the source has.
        labels: names of the values of the source's field ``label``.
    """

    name: ClassVar[str]

    source: Source
    options: ImportOptions
    fields: Schema
    labels: tuple[str, ...] = ()

    @cached_property
    def _stored(self) -> dict[str, str]:
        """Field of the source → stored name."""
        return {name: self.options.rename.get(name, name) for name in self.fields}

    @cached_property
    def schema(self) -> Schema:
        if not self.options.rename:
            return self.fields
        kinds = _renamed(self.fields, self._stored)
        return SourceSchema(kinds) if self.options.unchecked else Schema(kinds)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the label; none where it is gone, or is another field."""
        return self.labels if self._stored.get("label") == "label" else ()

    def files(self) -> Sequence[SourceFile]:
        return self.source.files

    def tasks(self) -> Sequence[SourceTask]:
        """One per file."""
        return [SourceTask(file.name, (file,), file.size) for file in self.files()]

    def read(self, task: SourceTask) -> Iterator[SourceSample | SourceFailure]:
        for found in self.read_rows(task, ReadMode()):
            if isinstance(found, SampleColumns):
                yield from found.samples()
            else:
                yield found

    def read_rows(self, task: SourceTask, mode: ReadMode) -> SampleStream:
        """The rows of `read`, in the same order, many at once where that can be."""
        rows = self._rows(task, mode)
        return self._with_stored_names(rows) if self.options.rename else rows

    def _rows(self, task: SourceTask, mode: ReadMode) -> SampleStream:
        """The same, with the names that the source has."""
        raise NotImplementedError

    def _with_stored_names(self, rows: SampleStream) -> SampleStream:
        columns = {presence_of(name): presence_of(stored) for name, stored in self._stored.items()}
        columns |= self._stored
        for found in rows:
            if isinstance(found, SampleColumns):
                yield replace(found, columns=_renamed(found.columns, columns))
            elif isinstance(found, SourceSample):
                yield replace(found, sample=_renamed(found.sample, self._stored))
            else:
                yield found

    @property
    def reads_whole_files(self) -> bool:
        """Whether every file is read whole, once, and told to `ReadMode.seen`."""
        return False

    def bytes_in_place(self, task: SourceTask) -> int:
        """Bytes of a task that `ReadMode.in_place` leaves where they are."""
        return 0

    def describe(self) -> dict[str, object]:
        chosen = {"fields": self._stored} if self.options.chooses else {}
        return {"importer": self.name, **self._settings(), **chosen}

    def _settings(self) -> dict[str, object]:
        """What decides the samples beside their files, for the recipe."""
        return {"flatten": True} if self.options.flatten else {}


def _renamed(values: Mapping[str, _Value], names: Mapping[str, str]) -> dict[str, _Value]:
    return {names.get(name, name): value for name, value in values.items()}
