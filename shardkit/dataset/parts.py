"""`commit_parts`: the parts of many writers as one version in one commit (SPEC.md §13).

A part is a scratch file of encoded rows and a record, which appears by rename once the file is durable.
Writing a part again replaces it; a killed writer leaves nothing under a part's name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from shardkit.dataset.committing import Destination, write_version
from shardkit.dataset.rows import Rows
from shardkit.dataset.scratch import ScratchFolder, scratch_folder
from shardkit.dataset.version_plan import NewVersion, VersionSettings
from shardkit.errors import FormatError, IntegrityError, NotFoundError, StoreError, UsageError
from shardkit.formats import Schema
from shardkit.manifest import Manifest
from shardkit.repository.repository import Repository
from shardkit.repository.versions import load_manifest
from shardkit.stores.file_operations import Handle, active, explained
from shardkit.stores.local import LocalStore, writer_is_dead


def list_parts(root: str | os.PathLike[str], *, scratch: str | os.PathLike[str] | None = None) -> list[str]:
    """Return the names of the complete, uncommitted parts of a root, sorted.

    Raises:
        UsageError, StoreError: see `commit_parts`.
    """
    return part_folder(Repository.open(root), scratch).whole()


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
    """Commit the parts that writers of `create(root, …, part=name)` left as one version; then remove them.

    The version depends on the parts and their names alone, not on who wrote them, in which order or how
    often. A second call with the same names gives the same version and commits nothing, also after a kill.

    Args:
        root: the dataset.
        parts: names of the parts, so that a missing one is an error; by default all complete parts.
        append: add the rows to the version that ``ref`` names.
        about: see `create`.
        lookup: see `create`.
        cost: see `create`.
        ref: the ref that is moved.
        replace: see `create`.
        message: message of the commit.
        author: author of the commit.
        scratch: the folder that the writers were given.

    Raises:
        NotFoundError: A part is missing, or there are none.
        UsageError: Parts were made with different settings, or hold no rows.
        SampleError: Two samples have the same key.
        IntegrityError: A part is damaged.
        StoreError, CommitConflict: Nothing was committed.
    """
    repository = Repository.open(root)
    folder = part_folder(repository, scratch)
    names = sorted(set(folder.whole() if parts is None else parts))
    if not names:
        raise NotFoundError(f"{os.fspath(root)}: no parts to commit; write them with create(…, part=…)")
    note = _note_name(names, ref, append=append)
    committed = folder.read(note)
    if committed is not None and not set(names) & set(folder.whole()):
        return load_manifest(repository, committed.decode()).manifest
    written = [folder.load(name) for name in names]
    _check_settings(written)
    settings = dict(written[0].settings)
    schema, classes, split = (settings.pop(name) for name in ("schema", "classes", "split"))
    settings |= {"split": dict(split["shares"]), "split_by": split["by"]} if split else {}
    # A repeated append must be recognised. Elsewhere equal rows make equal versions, however they were
    # divided into parts.
    digests = "".join(f"{part.name} {part.digest}\n" for part in written)
    recipe = {"parts": hashlib.sha256(digests.encode()).hexdigest()} if append else {}
    version = VersionSettings(**settings, about=about, lookup=lookup, cost=cost).version(
        Schema.from_json(schema), classes, ref=ref, recipe=recipe
    )
    manifest = _find_append(repository, version, ref) if append else None
    if manifest is None:
        to = Destination.begin(
            repository, version, ref, append=append, replace=replace, message=message, author=author
        )
        files = folder.parts([part.file for part in written])
        manifest = write_version(to, version, [part.columns for part in written], files)
    folder.put_record(note, manifest.id.encode(), is_durable=True)
    for part in written:
        folder.drop(part)
    folder.sweep()
    return manifest


def _find_append(repository: Repository, version: NewVersion, ref: str) -> Manifest | None:
    """Return the version that ``ref`` names if it was made by appending exactly these parts."""
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


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_RECORD = ".part"
_ROWS = re.compile(rf"({_NAME.pattern})\.[0-9a-f]{{16}}\.rows")
_ORPHAN_GRACE_S = 24 * 3600


@dataclass(frozen=True, slots=True, eq=False)
class WrittenPart:
    """A part, as its record describes it."""

    name: str
    file: str  # file of its rows, in the folder
    settings: Mapping[str, Any]  # see `settings_of`
    columns: Rows
    digest: str  # digest of the record: equal for equal rows added in the same order


def check_part_name(name: str) -> str:
    """Return the name of a part if it is valid."""
    if _NAME.fullmatch(name) is None:
        raise UsageError(f"part {name!r}: expected 1 to 100 letters, digits, '_' and '-', such as part-00017")
    return name


def settings_of(version: NewVersion) -> dict[str, Any]:
    """Return the settings that all parts of a version must share, as JSON."""
    return {
        "schema": version.schema.to_json(),
        "format": version.format,
        "compression": version.compression,
        "stratify": list(version.axes),
        "classes": list(version.classes),
        "split": version.split.to_json() if version.split else None,
        **version.build_settings(),
    }


class PartFolder(ScratchFolder):
    """The uncommitted parts of a root, in an existing folder that all writers share."""

    def whole(self) -> list[str]:
        """Return the names of the complete parts, sorted."""
        return sorted(name.removesuffix(_RECORD) for name in self.names() if name.endswith(_RECORD))

    def publish(self, name: str, spooled: str, settings: Mapping[str, Any], columns: Rows) -> None:
        """Make a part from a closed scratch file in this folder; it replaces one of the same name."""
        before = self._file_of(name)
        rows = f"{name}.{secrets.token_hex(8)}.rows"
        with self.opened(f"write {self.path}", writing=True) as folder:
            file = active().open_file(folder, spooled)
            try:
                active().fsync(file)
            finally:
                active().close(file)
            active().rename(folder, spooled, folder, rows)
        record = columns.to_bytes({"settings": dict(settings), "file": rows})
        try:
            self.put_record(
                name + _RECORD, record, is_durable=True
            )  # the rows have their final name before the record names them
        except StoreError:
            self.remove(rows)
            raise
        if before is not None:
            self.remove(before)

    def load(self, name: str) -> WrittenPart:
        """Return the part with a name.

        Raises:
            NotFoundError: The part does not exist.
            IntegrityError: Its record is damaged or from another release.
        """
        data = self.read(check_part_name(name) + _RECORD)
        if data is None:
            there = self.whole()
            if name in there:
                raise IntegrityError(
                    f"{self.path}: the record of part {name!r} is damaged; write the part again"
                )
            raise NotFoundError(
                f"{self.path}: no part {name!r}; those there are {', '.join(there[:10]) or 'none'}. Write it with "
                f"create(…, part={name!r})"
            )
        try:
            columns, meta = Rows.from_bytes(data)
            settings: Any = meta["settings"]
            file = str(meta["file"])
        except (FormatError, KeyError, TypeError) as error:
            raise IntegrityError(
                f"{self.path}: the record of part {name!r} is of another release; write the part again"
            ) from error
        digest = xxhash.xxh3_128(name.encode())
        for column in (*columns.identity.T, *columns.records.identity):
            digest.update(column.tobytes())
        return WrittenPart(name, file, settings, columns, digest.hexdigest())

    def drop(self, part: WrittenPart) -> None:
        """Remove a committed part, unless it was written again meanwhile."""
        if self._file_of(part.name) == part.file:
            self.remove(part.name + _RECORD)
        self.remove(part.file)

    def sweep(self) -> None:
        """Remove files of dead writers, and files that no record names a day after they were written."""
        with self.opened(f"write {self.path}", writing=True) as folder:
            for name, is_folder in active().names(folder):
                with contextlib.suppress(FileNotFoundError):
                    if not is_folder and (
                        writer_is_dead(active(), folder, name) or self._is_orphan(folder, name)
                    ):
                        active().unlink(folder, name)

    def _is_orphan(self, folder: Handle, name: str) -> bool:
        match = _ROWS.fullmatch(name)
        is_named = match is None or self._file_of(match[1]) == name
        if is_named and not name.endswith(".new"):
            return False
        # A grace period, because a writer on another machine may be about to name it.
        return time.time() - active().stat(folder, name).st_mtime > _ORPHAN_GRACE_S

    def _file_of(self, name: str) -> str | None:
        try:
            return self.load(name).file
        except (NotFoundError, IntegrityError):
            return None


def part_folder(repository: Repository, scratch: str | os.PathLike[str] | None) -> PartFolder:
    """Return the folder of a root's uncommitted parts, and create it if needed."""
    if scratch is None and not isinstance(repository.store, LocalStore):
        raise UsageError(
            f"parts of {repository.store.url} need a folder that all writers share; give it as scratch=, here and to "
            "commit_parts"
        )
    path = os.path.join(scratch_folder(repository, scratch), "parts")
    with explained(f"make {path}", writing=True):
        os.makedirs(path, exist_ok=True)
    return PartFolder(path)
