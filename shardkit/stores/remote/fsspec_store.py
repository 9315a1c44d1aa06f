"""A store behind any URL that fsspec knows: the compatible path, for one writer at a time.

fsspec promises no put-if-absent that holds between processes (most of its file systems look first and write then), so
the probe refuses such roots to several writers. Reading is as safe as anywhere: every byte is verified.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from shardkit.errors import (
    MissingDependency,
    NotFoundError,
    ShardkitError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
)
from shardkit.stores.file_operations import store_error
from shardkit.stores.remote.addresses import Address
from shardkit.stores.remote.remote_store import RemoteStore
from shardkit.stores.store import ObjectStat, check_prefix, is_name
from shardkit.stores.waiting import WAITS

_Result = TypeVar("_Result")

_TEMPORARIES: Final = "tmp"
_ETAGS: Final = ("ETag", "etag", "md5Hash", "content_md5")
"""Under which names file systems tell something that changes with the bytes; times tell nothing."""
_CLIENTS_OWN_S: Final = float("inf")
"""How long fsspec's clients wait is theirs to know."""


class FsspecStore(RemoteStore):
    """Objects below a URL that fsspec opens; implements `shardkit.stores.store.Store`."""

    def __init__(self, address: Address, *, read_only: bool = False) -> None:
        if importlib.util.find_spec("fsspec") is None:
            raise MissingDependency(f"{address.scheme}:// needs fsspec; run: pip install 'shardkit[s3]'")
        super().__init__(address, read_only=read_only)

    def _open(self) -> None:
        self._lock = threading.Lock()
        self._systems: dict[int, tuple[Any, str]] = {}

    # Reading

    def get(self, name: str, *, max_bytes: int) -> bytes:
        self._check_name(name)
        size = self._size(name)
        self._check_size(name, size, max_bytes)
        return self._read(name, 0, size)

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        self._check_name(name)
        self._check_ranges(name, ranges)
        if not ranges:
            return []
        self._check_ranges(name, ranges, self._size(name))
        return [self._read(name, offset, length) for offset, length in ranges]

    def head(self, name: str) -> ObjectStat | None:
        self._check_name(name)
        try:
            info = self._info(name)
        except NotFoundError:
            return None
        return ObjectStat(int(info["size"]), None, next((str(info[k]) for k in _ETAGS if info.get(k)), ""))

    def list_after(self, prefix: str, after: str = "") -> Iterator[str]:
        check_prefix(prefix)
        system, root = self._system()

        def find() -> list[str]:
            system.invalidate_cache()
            try:
                return list(system.find(f"{root}/{prefix}".rstrip("/")))
            except FileNotFoundError:
                return []

        paths = self._told(prefix or "objects", "list", find)
        names = sorted(_below(system, root, path) for path in paths)
        yield from (name for name in names if name > after and name.startswith(prefix) and is_name(name))

    # Writing

    def put_new(self, name: str, data: bytes) -> bool:
        """Safe between the threads that share this store, not between processes."""
        self._check_name(name)
        self._check_writable(name)
        with self._lock:
            if self.head(name) is not None:
                return False
            self._put(name, data)
            return True

    def replace(self, name: str, data: bytes) -> None:
        self._check_name(name)
        self._check_writable(name)
        with self._lock:
            self._put(name, data)

    def delete(self, name: str) -> None:
        self._check_name(name)
        self._check_writable(name)
        system, root = self._system()

        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                system.rm_file(f"{root}/{name}")

        self._told(name, "delete", remove, writing=True)

    def _put(self, name: str, data: bytes) -> None:
        """Write under a temporary name, then move: no reader sees half an object."""
        system, root = self._system()
        temporary, final = f"{root}/{_TEMPORARIES}/{uuid.uuid4().hex}", f"{root}/{name}"

        def put() -> None:
            system.makedirs(os.path.dirname(final), exist_ok=True)
            system.makedirs(os.path.dirname(temporary), exist_ok=True)
            try:
                system.pipe_file(temporary, bytes(data))
                system.mv(temporary, final)
            except BaseException:
                with contextlib.suppress(Exception):
                    system.rm_file(temporary)
                raise

        self._told(name, "write", put, writing=True)

    # Requests

    def _system(self) -> tuple[Any, str]:
        """(file system, path of the root in it) of this process."""
        found = self._systems.get(os.getpid())
        if found is None:
            fsspec = importlib.import_module("fsspec")

            def make() -> tuple[Any, str]:
                address = self._address.url
                try:
                    system, root = fsspec.core.url_to_fs(
                        address, skip_instance_cache=True, use_listings_cache=False
                    )
                except TypeError:  # some hand what they do not know to their client: sftp
                    system, root = fsspec.core.url_to_fs(address, skip_instance_cache=True)
                return system, root.rstrip("/")

            found = self._systems.setdefault(os.getpid(), self._told("the root", "open", make))
        return found

    def _size(self, name: str) -> int:
        return int(self._info(name)["size"])

    def _info(self, name: str) -> dict[str, Any]:
        system, root = self._system()
        info: dict[str, Any] = self._told(name, "look at", lambda: system.info(f"{root}/{name}"))
        if info.get("type") != "file" or info.get("size") is None:
            raise NotFoundError(
                f"{name} is not in {self.url}; check the URL, or run: shardkit verify {self.url}"
            )
        return info

    def _read(self, name: str, offset: int, length: int) -> bytes:
        if not length:
            return b""
        system, root = self._system()
        data = self._told(
            name, "read", lambda: system.cat_file(f"{root}/{name}", start=offset, end=offset + length)
        )
        self._check_length(name, len(data), length)
        return bytes(data)

    def _told(
        self, name: str, doing: str, request: Callable[[], _Result], *, writing: bool = False
    ) -> _Result:
        """Turn the client's errors into the protocol's. Their own text is dropped: it may hold credentials."""
        try:
            with WAITS.waiting(self.url, f"{doing} {name}", _CLIENTS_OWN_S):
                return request()
        except ShardkitError:
            raise
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise NotFoundError(
                f"{name} is not in {self.url}; check the URL, or run: shardkit verify {self.url}"
            ) from None
        except (ImportError, ValueError) as error:
            hint = str(error) if isinstance(error, ImportError) else type(error).__name__
            raise StoreError(
                f"cannot {doing} {name} in {self.url}: {hint}; see fsspec's list of URLs"
            ) from None
        except OSError as error:
            told = (
                store_error(error, f"{doing} {name} in {self.url}", writing=writing) if error.errno else None
            )
            if isinstance(told, (StoreFullError, StoreReadOnlyError)):
                raise told from None
        except Exception as error:  # noqa: BLE001 (whatever the client raises)
            reason = type(error).__name__
            raise StoreError(f"cannot {doing} {name} in {self.url}: {reason}; run it again") from None
        raise StoreError(
            f"cannot {doing} {name} in {self.url}: no answer; look at the network, then run it again"
        )


def _below(system: Any, root: str, path: str) -> str:
    return str(system._strip_protocol(path)).removeprefix(root).lstrip("/")  # noqa: SLF001
