"""What the folders of a source mean: splits at the first level where they have such names, then classes."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardkit.errors import SourceError
from shardkit_tools.importers.options import ImportOptions
from shardkit_tools.importers.source_files import Source

__all__ = ["SPLIT_FOLDERS", "FolderLayout", "folder_layout", "split_notes"]

SPLIT_FOLDERS = ("train", "val", "valid", "validation", "test", "dev")
"""Names, in any case, that a first level of folders has where it holds splits and no classes."""

_WORD = re.compile(r"[^a-z]")
_MANY_CLASSES = 20
_HOW = "pass --split-folders to make every first folder a ref, or --no-split-folders to make each a class"


@dataclass(frozen=True)
class FolderLayout:
    """Splits and classes of a source.

    Attributes:
        splits: first folder → ref; empty where there are no splits.
        classes: names of the class folders over all splits, sorted; empty where there are no classes.
        counts: class → samples; notes: what is unusual about it, for people.
    """

    splits: Mapping[str, str]
    classes: tuple[str, ...]
    counts: Mapping[str, int]
    notes: tuple[str, ...]

    def label(self, name: str) -> int:
        """The number of the class of a file."""
        return bisect_left(self.classes, _folders(name, self.splits)[0])

    def describe(self) -> dict[str, object]:
        """What the recipe says; nothing of splits where there are none, as ever."""
        return {"classes": bool(self.classes), **({"split_folders": True} if self.splits else {})}


def folder_layout(source: Source, options: ImportOptions, samples: Sequence[str]) -> FolderLayout:
    """Recognise splits and classes.

    Args:
        source: the files.
        options: what the user said about them.
        samples: names of the files that are samples, sidecars left out.

    Raises:
        SourceError: some files lie in folders and some beside them, or it cannot be told what the first folders are.
    """
    splits = _splits(source, options)
    depths = {file.name: len(_folders(file.name, splits)) for file in source.files}
    loose = [file for file in source.files if not depths[file.name]]
    if options.classes is False or (len(loose) == len(source.files) and not options.classes):
        return FolderLayout(splits, (), {}, ())
    if loose:
        raise SourceError(
            f"{loose[0].path}: lies beside the class folders, so it has no class; move it into one of them, "
            "or pass --no-classes to build without labels"
        )
    counts = Counter(_folders(name, splits)[0] for name in samples)
    classes = tuple(sorted({_folders(file.name, splits)[0] for file in source.files}))
    notes = _notes(classes, counts, splits, samples, depths)
    return FolderLayout(splits, classes, dict(counts), tuple(notes))


def split_notes(names: Iterable[str]) -> tuple[str, ...]:
    """What to say of files such as train-00000-of-00002.parquet and test/0.tar, which become one version."""
    words = {_WORD.split(part.lower())[0] for name in names for part in (name, name.rpartition("/")[2])}
    found = [word for word in SPLIT_FOLDERS if word in words]
    if len(found) < 2:
        return ()
    note = (
        f"files are named as the splits {', '.join(found)}, and became one version; to keep them apart build each by "
        f"itself, such as --ref {found[0]} from a glob of its files"
    )
    return (note,)


def _folders(name: str, splits: Mapping[str, str]) -> list[str]:
    """The folders that a file lies in, below its split."""
    return name.split("/")[1 if splits else 0 : -1]


def _splits(source: Source, options: ImportOptions) -> dict[str, str]:
    """First folder → ref; empty where the first folders are no splits."""
    if options.split_folders is False:
        return {}
    first = {file.name.partition("/")[0] if "/" in file.name else "" for file in source.files}
    named = sorted(name for name in first if name.lower() in SPLIT_FOLDERS)
    others = sorted(first - set(named))
    if options.split_folders:
        named, others = sorted(first - {""}), sorted(first & {""})
    if not named or (others and not options.split_folders and not _is_deep(source, named)):
        return {}  # a class may be called train: among others, with its files directly in it, it is one
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
    """Whether such a folder holds folders itself, as a split does and a class does not."""
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
    single = [name for name in classes if counts[name] == 1]
    if len(classes) >= _MANY_CLASSES and 2 * len(single) > len(classes):
        notes.append(
            f"{len(single):,} of {len(classes):,} classes have one sample each: are these folders classes?"
        )
    elif single and len(samples) > 2 * len(classes):
        notes.append(f"one sample only is in {_listed(single)}")
    likely = [name for name in classes if name.lower() in SPLIT_FOLDERS]
    if likely:
        notes.append(f"{_listed(likely)} became a class; where it is a split: {_HOW}")
    deep = sorted({depths[name] for name in samples})
    if deep[-1] > 1:
        levels = f"{deep[0]} to {deep[-1]}" if len(deep) > 1 else f"{deep[0]}"
        notes.append(
            f"samples lie {levels} folders deep; the first is the class, those below it are not told apart"
        )
    notes += _missing(classes, splits, samples)
    return notes


def _missing(classes: Sequence[str], splits: Mapping[str, str], samples: Sequence[str]) -> list[str]:
    """Classes that a split lacks; they keep their numbers in it."""
    held: dict[str, set[str]] = {folder: set() for folder in splits}
    for name in samples if splits else ():
        held[name.partition("/")[0]].add(_folders(name, splits)[0])
    return [
        f"split {splits[folder]} has nothing of {_listed(lacking)}"
        for folder, found in held.items()
        if (lacking := [name for name in classes if name not in found])
    ]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return f"{'class' if len(names) == 1 else f'{len(names):,} classes:'} {shown}{' …' if len(names) > 3 else ''}"
