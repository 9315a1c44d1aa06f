"""Text: one sample per file, or one per line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from shardkit.errors import SourceError
from shardkit_tools.importers.folder import FolderLayout, folder_layout
from shardkit_tools.importers.line_ranges import cut_lines, read_lines
from shardkit_tools.importers.protocol import (
    FileImporter,
    ImportOptions,
    ReadMode,
    SampleStream,
    Source,
    SourceFailure,
    SourceFile,
    SourceSample,
    SourceTask,
)
from shardkit_tools.importers.source_files import group_files, is_compressed, open_plain, read_file

_MAX_TEXT_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class TextImporter(FileImporter):
    """Text files as a source."""

    name: ClassVar[str] = "text"
    layout: FolderLayout

    def _rows(self, task: SourceTask, mode: ReadMode) -> SampleStream:
        """One sample per file, or per line that is not empty."""
        for file in task.files:
            try:
                for number, key, where, data in self._texts(file, task):
                    try:
                        yield SourceSample(self._sample(file, data, where), key, file.name, number)
                    except SourceError as error:
                        yield SourceFailure(file.name, number, error)
            except SourceError as error:
                if self.options.per == "line":
                    raise
                yield SourceFailure(file.name, 0, error)

    def _texts(self, file: SourceFile, task: SourceTask) -> Iterator[tuple[int, str, str, bytes]]:
        """(number in the file, key, what messages call it, bytes)."""
        if self.options.per == "file":
            yield 0, file.name, file.path, _whole_text(file)
            return
        for number, line in enumerate(read_lines(file, task.start, task.stop), task.first_row):
            if line:
                yield number, f"{file.name}:{number}", f"{file.path} line {number + 1}", line

    def _sample(self, file: SourceFile, data: bytes, where: str) -> dict[str, object]:
        sample: dict[str, object] = {"text": data}
        if self.fields["text"].kind == "str":
            try:
                sample["text"] = data.decode()
            except UnicodeDecodeError as error:
                raise SourceError(
                    f"{where}: not UTF-8 (byte {error.start} is 0x{data[error.start]:02x}); convert it, "
                    "leave it out with a glob, or keep the bytes as they are with --schema text=bytes"
                ) from error
        if self.labels:
            sample["label"] = self.layout.label(file.name)
        return sample

    def _settings(self) -> dict[str, object]:
        return {"per": self.options.per, **self.layout.describe()}


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
    return TextImporter(
        source=source,
        fields=options.schema(fields, source.given),
        options=options,
        labels=layout.classes,
        layout=layout,
        cut=cut_lines(source.files) if options.per == "line" else tuple(group_files(source.files)),
    )
