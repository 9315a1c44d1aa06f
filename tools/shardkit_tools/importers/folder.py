"""Folders of files: one sample per image, audio, video, text or other file, with its class and sidecars.

cats/17.jpg  cats/17.json  dogs/4.jpg …     class per folder → int64 ``label``, names in ``classes``
train/cats/17.jpg  val/dogs/4.jpg …         split per folder → a ref, then classes as above
a.wav  a.txt  b.wav  b.txt …                no folders → no label; ``a.txt`` is the text of ``a.wav``
1.png  2.png  metadata.jsonl …              a row per file, joined by ``file_name``
"""

from __future__ import annotations

import functools
import importlib.util
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar
from unicodedata import normalize

from shardkit.errors import FormatError, SourceError
from shardkit.formats.strict_json import parse_json
from shardkit.images.decoding import PictureReader, decode_picture
from shardkit_tools.importers.file_metadata import FileMetadata, open_metadata
from shardkit_tools.importers.line_ranges import cut_lines, read_lines
from shardkit_tools.importers.protocol import (
    DecodedStream,
    FileImporter,
    FileObserver,
    ImportOptions,
    SampleStream,
    Source,
    SourceFailure,
    SourceFile,
    SourceSample,
    SourceTask,
    decode_samples,
    ignore_file,
)
from shardkit_tools.importers.source_files import (
    SIDECARS,
    SPLIT_NAMES,
    file_stem,
    file_suffix,
    group_files,
    is_compressed,
    is_metadata,
    media_of,
    open_plain,
    read_file,
    text_of,
)

_MAX_TEXT_BYTES = 1 << 30
# JPEG, PNG, GIF, BMP, TIFF, BigTIFF, PNM; bare JPEG XL and 2000
_IMAGE_SIGNATURES = (
    *(b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    *(b"P1", b"P2", b"P3", b"P4", b"P5", b"P6", b"P7", b"\xff\x0a", b"\xff\x4f\xff\x51"),
)
_IMAGE_BOXES = (b"ftyp", b"jP  ", b"JXL ")  # AVIF, HEIC, JPEG 2000 and JPEG XL begin with the size of a box
_DECODED_SIGNATURES = _IMAGE_SIGNATURES[:3]  # every Pillow reads their headers if they are cut short
_DECODED_FILES = 100_000  # of a folder whose pictures are decoded by default


@dataclass(frozen=True, kw_only=True)
class FolderImporter(FileImporter):
    """A folder of files as a source."""

    name: str = "folder"
    reads_whole_files: ClassVar[bool] = True
    samples: tuple[
        tuple[SourceFile, ...], ...
    ]  # each sample's own file first, then its sidecars; tasks are ranges
    media: str  # field for the file: image, audio, video or blob
    layout: FolderLayout
    metadata: FileMetadata | None = None
    row_names: Mapping[str, str] = field(default_factory=dict)
    """Files that the metadata names in another Unicode form: name → name there."""

    def decode(self, task: SourceTask, seen: FileObserver = ignore_file) -> DecodedStream:
        paths = {file.name: file.path for file in task.files}
        return decode_samples(self._renamed(self._rows(task, seen)), self.schema, paths)

    def _rows(self, task: SourceTask, seen: FileObserver = ignore_file) -> SampleStream:
        """Yield one sample per file; an unreadable file is a failure of its sample only."""
        for own, *sidecars in self.samples[task.start : task.stop]:
            try:
                sample = self._sample(own, sidecars, seen)
            except SourceError as error:
                yield SourceFailure(own.name, 0, error)
                continue
            yield SourceSample(sample, file_stem(own.name), own.name, 0)

    def _sample(
        self, own: SourceFile, sidecars: Sequence[SourceFile], seen: FileObserver
    ) -> dict[str, object]:
        data = read_file(own)
        seen(own, data)
        if not data:
            raise SourceError(f"{own.path}: an empty file; fetch it again, or remove it")
        if self.media == "image" and not _is_image(data):
            raise SourceError(
                f"{own.path}: not an image (it starts with {data[:8].hex(' ')}); fetch it again, or remove it"
            )
        stated = int.from_bytes(data[4:8], "little") + 8  # size of a WebP picture
        if data[8:12] == b"WEBP" and len(data) < stated and self.options.check != "none":
            raise SourceError(
                f"{own.path}: {len(data)} of {stated} bytes of a picture; fetch it again, or remove it"
            )
        if self.media == "image" and self._is_decoded(data):
            try:
                decode_picture(data)
            except FormatError as error:
                raise SourceError(
                    f"{own.path}: {error}; --on-error skip leaves such pictures out, --check none keeps them"
                ) from error
        sample: dict[str, object] = {self.media: data} if self.media in self.fields else {}
        if self.layout.classes and "label" in self.fields:
            sample["label"] = self.layout.label(own.name)
        for sidecar in sidecars:
            name, _ = SIDECARS[file_suffix(sidecar.name)]
            if name in self.fields:
                text = read_file(sidecar)
                seen(sidecar, text)
                sample[name] = _sidecar_value(name, sidecar, text)
        if self.metadata is not None:
            described = self.metadata.rows().get(self.row_names.get(own.name, own.name), {})
            sample |= {name: value for name, value in described.items() if name in self.fields}
        return sample

    def _is_decoded(self, data: bytes) -> bool:
        """Return True if a picture is decoded to find damage."""
        if self.options.check:
            return self.options.check == "decode"
        if why_not_decoded(len(self.samples)) or not data.startswith(_DECODED_SIGNATURES):
            return False
        try:
            PictureReader(data, "pillow")
        except FormatError:  # of no size, or too large for a decoder: a file with a signature, as it is
            return False
        return True

    def _settings(self) -> dict[str, object]:
        return {**self.layout.describe(), **({} if self.metadata is None else {"metadata": True})}


def _is_image(data: bytes) -> bool:
    return data.startswith(_IMAGE_SIGNATURES) or data[4:8] in _IMAGE_BOXES or data[8:12] == b"WEBP"


@functools.cache
def why_not_decoded(files: int) -> str:
    """Return why pictures are not decoded by default in a folder of so many files; "" if they are."""
    if files > _DECODED_FILES:
        return f"there are more than {_DECODED_FILES:,}"
    return "" if importlib.util.find_spec("PIL") else "Pillow is not installed"


def _tasks(
    samples: Sequence[tuple[SourceFile, ...]], described: Sequence[SourceFile]
) -> Iterator[SourceTask]:
    """Yield ranges of samples, each with all files that it needs."""
    sizes = (replace(own, size=own.size + sum(one.size for one in rest)) for own, *rest in samples)
    start = 0
    for group in group_files(sizes):
        stop = start + len(group.files)
        files = (*(file for sample in samples[start:stop] for file in sample), *described)
        yield SourceTask(group.name, files, group.size, start, stop)
        start = stop


def open_folder(source: Source, options: ImportOptions) -> FolderImporter:
    """Recognise the samples of a folder."""
    by_stem: dict[str, list[SourceFile]] = {}
    media: dict[str, SourceFile] = {}
    for file in source.files:
        if is_metadata(file.name):
            continue
        by_stem.setdefault(file_stem(file.name), []).append(file)
        if file_suffix(file.name) not in SIDECARS:
            media.setdefault(media_of(file_suffix(file.name)) or "blob", file)
    if len(media) != 1:
        raise SourceError(f"{source.given}: {_mixture(media, source)}")
    samples = sorted((_arrange(files) for files in by_stem.values()), key=lambda sample: sample[0].name)
    (own,) = media
    if own == "image" and not options.check and (why := why_not_decoded(len(samples))):
        source.notes.append(
            f"pictures are not decoded, because {why}; --check decode finds those that are cut short"
        )
    sidecars = _sidecar_types(samples, source.notes)
    described = [file for file in source.files if is_metadata(file.name)]
    metadata = open_metadata(source, described, options, [own, *sidecars]) if described else None
    if metadata is not None and options.classes is None:  # as in the folders of Hugging Face
        options = replace(options, classes=False)
    layout = folder_layout(source, options, [sample[0].name for sample in samples])
    fields = {own: "bytes"} | ({"label": "int64"} if layout.classes else {}) | sidecars
    row_names: dict[str, str] = {}
    if metadata is not None:
        joined, row_names = metadata.join({own.name for own, *_ in samples}, fields, source.notes)
        fields |= joined
    return FolderImporter(
        source=source,
        fields=options.schema(fields, source.given),
        options=options,
        cut=tuple(_tasks(samples, described)),
        labels=layout.classes,
        layout=layout,
        samples=tuple(samples),
        media=own,
        metadata=metadata,
        row_names=row_names,
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


def _arrange(files: list[SourceFile]) -> tuple[SourceFile, ...]:
    own = [file for file in files if file_suffix(file.name) not in SIDECARS]
    if len(own) > 1:
        raise SourceError(
            f"{own[1].path}: has the same stem as {own[0].name}; rename one, for the stem is the sample's key"
        )
    if not own:
        raise SourceError(
            f"{files[0].path}: a sidecar without its sample, which would have the same name with another extension; "
            "add that, or leave the sidecar out: --on-error skip, or a glob; annotations of many files in one, such "
            "as COCO's, are read as metadata.jsonl: a line for each file, which names it as file_name"
        )
    rest = sorted((file for file in files if file is not own[0]), key=lambda file: file_suffix(file.name))
    suffixes = [file_suffix(file.name) for file in rest]
    if len(set(suffixes)) != len(suffixes):
        raise SourceError(
            f"{own[0].path}: two sidecars of one kind ({', '.join(f.name for f in rest)}); remove one"
        )
    return (own[0], *rest)


def _sidecar_types(samples: Sequence[tuple[SourceFile, ...]], notes: list[str]) -> dict[str, str]:
    """Return the fields of sidecars; they are optional if a sample has none."""
    counts = Counter(file_suffix(file.name) for sample in samples for file in sample[1:])
    types = {}
    for suffix, count in sorted(counts.items()):
        name, kind = SIDECARS[suffix]
        types[name] = kind + "?" * (count < len(samples))
        if count < len(samples):
            lacking = next(
                own for own, *rest in samples if suffix not in {file_suffix(one.name) for one in rest}
            )
            notes.append(
                f"{name} is null for {len(samples) - count:,} of {len(samples):,} files, which have no .{suffix} "
                f"({lacking.name})"
            )
    return types


def _sidecar_value(name: str, file: SourceFile, data: bytes) -> object:
    if name == "meta":
        value = parse_json(data, file.path)
        if not isinstance(value, dict):
            raise SourceError(
                f"{file.path}: holds a {type(value).__name__}; a sidecar must be one JSON object"
            )
        return value
    return text_of(data, file.path, "convert it to UTF-8")


# ---- Texts: a sample per file, or per line


@dataclass(frozen=True, kw_only=True)
class TextImporter(FileImporter):
    """Text files as a source."""

    name: str = "text"
    layout: FolderLayout

    def _rows(self, task: SourceTask) -> SampleStream:
        """Yield one sample per file, or per non-empty line."""
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
        """Yield (number in the file, key, name for messages, bytes)."""
        if self.options.per == "file":
            yield 0, file.name, file.path, _whole_text(file)
            return
        for number, line in enumerate(read_lines(file, task.start, task.stop), task.first_row):
            if line:
                yield number, f"{file.name}:{number}", f"{file.path} line {number + 1}", line

    def _sample(self, file: SourceFile, data: bytes, where: str) -> dict[str, object]:
        sample: dict[str, object] = {"text": data}
        if self.fields["text"].kind == "str":
            advice = "leave it out with a glob, or keep the bytes as they are with --schema text=bytes"
            sample["text"] = text_of(data, where, f"convert it, {advice}")
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
    """Open text files; folders directly below the source are classes, as for other files."""
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


# ---- Folders: splits at the first level if they have the names of splits, then classes

_MANY_CLASSES = 20
_HOW = "pass --split-folders to make every first folder a ref, or --no-split-folders to make each a class"


@dataclass(frozen=True)
class FolderLayout:
    """Splits and classes of a source."""

    splits: Mapping[str, str]  # first folder → ref; empty without splits
    # sorted names of the class folders of all splits; empty without classes
    classes: tuple[str, ...]
    counts: Mapping[str, int]  # class → number of samples

    def label(self, name: str) -> int:
        """Return the class number of a file."""
        return bisect_left(self.classes, _folders(name, self.splits)[0])

    def describe(self) -> dict[str, object]:
        """Return the entry in the recipe."""
        return {"classes": bool(self.classes), **({"split_folders": True} if self.splits else {})}


def folder_layout(source: Source, options: ImportOptions, samples: Sequence[str]) -> FolderLayout:
    """Recognise splits and classes, and add notes on unusual ones."""
    splits = _splits(source, options)
    depths = {file.name: len(_folders(file.name, splits)) for file in source.files}
    loose = [file for file in source.files if not depths[file.name]]
    if options.classes is False or (len(loose) == len(source.files) and not options.classes):
        return FolderLayout(splits, (), {})
    if loose:
        raise SourceError(
            f"{loose[0].path}: lies beside the class folders, so it has no class; move it into one of them, "
            "or pass --no-classes to build without labels"
        )
    counts = Counter(_folders(name, splits)[0] for name in samples)
    classes = tuple(sorted({_folders(file.name, splits)[0] for file in source.files}))
    source.notes.extend(_notes(classes, counts, splits, samples, depths))
    return FolderLayout(splits, classes, dict(counts))


def _folders(name: str, splits: Mapping[str, str]) -> list[str]:
    """Return the folders of a file below its split."""
    return name.split("/")[1 if splits else 0 : -1]


def _splits(source: Source, options: ImportOptions) -> dict[str, str]:
    """Return first folder → ref; empty if the first folders are not splits."""
    if options.split_folders is False:
        return {}
    first = {file.name.partition("/")[0] if "/" in file.name else "" for file in source.files}
    named = sorted(name for name in first if name.lower() in SPLIT_NAMES)
    others = sorted(first - set(named))
    if options.split_folders:
        named, others = sorted(first - {""}), sorted(first & {""})
    if not named or (others and not options.split_folders and not _is_deep(source, named)):
        # a folder called train is a class if it is next to other folders and has its files directly in it
        return {}
    if others:
        beside = f"{others[0]}/" if others[0] else next(f.name for f in source.files if "/" not in f.name)
        raise SourceError(
            f"{source.given}: {named[0]}/ looks like a split, and {beside} beside it does not; move one of them away, "
            f"{_HOW if others[0] else 'or name a folder as the source'}"
        )
    refs: dict[str, str] = {}
    for name in named:
        ref = name if options.split_folders else name.lower()
        if ref in refs.values():
            raise SourceError(
                f"{source.given}: several folders are the split {ref!r} ({', '.join(named)}); merge them"
            )
        refs[name] = ref
    return refs


def _is_deep(source: Source, named: Sequence[str]) -> bool:
    """Return True if such a folder has subfolders, as a split has and a class does not."""
    return any(file.name.partition("/")[0] in named and file.name.count("/") > 1 for file in source.files)


def _notes(
    classes: Sequence[str],
    counts: Mapping[str, int],
    splits: Mapping[str, str],
    samples: Sequence[str],
    depths: Mapping[str, int],
) -> list[str]:
    notes = []
    if len(classes) == 1:
        notes.append(f"there is one class only, {classes[0]!r}: are the folders in it the classes?")
    elif moved := [name for place, name in enumerate(classes) if name.isdecimal() and int(name) != place]:
        notes.append(
            f"labels are places of names in text order: {moved[0]!r} is label {classes.index(moved[0])}"
        )
    single = [name for name in classes if counts[name] == 1]
    if len(classes) >= _MANY_CLASSES and 2 * len(single) > len(classes):
        notes.append(
            f"{len(single):,} of {len(classes):,} classes have one sample each: are these folders classes?"
        )
    elif single and len(samples) > 2 * len(classes):
        notes.append(f"one sample only is in {_list_names(single)}")
    alike: dict[str, list[str]] = {}  # name without case and Unicode form → classes
    for name in classes:
        alike.setdefault(normalize("NFC", name).casefold().strip(), []).append(name)
    notes += [
        f"{_list_names(names)} differ in case, spaces or Unicode form only, and are classes of their own"
        for names in alike.values()
        if len(names) > 1
    ]
    likely = [name for name in classes if name.lower() in SPLIT_NAMES]
    if likely:
        notes.append(f"{_list_names(likely)} became a class; where it is a split: {_HOW}")
    deep = sorted({depths[name] for name in samples})
    if deep[-1] > 1:
        levels = f"{deep[0]} to {deep[-1]}" if len(deep) > 1 else f"{deep[0]}"
        notes.append(
            f"samples lie {levels} folders deep; the first is the class, those below it are not told apart"
        )
    notes += _missing(classes, splits, samples)
    return notes


def _missing(classes: Sequence[str], splits: Mapping[str, str], samples: Sequence[str]) -> list[str]:
    """Return notes on classes that a split lacks; they keep their numbers in it."""
    held: dict[str, set[str]] = {folder: set() for folder in splits}
    for name in samples if splits else ():
        held[name.partition("/")[0]].add(_folders(name, splits)[0])
    return [
        f"split {splits[folder]} has nothing of {_list_names(lacking)}"
        for folder, found in held.items()
        if (lacking := [name for name in classes if name not in found])
    ]


def _list_names(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return f"{'class' if len(names) == 1 else f'{len(names):,} classes:'} {shown}{' …' if len(names) > 3 else ''}"
