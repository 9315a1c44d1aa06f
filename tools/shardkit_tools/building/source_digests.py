"""SHA-256 of source files, computed by separate threads during both passes if a task would have to wait."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Self

import xxhash

from shardkit.dataset.about import SourceDigest, unpack_sources
from shardkit.dataset.version_plan import NewVersion
from shardkit.documents import decode_plain, encode
from shardkit.errors import FormatError, ShardkitError, SourceError
from shardkit.manifest import Manifest
from shardkit.repository.repository import Repository
from shardkit.repository.versions import load_manifest
from shardkit_tools.building.job import Job
from shardkit_tools.console import count_text, value_text
from shardkit_tools.importers.protocol import Importer, SourceFile, SourceTask
from shardkit_tools.importers.source_files import open_file

_log = logging.getLogger("shardkit.build")
_PIECE_BYTES = 2**20

_BUILT = ("block_size", "shard_size", "seed", "shuffle")  # compared with the settings of the replaced version
_MAX_RECORD_BYTES = 10_000
_MAX_UNHASHED = 2


class SourceDigests:
    """Threads that compute digests of files during the passes; a context manager.

    Finished digests are recorded in the job directory and survive a kill.

    Args:
        files: files to hash completely.
        job: stores finished digests.
        threads: number of files at a time.
    """

    def __init__(self, files: Sequence[SourceFile], job: Job, threads: int) -> None:
        self._job = job
        self._stopped = threading.Event()
        self._threads = ThreadPoolExecutor(max(1, threads), "digest")
        self._found = [self._threads.submit(self._digest, file) for file in files]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def check(self) -> None:
        """Raise the error of a digest that has failed already."""
        for one in self._found:
            if one.done():
                one.result()

    def of_all(self, files: Iterable[SourceFile], known: Iterable[SourceDigest]) -> tuple[SourceDigest, ...]:
        """Return digests of all files, sorted by name; files without a digest so far are hashed."""
        by_name = {file.name: file for file in (*known, *(one.result() for one in self._found))}
        for file in files:
            if file.name not in by_name:  # a file that no task reads, such as a list of classes
                by_name[file.name] = digest_file(file)
        return tuple(by_name[name] for name in sorted(by_name))

    def _digest(self, file: SourceFile) -> SourceDigest:
        name = digest_record(file)
        held = self._job.folder.read(name)
        if held is not None:
            try:
                found: str = decode_plain(held, max_bytes=_MAX_RECORD_BYTES)["sha256"]
                return SourceDigest(file.name, file.size, found)
            except (FormatError, KeyError, TypeError):
                pass  # written by another release
        digest = digest_file(file, self._stopped)
        check_unchanged(file)
        self._job.folder.put_record(name, encode({"sha256": digest.sha256}))
        return digest


class TaskDigests:
    """Digests of the files of one task, computed by another thread while its rows are encoded.

    Args:
        files: files to hash.
        executor: runs the hashing.
        whole: every file will be given to `add`; otherwise they are read here, starting now.
    """

    def __init__(self, files: Sequence[SourceFile], executor: Executor, *, whole: bool) -> None:
        self._files = files
        self._executor = executor
        self._read = None if whole else executor.submit(lambda: [digest_file(file) for file in files])
        self._pending: list[tuple[SourceFile, bytes]] = []
        self._pending_bytes = 0
        self._hashing: list[Future[list[SourceDigest]]] = []
        self._made: list[SourceDigest] = []

    def add(self, file: SourceFile, data: bytes) -> None:
        """Take all bytes of a file."""
        self._pending.append((file, data))
        self._pending_bytes += len(data)
        if self._pending_bytes >= _PIECE_BYTES:  # hashing small files singly costs more than the hashes
            self._submit()

    def results(self) -> tuple[SourceDigest, ...]:
        """Return the digests in the order of the files; a file that was not added is read."""
        if self._read is not None:
            return tuple(self._read.result())
        self._submit()
        found: Mapping[str, SourceDigest] = {
            one.name: one for part in (self._made, *(part.result() for part in self._hashing)) for one in part
        }
        return tuple(found.get(file.name) or digest_file(file) for file in self._files)

    def _submit(self) -> None:
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        behind = self._hashing[-_MAX_UNHASHED:]
        if len(behind) == _MAX_UNHASHED and not behind[0].done():  # pending hashes hold their files in memory
            self._made += _hash_files(pending)  # instead of waiting
            return
        self._hashing.append(self._executor.submit(_hash_files, pending))


def _hash_files(files: list[tuple[SourceFile, bytes]]) -> list[SourceDigest]:
    return [SourceDigest(file.name, len(data), hashlib.sha256(data).hexdigest()) for file, data in files]


def digest_record(file: SourceFile) -> str:
    """Return the name of the record of a file's digest; it changes with the file."""
    text = f"{file.name}\0{file.size}\0{file.stamp}".encode()
    return f"source-{xxhash.xxh3_128_hexdigest(text)}.digest"


def shared_files(tasks: Iterable[SourceTask]) -> list[SourceFile]:
    """Return the files that several tasks read in part, in source order."""
    times = Counter(file.name for task in tasks if task.start or task.stop is not None for file in task.files)
    files = {file.name: file for task in tasks for file in task.files if times[file.name] > 1}
    return list(files.values())


def digest_file(file: SourceFile, stopped: threading.Event | None = None) -> SourceDigest:
    """Return the digest of a source file, unless ``stopped`` is set while it is read.

    Raises:
        SourceError: The file cannot be read, or the build was stopped.
    """
    digest = hashlib.sha256()
    size = 0
    buffer = memoryview(bytearray(min(_PIECE_BYTES, max(1, file.size))))
    with open_file(file, for_digest=True) as stream:
        while length := stream.readinto(buffer):  # type: ignore[attr-defined]  # BinaryIO does not say so
            if stopped is not None and stopped.is_set():
                raise SourceError(
                    f"{file.path}: not hashed to its end, for the build has stopped; run it again"
                )
            digest.update(buffer[:length])
            size += length
    return SourceDigest(file.name, size, digest.hexdigest())


def check_unchanged(file: SourceFile) -> None:
    """Raise SourceError if a file has changed: rows and digest must be of the same bytes."""
    if not file.stamp.isdigit():
        return  # not a modification time: only the importer can check it
    try:
        found = os.stat(file.path)
    except OSError as error:
        raise SourceError(f"{file.path}: gone while it was read ({error.strerror}); put it back") from error
    if (found.st_size, str(found.st_mtime_ns)) != (file.size, file.stamp):
        raise SourceError(
            f"{file.path}: changed while it was read; build from a source that nobody writes to"
        )


def warn_of_replacement(
    repository: Repository, ref: str, importer: Importer, version: NewVersion, *, append: bool
) -> None:
    """Log a warning if a build would replace the samples or settings of a ref, or append files that it has already.

    A rebuild of the version that the ref names replaces it on purpose, so it warns of nothing.
    """
    files, rebuilt = importer.files(), importer.describe().get("manifest")
    if ref not in repository.refs or rebuilt == repository.refs[ref]:
        return
    with contextlib.suppress(ShardkitError):  # a damaged version must not prevent that it is built again
        held = load_manifest(repository, repository.refs[ref]).manifest
        stored = repository.get_object(held.sources, "sources") if held.sources else None
        before = {(file.name, file.size) for file in unpack_sources(stored).files} if stored else set()
        now = {(file.name, file.size) for file in files}
        if append and (again := sorted(now & before)):
            others = f" and {len(again) - 1:,} more of these files" if len(again) > 1 else ""
            _log.warning(
                f"{ref} was built from {again[0][0]}{others} already, by name and size: their samples will be there "
                "twice, unless this append is the same as the last one, which changes nothing"
            )
        elif not append and rebuilt is not None:
            _log.warning(
                f"{ref} names {count_text(held.selected, 'sample')} of another version, which this one replaces "
                "there; to keep both: another --ref (ref=)"
            )
        elif not append and now != before:
            _log.warning(
                f"{ref} names {count_text(held.selected, 'sample')} from other files, which this build replaces "
                "there; to add to them instead: --append (append=True)"
            )
        elif not append and (changed := _changed_settings(held, version)):
            _log.warning(
                f"{ref} was built with other settings ({changed}), and this build replaces that version; to keep "
                "both: another --ref (ref=)"
            )


def _changed_settings(held: Manifest, version: NewVersion) -> str:
    """Return the settings in which a version differs from a new one, with both values, as text."""
    build = version.build_settings()
    settings: list[tuple[str, object, object]] = [
        ("format", held.format, version.format),
        ("compression", held.compression, version.compression),
        ("stratify", list(held.axes), list(version.axes)),
        *((name, held.build.get(name), build.get(name)) for name in _BUILT),
    ]
    return "; ".join(
        f"{name} {value_text(name, old) or 'none'}, now {value_text(name, new) or 'none'}"
        for name, old, new in settings
        if old != new
    )
