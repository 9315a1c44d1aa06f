"""`commit_parts`: what many writers left, as one version in one commit (SPEC.md §13)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardkit.dataset.committing import Destination, write_version
from shardkit.dataset.part_files import WrittenPart, part_folder
from shardkit.dataset.scratch_reading import PartFiles
from shardkit.dataset.version_settings import NewVersion, VersionSettings
from shardkit.errors import NotFoundError, UsageError
from shardkit.formats import Schema
from shardkit.manifest import Manifest
from shardkit.repository.repository import Repository
from shardkit.repository.versions import load_manifest


def list_parts(root: str | os.PathLike[str], *, scratch: str | os.PathLike[str] | None = None) -> list[str]:
    """Names of the parts of a root that are whole and not committed yet, sorted.

    Raises:
        UsageError, StoreError: see `commit_parts`.
    """
    return part_folder(Repository.open(root), scratch).names()


def commit_parts(
    root: str | os.PathLike[str],
    parts: Iterable[str] | None = None,
    *,
    append: bool = False,
    about: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    lookup: str | Sequence[str] = (),
    cost: str | Sequence[str] = (),
    ref: str = "main",
    replace: bool = False,
    message: str = "",
    author: str = "",
    scratch: str | os.PathLike[str] | None = None,
) -> Manifest:
    """Commit what writers of `create(root, …, part=name)` left, as one version; then remove the parts.

    The version is that of the parts in the order of their names, whoever wrote them, in whatever order and how often.
    A second call with the same names gives the same version and commits nothing; so does one after a kill.

    Args:
        root: the dataset.
        parts: their names, so that one that is missing is an error; by default those that are there.
        append: put the rows behind those of the version that ``ref`` names.
        about: see `create`.
        lookup: see `create`.
        cost: see `create`.
        ref: the ref that is moved.
        replace: see `create`.
        message: of the commit.
        author: of the commit.
        scratch: what the writers were given.

    Raises:
        NotFoundError: a part is missing, or there are none.
        UsageError: parts were made with different settings, or hold no rows.
        SampleError: two samples have the same key.
        IntegrityError: a part is damaged.
        StoreError, CommitConflict: nothing was committed.
    """
    repository = Repository.open(root)
    folder = part_folder(repository, scratch)
    names = sorted(set(folder.names() if parts is None else parts))
    if not names:
        raise NotFoundError(f"{os.fspath(root)}: no parts to commit; write them with create(…, part=…)")
    note = _note_name(names, ref, append=append)
    committed = folder.noted(note)
    if committed is not None and not set(names) & set(folder.names()):
        return load_manifest(repository, committed).manifest
    written = [folder.read(name) for name in names]
    _check_settings(written)
    version = _version(written, append=append, about=about, lookup=lookup, cost=cost, ref=ref)
    manifest = _appended(repository, version, ref) if append else None
    if manifest is None:
        to = Destination.begin(
            repository, version, ref, append=append, replace=replace, message=message, author=author
        )
        files = PartFiles(folder.path, [part.file for part in written])
        try:
            manifest = write_version(to, version, [part.columns for part in written], files)
        finally:
            files.close()
    folder.note(note, manifest.id)
    for part in written:
        folder.remove(part)
    folder.sweep()
    return manifest


def _version(
    written: Sequence[WrittenPart],
    *,
    append: bool,
    about: Mapping[str, Any] | str | os.PathLike[str] | None,
    lookup: str | Sequence[str],
    cost: str | Sequence[str],
    ref: str,
) -> NewVersion:
    """What the settings of the parts ask for."""
    settings = written[0].settings
    schema = Schema.from_json(settings["schema"])
    split = settings["split"]
    # An append must be told from the same one again; elsewhere equal rows make equal versions, however they were cut.
    parts = hashlib.sha256("".join(f"{part.name} {part.digest}\n" for part in written).encode()).hexdigest()
    made = VersionSettings(
        stratify=[str(axis) for axis in settings["stratify"]],
        format=str(settings["format"]),
        compression=str(settings["compression"]),
        shard_size=int(settings["shard_size"]),
        block_size=int(settings["block_size"]),
        seed=int(settings["seed"]),
        shuffle=bool(settings["shuffle"]),
        split=dict(split["shares"]) if split else None,
        split_by=split["by"] if split else None,
        about=about,
        lookup=lookup,
        cost=cost,
    )
    return made.version(schema, settings["classes"], ref=ref, recipe={"parts": parts} if append else {})


def _appended(repository: Repository, version: NewVersion, ref: str) -> Manifest | None:
    """The version that ``ref`` names, if it was made by appending these very parts."""
    held = load_manifest(repository, repository.resolve(ref)).manifest
    last = held.build.get("append", {})
    return held if last.get("parts") == version.recipe["parts"] else None


def _check_settings(written: Sequence[WrittenPart]) -> None:
    first = written[0]
    for part in written[1:]:
        for name, value in first.settings.items():
            if part.settings.get(name) != value:
                raise UsageError(
                    f"parts {first.name!r} and {part.name!r} were made with different settings: {name} is {value!r} "
                    f"and {part.settings.get(name)!r}; write one of them again"
                )


def _note_name(names: Sequence[str], ref: str, *, append: bool) -> str:
    text = "\n".join([ref, str(append), *names])
    return f"committed-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
