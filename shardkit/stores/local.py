"""Store in a local directory or on a mounted network file system (assumptions: SPEC.md §2); `open_store`.

Publishing: create an ``O_EXCL`` temporary in ``ROOT/tmp`` → write all bytes → fsync → link to the final name → fsync
the directory → unlink the temporary. A name therefore appears atomically, with all bytes durable, and is never reused.

A temporary is named ``<boot>-<pid namespace>-<pid>-<start>-<random>[.suffix]``, and its writer holds an advisory lock
on it. From both, the sweep recognizes temporaries of dead writers. Removing the temporary of a live writer makes the
writer fail cleanly, as publishing links the temporary by name.

A folder becomes a dataset, a copy, a cache or a run only if that does not mix it with other files (`check_vacant`).
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal
from urllib.parse import unquote

from shardkit.credentials import redact, refuse_credentials
from shardkit.errors import NotFoundError, StoreError, UsageError
from shardkit.extras import shell_word
from shardkit.stores.file_operations import (
    FOLDER,
    Directories,
    FileOperations,
    Handle,
    active,
    check_regular,
    exists,
    explained,
    read_exactly,
)
from shardkit.stores.store import (
    DirectStore,
    ObjectStat,
    Stage,
    Store,
    absolute_path,
    check_name,
    check_prefix,
    is_name,
    place_text,
    scheme_of,
)


class LocalStore(DirectStore):
    """Objects as files below one directory; implements `shardkit.stores.store.Store`.

    Keeps no descriptor open between calls, so it may be used from any thread, after a fork, and pickled.

    Args:
        root: The directory; created when the first object is put.
        read_only: Refuse every change, and do not sweep.
    """

    def __init__(self, root: str | os.PathLike[str], *, read_only: bool = False) -> None:
        self._root = absolute_path(root)
        self._read_only = read_only
        self._directories = Directories(self._root)
        if not read_only:
            self.sweep()

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (self._root, self._read_only)

    @property
    def url(self) -> str:
        return self._root

    # Reading

    def get(self, name: str, *, max_bytes: int) -> bytes:
        with self._reading(name) as file:
            size = active().stat_open(file).st_size
            self._check_size(name, size, max_bytes)
            data = read_exactly(file, 0, size)
        self._check_length(name, len(data), size)  # the file may shrink while it is read
        return data

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        with self._reading(name) as file:
            self._check_range(name, offset, length, active().stat_open(file).st_size)
            data = read_exactly(file, offset, length)
        self._check_length(name, len(data), length)
        return data

    def head(self, name: str) -> ObjectStat | None:
        with self._found(name) as file:
            return None if file is None else ObjectStat(active().stat_open(file).st_size, None)

    def local_path(self, name: str) -> Path | None:
        return None if self.head(name) is None else Path(self._root, name)

    def list_after(self, prefix: str, after: str = "") -> Iterator[str]:
        components = check_prefix(prefix)
        with explained(f"list {prefix or 'objects'} in {self._root}"):
            try:
                with self._directories.opened(components) as folder:
                    names = active().names(folder)
            except FileNotFoundError:
                return
        # A folder sorts with its slash, so "a-b" comes before "a/x", as in an object store.
        for name in sorted(f"{prefix}{name}/" if is_folder else prefix + name for name, is_folder in names):
            if not is_name(name.removesuffix("/")):
                continue
            if name.endswith("/"):
                if name > after or after.startswith(name):
                    yield from self.list_after(name, after)
            elif name > after:
                yield name

    # Writing

    def put_new(self, name: str, data: bytes) -> bool:
        components = check_name(name)
        self._check_writable(name)
        with (
            explained(f"write {name} in {self._root}", writing=True),
            self._directories.made(components[:-1]) as folder,
        ):
            if exists(folder, components[-1]):
                active().fsync_directory(folder)  # the process that linked it may not have synced yet
                return False
            with self.stage() as stage:
                stage.write(data)
                return stage.publish_into(folder, components[-1], replace=False)

    def replace(self, name: str, data: bytes) -> None:
        with self.stage() as stage:
            stage.write(data)
            stage.publish(name, replace=True)

    def delete(self, name: str) -> None:
        components = check_name(name)
        self._check_writable(name)
        with explained(f"delete {name} in {self._root}", writing=True):
            try:
                with self._directories.opened(components[:-1]) as folder:
                    with contextlib.suppress(FileNotFoundError):
                        active().unlink(folder, components[-1])
                    active().fsync_directory(folder)
            except FileNotFoundError:
                return

    @contextlib.contextmanager
    def stage(self, suffix: str = "") -> Iterator[LocalStage]:
        self._check_writable(suffix or "an object")
        with contextlib.ExitStack() as cleanup:
            with explained(f"make a temporary file in {self._root}/{FOLDER}", writing=True):
                folder = cleanup.enter_context(self._directories.made((FOLDER,)))
                stage = LocalStage(self._directories, folder, suffix)
            cleanup.callback(stage.drop)
            yield stage

    def sweep(self) -> int:
        """Remove temporaries of dead processes and return their number.

        Errors are ignored: the remaining files are swept later, and a failing disk raises on the next write.
        """
        swept = 0
        with contextlib.suppress(OSError), self._directories.opened((FOLDER,)) as folder:
            for name, _ in active().names(folder):
                with contextlib.suppress(OSError):
                    if writer_is_dead(active(), folder, name):
                        active().unlink(folder, name)
                        swept += 1
        return swept

    # Files

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[Handle]:
        with self._found(name) as file:
            if file is None:
                raise NotFoundError(
                    f"{name} is not in {self._root}; check the path, or run: shardkit verify {shell_word(self._root)}"
                )
            yield file

    @contextlib.contextmanager
    def _found(self, name: str) -> Iterator[Handle | None]:
        """Open a file for the duration of the block; None if it does not exist."""
        components = check_name(name)
        with explained(f"read {name} in {self._root}"):
            try:
                with self._directories.opened(components[:-1]) as folder:
                    file: Handle | None = active().open_file(folder, components[-1])
            except FileNotFoundError:
                file = None
            if file is None:
                yield None
                return
            try:
                check_regular(active().stat_open(file), file.path)
                yield file
            finally:
                active().close(file)


def _reopen(root: str, read_only: bool) -> LocalStore:
    store = LocalStore(root, read_only=True)  # unpickling never sweeps: only opening does
    store._read_only = read_only  # noqa: SLF001
    return store


_FOREIGN_GRACE_S: Final = 24 * 3600
_NAME: Final = re.compile(r"([0-9a-z]+)-([0-9a-z]+)-([0-9]+)-([0-9]+)-[0-9a-f]{16}(?:\.[a-z0-9.]+)?")


def temporary_name(suffix: str = "") -> str:
    """Return a new name that identifies the boot and the process of the writer."""
    import secrets  # slow to import, and readers do not need it

    tail = f".{suffix}" if suffix else ""
    return f"{_boot()}-{_pid_namespace()}-{_this_process(os.getpid())}-{secrets.token_hex(8)}{tail}"


def private_folder(url: str) -> str:
    """Return the path of this user's private local scratch folder for a remote root; the same for each call.

    Raises:
        StoreError: the folder above it is not private.
    """
    import tempfile  # slow to import, and rarely needed

    parent = os.path.join(tempfile.gettempdir(), f"shardkit-{os.getuid()}")
    with explained(f"make {parent}", writing=True):
        with contextlib.suppress(FileExistsError):
            os.mkdir(parent, 0o700)
        found = os.lstat(parent)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise StoreError(
            f"{parent} is not a private directory of this user; remove it, or name a scratch directory"
        )
    return os.path.join(parent, hashlib.sha256(url.encode()).hexdigest()[:16])


def writer_is_dead(operations: FileOperations, folder: Handle, name: str) -> bool:
    """Return True if the writer of a temporary is certainly dead.

    A writer of this boot and pid namespace is looked up. Any other writer may belong to an earlier boot, another
    machine or another container. It counts as dead only if the file is unlocked and has not been written to for a day.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return False  # not a temporary of shardkit
    boot, namespace, pid, start = match.group(1), match.group(2), int(match.group(3)), int(match.group(4))
    if (boot, namespace) == (_boot(), _pid_namespace()):
        return not _is_alive(pid, start)
    file = operations.open_file(folder, name)
    try:
        idle_s = time.time() - operations.stat_open(file).st_mtime
        return idle_s > _FOREIGN_GRACE_S and operations.try_lock(file)
    finally:
        operations.close(file)


def _is_alive(pid: int, start: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # alive, and owned by another user
    now = _start_time(pid)
    # The start time distinguishes the writer from a later process with the same pid.
    return now is None or start in (0, now)


@functools.cache
def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip().replace("-", "")
    with contextlib.suppress(OSError, ValueError, ArithmeticError):
        return f"up{int(time.time() - time.monotonic()) // 60}"  # no /proc (macOS): the minute of the boot
    return "unknown"


@functools.cache
def _pid_namespace() -> str:
    try:
        return "".join(character for character in os.readlink("/proc/self/ns/pid") if character.isdigit())
    except OSError:
        return "0"


@functools.lru_cache(maxsize=1)
def _this_process(pid: int) -> str:
    """Return the number and the start time of this process, which are read once."""
    return f"{pid}-{_start_time(pid) or 0}"


# A descendant may get the number of a dead ancestor.
os.register_at_fork(after_in_child=_this_process.cache_clear)


def _start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks after boot, or None if unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        # Field 22 of proc_pid_stat(5). The second field is the command in brackets, which may contain anything.
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


class LocalStage(Stage):
    """Temporary file in a local root, published by linking it to its final name."""

    def __init__(self, directories: Directories, folder: Handle, suffix: str) -> None:
        self._directories = directories
        self._folder = folder
        self._name = temporary_name(suffix)
        self._file = active().create_file(folder, self._name)
        super().__init__(self._file.path)
        # on a file system without locks, the sweep relies on process ids and file age
        with contextlib.suppress(OSError):
            active().try_lock(self._file)

    def _append(self, data: memoryview) -> int:
        return active().write(self._file, data)

    def sync(self) -> None:
        """Make the bytes written so far durable; another thread may write meanwhile."""
        with explained(f"write {self._file.path}", writing=True):
            active().fsync(self._file)

    def publish(self, name: str, *, replace: bool = False) -> bool:
        """Make the bytes durable, then link them to their name; see `Stage.publish`."""
        components = check_name(name)
        directories = self._directories
        with (
            explained(f"write {name} in {directories.root}", writing=True),
            directories.made(components[:-1]) as folder,
        ):
            return self.publish_into(folder, components[-1], replace=replace)

    def publish_into(self, folder: Handle, name: str, *, replace: bool) -> bool:
        """Publish into a folder that is already open and durable."""
        operations = active()
        self._check_whole()
        operations.fsync(self._file)
        if replace:
            operations.rename(self._folder, self._name, folder, name)
            created = True
        else:
            created = self._link(folder, name)
        operations.fsync_directory(folder)
        return created

    def drop(self) -> None:
        """Close and remove the temporary; a published name stays. If removal fails, a later sweep removes it."""
        with contextlib.suppress(OSError):
            active().unlink(self._folder, self._name)
        with contextlib.suppress(OSError):
            active().close(self._file)

    def _link(self, folder: Handle, name: str) -> bool:
        try:
            active().link(self._folder, self._name, folder, name)
        except OSError as error:
            # A network file system may repeat a request whose answer was lost, and then report that the name
            # exists. The link count shows whether the name refers to this file.
            if active().stat_open(self._file).st_nlink == 2:
                return True
            if isinstance(error, FileExistsError):
                return False
            raise
        return True


def open_store(url: str | os.PathLike[str], *, read_only: bool = False) -> Store:
    """Return the store at a root.

    Args:
        url: A local path or ``file://`` URL; ``s3://``, ``gs://`` or ``az://`` bucket and prefix, with endpoint,
            region and credentials from the environment (SPEC.md §3); or any other URL that fsspec knows.
        read_only: Refuse every change.

    Raises:
        UsageError: The URL is malformed, holds a credential or begins with ``~``, which a shell has not expanded.
    """
    text = place_text(url, "root")
    refuse_credentials(text, "the URL of a root")
    scheme = scheme_of(text)
    if scheme is None:
        return LocalStore(text, read_only=read_only)
    if scheme == "file":
        host, slash, path = text[len("file://") :].partition("/")
        if host not in ("", "localhost") or not slash:
            raise UsageError(f"{text!r}: expected file:///absolute/path")
        return LocalStore(unquote(slash + path), read_only=read_only)
    from shardkit.stores.remote.addresses import parse_address  # imported late: local stores need neither
    from shardkit.stores.remote.object_store import ObjectStore

    return ObjectStore(parse_address(text), read_only=read_only)


# ---- Folders that may become a dataset, a copy, a cache or a run

Kind = Literal["dataset", "copy", "cache", "run"]

_DATASET_MARK: Final = "shardkit.json"
_DATASET: Final = frozenset(
    {_DATASET_MARK, "shardkit-copy.json", "shardkit-locations.json", "objects", "log", "locations", "parity"}
    | {"attest", "gc", "erasures", "scratch", "probe", "tmp"}
)
_NAMES: Final[dict[Kind, frozenset[str]]] = {
    "dataset": _DATASET,
    "copy": _DATASET,
    "cache": frozenset({"blocks", "tmp", "futures", "users", "lock", "catalogue"}),
}
"""Names that may be in a folder of each kind before it has a mark."""

_RUN_FILES: Final = ("run.json", "run.toml", "journal", "ledger", "telemetry", "events.jsonl", "attest")
_MARKS: Final[dict[Kind, frozenset[str]]] = {
    "cache": frozenset({"shardkit-cache.json"}),
    "run": frozenset({*_RUN_FILES, "checkpoints", "lock"}),
}
"""Names that mark a folder as one of a kind; other files in it are left alone."""
_OUTER: Final[dict[Kind, tuple[Kind, str]]] = {
    "cache": ("run", os.path.join("journal", "*.cells")),
    "run": ("cache", "shardkit-cache.json"),
}
"""The kind inside which a folder of a kind may not be, and a pattern of its files; caches evict, runs are copied."""


def is_url(place: str | os.PathLike[str]) -> bool:
    """Return True for a URL, also for a `Path` made of one, which has one slash."""
    return re.match("[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(place)) is not None


def check_vacant(url: str | os.PathLike[str], kind: Kind) -> None:
    """Refuse a local folder that holds other files or is inside a dataset; caches and runs are not inside each other.

    Args:
        url: Path or URL of the folder; of URLs only is checked that a cache or run has none. A missing folder is
            vacant.
        kind: Intended use of the folder. A folder that is already of this kind is accepted.

    Raises:
        UsageError: The folder may not be used; the message names a file in it.
    """
    text = place_text(url, kind)
    if kind in _OUTER and is_url(text):
        raise UsageError(
            f"{kind} {redact(text)}: a {kind} is a folder of this machine; give "
            + (
                "a path such as runs/a, and copy it to the store afterwards"
                if kind == "run"
                else "a folder of its local disk"
            )
        )
    if scheme_of(text):
        return
    path = absolute_path(text)
    action = f"choose an empty folder for the {kind}"
    if kind in ("cache", "run") and os.path.lexists(os.path.join(path, _DATASET_MARK)):
        raise UsageError(f"{path} is a dataset and cannot be a {kind}; {action}")
    check_outside(path, action)
    if kind in _OUTER:
        outer, mark = _OUTER[kind]
        for folder in _parents(path):
            if glob.glob(os.path.join(glob.escape(folder), mark)):
                raise UsageError(f"{path} is inside the {outer} {folder} and cannot be a {kind}; {action}")
    try:
        found = sorted(name for name in os.listdir(path) if name != "lost+found")
    except OSError:
        return  # it does not exist, or its first use will raise
    is_marked = kind in _MARKS and not _MARKS[kind].isdisjoint(found)
    foreign = [] if is_marked else [name for name in found if name not in _NAMES.get(kind, ())]
    if foreign:
        raise UsageError(f"{path} holds other files, such as {foreign[0]!r}; {action}")


def check_outside(place: str | os.PathLike[str], action: str = "choose a place outside of it") -> None:
    """Refuse a path that is inside a dataset; `action` is the advice of the message."""
    path = absolute_path(place)
    for folder in _parents(path):
        if os.path.lexists(os.path.join(folder, _DATASET_MARK)):
            raise UsageError(f"{path} is inside the dataset {folder}; {action}")


def _parents(path: str) -> Iterator[str]:
    """Yield the folders that contain an absolute path, from the nearest on, without the file system's root."""
    outer = os.path.dirname(path)
    while outer != os.path.dirname(outer):
        yield outer
        outer = os.path.dirname(outer)
