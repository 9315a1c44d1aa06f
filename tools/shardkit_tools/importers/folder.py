"""Folders of files: one sample per image, sound, film or other file, with its class and its sidecars.

cats/17.jpg  cats/17.json  dogs/4.jpg …     class per folder → int64 ``label``, names in ``classes``
train/cats/17.jpg  val/dogs/4.jpg …         split per folder → a ref, then classes as above
a.wav  a.txt  b.wav  b.txt …                no folders → no label; ``a.txt`` is the text of ``a.wav``
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import xxhash

from shardkit.dataset.extents import Extent
from shardkit.errors import SourceError
from shardkit_tools.importers.detection import SIDECARS, media_of
from shardkit_tools.importers.file_importer import FileImporter
from shardkit_tools.importers.folder_layout import FolderLayout, folder_layout
from shardkit_tools.importers.options import ImportOptions
from shardkit_tools.importers.protocol import (
    ReadMode,
    SampleStream,
    SourceFailure,
    SourceFile,
    SourceSample,
    SourceTask,
)
from shardkit_tools.importers.source_files import Source, file_stem, file_suffix, group_files, read_file
from shardkit_tools.importers.strict_json import parse_json

__all__ = ["FolderImporter", "open_folder"]

_MIN_EXTENT_BYTES = 32 << 10  # below it scratch costs less than opening the file once more
# JPEG, PNG, GIF, WebP, BMP, TIFF, BigTIFF, PNM; AVIF, HEIC, JPEG 2000 and XL in boxes; bare JPEG XL and 2000
_IMAGE_SIGNATURES = (
    *(b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"RIFF", b"BM", b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    *(b"P1", b"P2", b"P3", b"P4", b"P5", b"P6", b"P7", b"\0\0\0", b"\xff\x0a", b"\xff\x4f\xff\x51"),
)


@dataclass(frozen=True, kw_only=True)
class FolderImporter(FileImporter):
    """A folder of files as a source."""

    name: ClassVar[str] = "folder"
    samples: tuple[tuple[SourceFile, ...], ...]  # the sample's own file first, then its sidecars
    media: str  # the field that holds the file: image, audio, video or blob
    layout: FolderLayout

    def tasks(self) -> Sequence[SourceTask]:
        """Runs of whole samples."""
        own_files = [
            replace(own, size=own.size + sum(one.size for one in rest)) for own, *rest in self.samples
        ]
        tasks = []
        start = 0
        for group in group_files(own_files):
            stop = start + len(group.files)
            files = tuple(file for sample in self.samples[start:stop] for file in sample)
            tasks.append(SourceTask(group.name, files, group.size))
            start = stop
        return tasks

    @property
    def reads_whole_files(self) -> bool:
        return True

    @property
    def _width(self) -> int:
        """Files of a sample."""
        return len(self.samples[0])

    def bytes_in_place(self, task: SourceTask) -> int:
        return sum(file.size for file in task.files[:: self._width] if file.size >= _MIN_EXTENT_BYTES)

    def read_rows(self, task: SourceTask, mode: ReadMode) -> SampleStream:
        """One sample per file; a file that cannot be read costs its own sample only."""
        width = self._width
        for start in range(0, len(task.files), width):
            own, *sidecars = task.files[start : start + width]
            try:
                sample = self._sample(own, sidecars, mode)
            except SourceError as error:
                yield SourceFailure(own.name, 0, error)
                continue
            data = sample.get(self.media)
            if mode.in_place and own.size >= _MIN_EXTENT_BYTES and isinstance(data, bytes):
                sample[self.media] = Extent(start, 0, len(data), xxhash.xxh3_64_intdigest(data))
            yield SourceSample(sample, file_stem(own.name), own.name, 0)

    def _sample(self, own: SourceFile, sidecars: Sequence[SourceFile], mode: ReadMode) -> dict[str, object]:
        data = read_file(own)
        mode.seen(own, data)
        if not data:
            raise SourceError(f"{own.path}: an empty file; fetch it again, or remove it")
        if self.media == "image" and not data.startswith(_IMAGE_SIGNATURES):
            raise SourceError(
                f"{own.path}: not an image (it starts with {data[:8].hex(' ')}); fetch it again, or remove it"
            )
        sample: dict[str, object] = {self.media: data} if self.media in self.schema else {}
        if "label" in self.schema:
            sample["label"] = self.layout.label(own.name)
        for sidecar in sidecars:
            name, _ = SIDECARS[file_suffix(sidecar.name)]
            if name in self.schema:
                text = read_file(sidecar)
                mode.seen(sidecar, text)
                sample[name] = _sidecar_value(name, sidecar, text)
        return sample

    def describe(self) -> dict[str, object]:
        return {"importer": "folder", **self.layout.describe()}


def open_folder(source: Source, options: ImportOptions) -> FolderImporter:
    """Recognise the samples of a folder.

    Raises:
        SourceError: kinds of files are mixed, a sidecar has no sample or a sample no sidecar, two samples share a
            stem, or files lie both beside and in the class folders; names the files.
    """
    by_stem: dict[str, list[SourceFile]] = {}
    media: dict[str, SourceFile] = {}
    for file in source.files:
        by_stem.setdefault(file_stem(file.name), []).append(file)
        if file_suffix(file.name) not in SIDECARS:
            media.setdefault(media_of(file_suffix(file.name)) or "blob", file)
    if len(media) != 1:
        raise SourceError(f"{source.given}: {_mixture(media, source)}")
    samples = sorted((_arranged(files) for files in by_stem.values()), key=lambda sample: sample[0].name)
    sidecars = _common_sidecars(samples)
    layout = folder_layout(source, options, [sample[0].name for sample in samples])
    (own,) = media
    fields = {own: "bytes"} | ({"label": "int64"} if layout.classes else {})
    fields |= dict(SIDECARS[suffix] for suffix in sidecars)
    return FolderImporter(
        source=source,
        schema=options.schema(fields, source.given),
        options=options,
        classes=layout.classes,
        layout=layout,
        samples=tuple(samples),
        media=own,
    )


def _mixture(media: dict[str, SourceFile], source: Source) -> str:
    if not media:
        return (
            f"only sidecars ({source.files[0].name} …), no files that they describe; for text use --from "
            "text, for JSON lines name the files .jsonl"
        )
    shown = ", ".join(f"{name} ({file.name})" for name, file in sorted(media.items()))
    return (
        f"kinds of files are mixed: {shown}; give a folder or a glob with one kind, or leave the fewer out with "
        "--on-error skip"
    )


def _arranged(files: list[SourceFile]) -> tuple[SourceFile, ...]:
    own = [file for file in files if file_suffix(file.name) not in SIDECARS]
    if len(own) > 1:
        raise SourceError(
            f"{own[1].path}: has the same stem as {own[0].name}; rename one, for the stem is the sample's key"
        )
    if not own:
        raise SourceError(
            f"{files[0].path}: a sidecar without its sample; remove it, or add the file that it describes"
        )
    rest = sorted((file for file in files if file is not own[0]), key=lambda file: file_suffix(file.name))
    suffixes = [file_suffix(file.name) for file in rest]
    if len(set(suffixes)) != len(suffixes):
        raise SourceError(
            f"{own[0].path}: two sidecars of one kind ({', '.join(f.name for f in rest)}); remove one"
        )
    return (own[0], *rest)


def _common_sidecars(samples: list[tuple[SourceFile, ...]]) -> tuple[str, ...]:
    seen = {file_suffix(file.name) for sample in samples for file in sample[1:]}
    for own, *rest in samples:
        missing = seen - {file_suffix(file.name) for file in rest}
        if missing:
            raise SourceError(
                f"{own.path}: has no .{min(missing)} sidecar, though other samples have one; every sample "
                "must have every field: add it, or remove the others"
            )
    return tuple(sorted(seen))


def _sidecar_value(name: str, file: SourceFile, data: bytes) -> object:
    if name == "meta":
        value = parse_json(data, file.path)
        if not isinstance(value, dict):
            raise SourceError(
                f"{file.path}: holds a {type(value).__name__}; a sidecar must be one JSON object"
            )
        return value
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise SourceError(f"{file.path}: not UTF-8 (byte {error.start}); convert it to UTF-8") from error
