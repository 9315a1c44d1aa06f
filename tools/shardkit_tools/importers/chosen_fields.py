"""An importer of some fields of a source, under names that the user gives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from shardkit.formats import Schema, presence_of
from shardkit_tools.importers.folder_layout import FolderLayout
from shardkit_tools.importers.protocol import (
    ColumnImporter,
    Importer,
    ImportOptions,
    SampleColumns,
    SourceFailure,
    SourceFile,
    SourceSample,
    SourceSchema,
    SourceTask,
    one_by_one,
)

__all__ = ["ChosenFields"]

_Value = TypeVar("_Value")


class ChosenFields:
    """`Importer` of what `ImportOptions.columns`, ``drop`` and ``rename`` leave of another one's samples.

    Args:
        importer: of the source; its schema is what `ImportOptions.schema` gave it.
        options: of the user.
    """

    def __init__(self, importer: Importer, options: ImportOptions) -> None:
        self._importer = importer
        self._names = {name: options.rename.get(name, name) for name in importer.schema}
        kinds = {self._names[name]: kind for name, kind in importer.schema.items()}
        self._schema = SourceSchema(kinds) if options.unchecked else Schema(kinds)

    @property
    def schema(self) -> Schema:
        return self._schema

    @property
    def classes(self) -> tuple[str, ...]:
        """See `Importer`; none where the label is gone, or is another field."""
        return self._importer.classes if self._names.get("label") == "label" else ()

    @property
    def layout(self) -> FolderLayout | None:
        """Splits and classes of a source that is a tree of folders."""
        return getattr(self._importer, "layout", None)

    def files(self) -> Sequence[SourceFile]:
        return self._importer.files()

    def tasks(self) -> Sequence[SourceTask]:
        return self._importer.tasks()

    def read(self, task: SourceTask) -> Iterator[SourceSample | SourceFailure]:
        """See `Importer`."""
        return one_by_one(self.read_columns(task))

    def read_columns(self, task: SourceTask) -> Iterator[SampleColumns | SourceSample | SourceFailure]:
        """See `ColumnImporter`."""
        importer, columns = self._importer, dict(self._names)
        columns |= {presence_of(name): presence_of(stored) for name, stored in self._names.items()}
        found = importer.read_columns(task) if isinstance(importer, ColumnImporter) else importer.read(task)
        for item in found:
            if isinstance(item, SampleColumns):
                yield replace(item, columns=_renamed(item.columns, columns))
            elif isinstance(item, SourceSample):
                yield replace(item, sample=_renamed(item.sample, self._names))
            else:
                yield item

    def describe(self) -> dict[str, object]:
        """Name and settings of the importer, with the fields that were taken: field of the source → stored name."""
        return {**self._importer.describe(), "fields": self._names}


def _renamed(values: Mapping[str, _Value], names: Mapping[str, str]) -> dict[str, _Value]:
    return {names.get(name, name): value for name, value in values.items()}
