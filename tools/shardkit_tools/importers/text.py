"""Text: one sample per file, or one per line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardkit.errors import SourceError
from shardkit.formats import Schema
from shardkit_tools.importers.folder_layout import FolderLayout, folder_layout
from shardkit_tools.importers.line_ranges import LineTasks, cut_lines
from shardkit_tools.importers.protocol import (
    ImportOptions,
    SourceFailure,
    SourceFile,
    SourceSample,
    SourceTask,
)
from shardkit_tools.importers.source_files import Source, group_files, is_compressed, open_plain, read_file

__all__ = ["TextImporter", "open_text"]

_MAX_TEXT_BYTES = 1 << 30


@dataclass(frozen=True)
class TextImporter:
    """Text files as a source; made by `open_text`."""

    source: Source
    schema: Schema
    layout: FolderLayout
    lines: LineTasks | None  # None: one sample per file

    @property
    def classes(self) -> tuple[str, ...]:
        return self.layout.classes

    def files(self) -> Sequence[SourceFile]:
        return self.source.files

    def tasks(self) -> Sequence[SourceTask]:
        """Runs of files, or of lines."""
        return self.lines.tasks if self.lines else group_files(self.source.files)

    def read(self, task: SourceTask) -> Iterator[SourceSample | SourceFailure]:
        """One sample per file, or per line that is not empty."""
        if self.lines is None:
            for file in task.files:
                try:
                    sample = self._sample(file, _whole_text(file), file.path)
                except SourceError as error:
                    yield SourceFailure(file.name, 0, error)
                    continue
                yield SourceSample(sample, file.name, file.name, 0)
            return
        for file, number, line in self.lines.read(task):
            if not line:
                continue
            try:
                sample = self._sample(file, line, f"{file.path} line {number + 1}")
            except SourceError as error:
                yield SourceFailure(file.name, number, error)
                continue
            yield SourceSample(sample, f"{file.name}:{number}", file.name, number)

    def _sample(self, file: SourceFile, data: bytes, where: str) -> dict[str, object]:
        sample: dict[str, object] = {"text": data}
        if self.schema["text"].kind == "str":
            try:
                sample["text"] = data.decode()
            except UnicodeDecodeError as error:
                raise SourceError(
                    f"{where}: not UTF-8 (byte {error.start} is 0x{data[error.start]:02x}); convert it, "
                    "leave it out with a glob, or keep the bytes as they are with --schema text=bytes"
                ) from error
        if self.classes:
            sample["label"] = self.layout.label(file.name)
        return sample

    def describe(self) -> dict[str, object]:
        return {
            "importer": "text",
            "per": "line" if self.lines else "file",
            "classes": bool(self.layout.classes),
            **self.layout.describe(),
        }


def _whole_text(file: SourceFile) -> bytes:
    if not is_compressed(file):
        return read_file(file)
    with open_plain(file) as stream:
        data = stream.read(_MAX_TEXT_BYTES)
    if len(data) == _MAX_TEXT_BYTES:
        raise SourceError(
            f"{file.path}: {_MAX_TEXT_BYTES} bytes of text or more; read its lines with --per line"
        )
    return data


def open_text(source: Source, options: ImportOptions) -> TextImporter:
    """Text files; folders directly below the source are classes, as for other files.

    Raises:
        SourceError: files lie both beside and in the class folders.
    """
    layout = folder_layout(source, options, [file.name for file in source.files])
    fields = {"text": "str"} | ({"label": "int64"} if layout.classes else {})
    lines = cut_lines(source.files) if options.per == "line" else None
    return TextImporter(source, options.schema(fields, source.given), layout, lines)
