"""Blocks on a local disk, shared by all processes of a machine (SPEC.md, "The cache").

A block is a file named by its SHA-256. It is verified before it gets that name and whenever it is read: by SHA-256 if
another user can write the file, otherwise by XXH3. Nothing in the directory is trusted, so after a crash, a power cut
or disk damage a lost block is fetched again. An open cache never raises for its own failures: a full or failing disk
makes it useless, not wrong.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np

from shardkit.arrays import Buffer
from shardkit.documents import decode_plain, encode, xxh3
from shardkit.errors import FormatError, ShardkitError, StoreError, UsageError
from shardkit.reading.attestations import ReadEvents
from shardkit.reading.cache.catalogue import CachedBlock, Catalogue
from shardkit.reading.cache.eviction import Lease, Neighbours, choose_victims
from shardkit.reading.objects import BlockRequest
from shardkit.stores.file_operations import Directories, Handle, active, explained, wait_for_lock, write_all
from shardkit.stores.local import check_vacant
from shardkit.stores.ownership import WriteAccess
from shardkit.stores.store import absolute_path

BLOCKS: Final = "blocks"
"""Folder of the blocks in a cache."""

MARKER: Final = "shardkit-cache.json"
"""File that marks a directory as a cache."""

_PARTS: Final = "tmp"
_FORMAT: Final = "shardkit-cache/1"
_HEX: Final = re.compile(r"[0-9a-f]{64}")
_PART: Final = re.compile(r"[0-9a-f]{64}\.part")
_REST_AFTER_FULL_S: Final = 30.0
_WAIT_S: Final = 10.0  # longest wait for another process that fetches the same block
_MIN_LIMIT: Final = 1 << 20


class BlockCache:
    """Directory of cached blocks, shared by processes.

    Args:
        path: The directory; created if missing. Other files in it are left alone.
        limit: Bytes of blocks over all processes; if processes give different limits, the smallest one holds.
        read_events: Receives counts of hits, fills and failures.

    Raises:
        UsageError: The directory is on a network file system, or the limit is too small.
        StoreError: The directory cannot be created.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, limit: int, read_events: ReadEvents | None = None
    ) -> None:
        self.path = absolute_path(path)
        if limit < _MIN_LIMIT:
            raise UsageError(f"cache limit of {limit} bytes: expected at least {_MIN_LIMIT}")
        check_local(self.path)
        check_vacant(self.path, "cache")
        self.limit = limit
        self.read_events = read_events or ReadEvents()
        self._directories, self._access = Directories(self.path), WriteAccess()
        self._full_until = 0.0
        self._process = os.getpid()
        with explained(f"open the cache {self.path}", writing=True), contextlib.ExitStack() as opened:
            for name in (BLOCKS, _PARTS):
                with self._directories.made((name,)):
                    pass
            self._folder = active().open_root(self.path)
            opened.callback(active().close, self._folder)
            self._check_marker()
            self._users: Handle | None = active().open_shared(self._folder, "users")
            opened.callback(active().close, self._users)  # and its lock, for a second try
            self._catalogue = Catalogue(self._folder)
            self._lock = threading.Lock()
            self._begin()
            opened.pop_all()
        self.lease = Lease(self._directories)
        self._neighbours = Neighbours(self._directories)

    def __repr__(self) -> str:
        return f"BlockCache({self.path!r}, limit={self.limit})"

    # Use

    def fetch(self, request: BlockRequest, fetch: Callable[[], Buffer]) -> Buffer:
        """Return the block's verified bytes from the directory, otherwise from `fetch`, which must verify them.

        If several processes or threads request a block, one of them fetches it while the rest wait.
        """
        data = self.get(request)
        if data is not None:
            return data
        self.read_events.note("cache_misses")
        with self._filling(request.sha256) as part:
            if part is None:  # not locked in time, or the disk failed: bypass the cache
                return fetch()
            data = self.get(request)
            if data is not None:
                self.read_events.note("cache_waits", what=request.name)
                return data
            data = fetch()
            self._keep(part, request, data)
            return data

    def get(self, request: BlockRequest) -> bytes | None:
        """Return the block's verified bytes, or None if it is not cached; a damaged block is removed."""
        name = request.sha256.hex()
        try:
            data = self._read(name, request.length)
        except FileNotFoundError:
            return None
        except (OSError, StoreError) as error:
            self.read_events.note("cache_failed", what="read", reason=_reason(error))
            return None
        if data is None or not self._is_right(data, request):
            self.read_events.note("cache_damaged", what=name)
            self.drop(request.sha256)
            return None
        self.read_events.note("cache_hits")
        self.read_events.add_bytes("cache", len(data))
        return data

    def _is_right(self, data: bytes, request: BlockRequest) -> bool:
        if request.xxh3 is None or self._access.others_can_write(self._path(request.sha256)):
            return hashlib.sha256(data).digest() == request.sha256
        return xxh3(data) == request.xxh3

    def _path(self, sha256: bytes) -> str:
        name = sha256.hex()
        return os.path.join(self.path, BLOCKS, name[:2], name)

    def drop(self, sha256: bytes) -> None:
        """Remove a block if it is cached."""
        with contextlib.suppress(OSError, ShardkitError), self._catalogue_locked():
            self._unlink(sha256)

    @property
    def used(self) -> int:
        """Bytes of cached blocks, according to the catalogue."""
        with self._catalogue_locked():
            return self._catalogue.total

    def close(self) -> None:
        """Withdraw the lease and close the directory; the blocks stay. May be called twice."""
        if self._process == os.getpid():
            self.lease.close()
        users, self._users = self._users, None
        if users is not None:
            active().close(users)
            active().close(self._folder)

    # Filling

    @contextlib.contextmanager
    def _filling(self, sha256: bytes) -> Iterator[Handle | None]:
        """Hold the lock on a block's unfinished file; the kernel releases the lock if this process dies."""
        try:
            part = self._claim(f"{sha256.hex()}.part")
        except (OSError, StoreError) as error:
            self.read_events.note("cache_failed", what="claim", reason=_reason(error))
            part = None
        try:
            yield part
        finally:
            if part is not None:
                with contextlib.suppress(OSError), self._directories.opened((_PARTS,)) as folder:
                    active().unlink(folder, f"{sha256.hex()}.part")
                active().close(part)

    def _claim(self, name: str) -> Handle | None:
        operations = active()
        deadline, pause = time.monotonic() + _WAIT_S, 0.001
        while True:
            with self._directories.made((_PARTS,)) as folder:
                part = operations.open_shared(folder, name)
            try:
                if operations.try_lock(part):
                    links = operations.stat_open(part).st_nlink
                    if links == 1:
                        return part
                    if links > 1:
                        # the last holder published the block and was killed before it removed this name
                        with self._directories.opened((_PARTS,)) as folder:
                            operations.unlink(folder, name)
                elif time.monotonic() > deadline:
                    operations.close(part)
                    return None
                else:
                    time.sleep(pause)
                    pause = min(0.05, pause * 2)
            except BaseException:
                operations.close(part)
                raise
            operations.close(part)  # the last holder has removed this file: open a new one

    def _keep(self, part: Handle, request: BlockRequest, data: Buffer) -> None:
        """Store verified bytes if they fit or eviction favours them; failures are counted, not raised."""
        size = memoryview(data).nbytes
        if size > self.limit or time.monotonic() < self._full_until:
            self.read_events.note("cache_bypassed")
            return
        try:
            with self._catalogue_locked():
                admitted = self._make_room(size, request.place)
            if admitted:
                active().truncate(part, 0)  # a killed process may have left bytes in it
                write_all(part, memoryview(data))
                # linked and recorded under one lock, so that no eviction comes in between
                with self._catalogue_locked():
                    admitted = self._make_room(size, request.place)
                    if admitted:
                        self._link(request.sha256.hex())
                        self._catalogue.add(request.sha256, CachedBlock(size, request.place, time.time()))
            self.read_events.note("cache_fills" if admitted else "cache_bypassed")
        except (OSError, StoreError) as error:
            self._full_until = time.monotonic() + _REST_AFTER_FULL_S
            self.read_events.note("cache_failed", what="write", reason=_reason(error))
            self.drop(request.sha256)

    def _link(self, name: str) -> None:
        with (
            self._directories.opened((_PARTS,)) as parts,
            self._directories.made((BLOCKS, name[:2])) as folder,
            contextlib.suppress(FileExistsError),
        ):
            active().link(parts, f"{name}.part", folder, name)

    # Eviction; with the catalogue's lock held

    @contextlib.contextmanager
    def _catalogue_locked(self) -> Iterator[None]:
        with self._lock, self._catalogue.locked():
            yield

    def _make_room(self, size: int, place: int) -> bool:
        """Evict blocks for `size` more bytes; return False if the new block would be evicted first."""
        if self._catalogue.total + size <= self.limit:
            return True
        digests = list(self._catalogue.entries)
        entries = list(self._catalogue.entries.values())
        places = np.array([entry.place for entry in entries] + [place], dtype=np.uint64)
        seconds = self.lease.seconds_until(places)
        # The new block is compared as well, by its next use after the present one.
        seconds[-1:] = self.lease.seconds_until(places[-1:], after=1)
        np.minimum(seconds, self._neighbours.seconds_until(places, own=self.lease), out=seconds)
        victims = choose_victims(
            np.array([entry.size for entry in entries], dtype=np.int64),
            seconds[:-1],
            np.array([entry.added for entry in entries], dtype=np.float64),
            held=self._catalogue.total,
            limit=self.limit,
            new_size=size,
            new_distance=float(seconds[-1]),
        )
        if victims is None:
            return False
        for victim in victims.tolist():
            self._unlink(digests[victim])
            self.read_events.note("cache_evictions")
        return self._catalogue.total + size <= self.limit

    def _unlink(self, sha256: bytes) -> None:
        name = sha256.hex()
        with contextlib.suppress(FileNotFoundError), self._directories.opened((BLOCKS, name[:2])) as folder:
            active().unlink(folder, name)
        if sha256 in self._catalogue.entries:
            self._catalogue.remove(sha256)
        if self._catalogue.is_long:
            self._catalogue.rewrite(dict(self._catalogue.entries))

    # Opening

    def _check_marker(self) -> None:
        """Mark the directory as a cache; a mark torn by a power cut or a full disk is written again."""
        operations = active()
        marker = operations.open_shared(self._folder, MARKER)
        try:
            wait_for_lock(operations.try_lock, marker)
            data = operations.read(marker, 4096, 0)
            mark = encode({"format": _FORMAT})
            if data == mark:
                return
            with contextlib.suppress(FormatError):
                decode_plain(data, max_bytes=4096)
                raise UsageError(
                    f"{self.path}/{MARKER} is not one that this version writes; use another directory, or remove the "
                    "cache"
                )
            operations.truncate(marker, 0)
            operations.write(marker, memoryview(mark))
        finally:
            operations.close(marker)

    def _begin(self) -> None:
        """Join the users of the cache; the first user removes leftovers and rebuilds the catalogue before."""
        operations = active()
        assert self._users is not None
        alone = operations.try_lock(self._users)
        with self._catalogue_locked():
            if alone:
                self._sweep()
                self._catalogue.rewrite(self._scan())
        wait_for_lock(operations.try_share, self._users)  # another process may be opening the cache

    def _scan(self) -> dict[bytes, CachedBlock]:
        """Return the blocks in the directory; blocks without a known place are evicted first."""
        operations = active()
        known = dict(self._catalogue.entries)
        found: dict[bytes, CachedBlock] = {}
        with self._directories.opened((BLOCKS,)) as blocks:
            folders = [name for name, is_folder in operations.names(blocks) if is_folder and len(name) == 2]
        for head in folders:
            with contextlib.suppress(OSError, StoreError), self._directories.opened((BLOCKS, head)) as folder:
                for name, is_folder in operations.names(folder):
                    if not is_folder and _HEX.fullmatch(name) is not None and name.startswith(head):
                        stat = operations.stat(folder, name)
                        digest = bytes.fromhex(name)
                        old = known.get(digest)
                        found[digest] = CachedBlock(
                            stat.st_size, old.place if old else 0, old.added if old else stat.st_mtime
                        )
        return found

    def _sweep(self) -> None:
        operations = active()
        with contextlib.suppress(OSError), self._directories.opened((_PARTS,)) as folder:
            for name, _ in operations.names(folder):
                if _PART.fullmatch(name) is not None:
                    with contextlib.suppress(OSError):
                        part = operations.open_file(folder, name)
                        try:
                            if operations.try_lock(part):
                                operations.unlink(folder, name)
                        finally:
                            operations.close(part)

    def _read(self, name: str, length: int) -> bytes | None:
        """Return the file's bytes, or None if it has another size."""
        operations = active()
        with self._directories.opened((BLOCKS, name[:2])) as folder:
            file = operations.open_file(folder, name)
        try:
            if operations.stat_open(file).st_size != length:
                return None
            data = operations.read(file, length, 0)
            return data if len(data) == length else None
        finally:
            operations.close(file)


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


_NETWORK: Final = re.compile(
    "nfs[34]?|cifs|smb[23]?|smbfs|ncpfs|afs|ceph|lustre|lustre_tgt|gpfs|beegfs|panfs|pvfs2|orangefs|gfs2?|ocfs2|glusterfs|9p|davfs|wekafs|vastnfs|quobyte|moosefs|afpfs|webdav"
)
_NETWORK_FUSE: Final = re.compile(
    "sshfs|s3fs|gcsfuse|goofys|geesefs|rclone|gluster|juicefs|ceph|davfs|mount-s3|moose|blobfuse|quobyte|curlftpfs|lizardfs|seaweed|alluxio|hdfs"
)


def check_local(path: str) -> None:
    """Raise UsageError if a cache directory is on a network file system."""
    kind = filesystem_of(path)
    if kind is not None and is_network(kind):
        raise UsageError(
            f"cache {path} lies on a network file system ({kind}): locks there are not the machine's own, and every "
            "hit would cross the network; use a directory on a local disk, such as /var/tmp/shardkit, or leave the "
            "cache out: a shared file system can be the dataset's root itself"
        )


def is_network(kind: str) -> bool:
    """Return True if a file system of this kind is shared over a network."""
    return _NETWORK.fullmatch(kind) is not None or (
        kind.startswith("fuse") and _NETWORK_FUSE.search(kind) is not None
    )


def filesystem_of(path: str, mounts: str | None = None) -> str | None:
    """Return the kind of file system of an existing or future `path`, such as "ext4" or "nfs4"; None if unknown.

    `mounts` has the form of ``/proc/self/mountinfo``, which is read by default.
    """
    if mounts is None:
        mounts = ""
        with contextlib.suppress(OSError):
            mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    real = os.path.realpath(path)
    best, kind = "", None
    for line in mounts.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split()
        if not separator or len(fields) < 5:
            continue
        point = fields[4].encode("latin-1", "replace").decode("unicode_escape")  # spaces are written as octal
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # a later mount at the same point hides the earlier one
            best, kind = point, after.split()[0]
    return kind
