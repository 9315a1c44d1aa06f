"""What the importers of files have in common, and the choice of fields among those that they read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from shardkit.formats import Schema, presence_of
from shardkit_tools.importers.options import ImportOptions, SourceSchema
from shardkit_tools.importers.protocol import (
    ReadMode,
    SampleColumns,
    SampleStream,
    SourceFailure,
    SourceFile,
    SourceSample,
    SourceTask,
)
from shardkit_tools.importers.source_files import Source

__all__ = ["ChosenFields", "FileImporter"]

_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True)
class FileImporter:
    """An `Importer` that gives neighbouring rows at once where the source does, and may leave payloads where they are.

    Attributes:
        source: its files.
        options: what the user said of them.
        name: of the importer, in the recipe.
    """

    name: ClassVar[str]

    source: Source
    schema: Schema
    options: ImportOptions
    classes: tuple[str, ...] = ()

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
        raise NotImplementedError

    @property
    def reads_whole_files(self) -> bool:
        """Whether every file is read whole, once, and told to `ReadMode.seen`."""
        return False

    def bytes_in_place(self, task: SourceTask) -> int:
        """Bytes of a task that `ReadMode.in_place` leaves where they are."""
        return 0

    def describe(self) -> dict[str, object]:
        return {"importer": self.name, **({"flatten": True} if self.options.flatten else {})}


@dataclass(frozen=True, kw_only=True)
class ChosenFields(FileImporter):
    """What `ImportOptions.columns`, ``drop`` and ``rename`` leave of another importer's samples."""

    importer: FileImporter
    names: Mapping[str, str]  # field of the source → stored name

    @classmethod
    def of(cls, importer: FileImporter) -> ChosenFields:
        options = importer.options
        names = {name: options.rename.get(name, name) for name in importer.schema}
        kinds = {names[name]: kind for name, kind in importer.schema.items()}
        return cls(
            source=importer.source,
            schema=SourceSchema(kinds) if options.unchecked else Schema(kinds),
            options=options,
            # a label that is gone, or is another field, has no names
            classes=importer.classes if names.get("label") == "label" else (),
            importer=importer,
            names=names,
        )

    @property
    def layout(self) -> object:
        """Splits and classes of a source that is a tree of folders."""
        return getattr(self.importer, "layout", None)

    def files(self) -> Sequence[SourceFile]:
        return self.importer.files()

    def tasks(self) -> Sequence[SourceTask]:
        return self.importer.tasks()

    def read_rows(self, task: SourceTask, mode: ReadMode) -> SampleStream:
        columns = {presence_of(name): presence_of(stored) for name, stored in self.names.items()}
        columns |= self.names
        for found in self.importer.read_rows(task, mode):
            if isinstance(found, SampleColumns):
                yield replace(found, columns=_renamed(found.columns, columns))
            elif isinstance(found, SourceSample):
                yield replace(found, sample=_renamed(found.sample, self.names))
            else:
                yield found

    @property
    def reads_whole_files(self) -> bool:
        return self.importer.reads_whole_files

    def bytes_in_place(self, task: SourceTask) -> int:
        return self.importer.bytes_in_place(task)

    def describe(self) -> dict[str, object]:
        return {**self.importer.describe(), "fields": dict(self.names)}


def _renamed(values: Mapping[str, _Value], names: Mapping[str, str]) -> dict[str, _Value]:
    return {names.get(name, name): value for name, value in values.items()}
