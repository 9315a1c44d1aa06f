"""Store at a URL: a bucket of S3 or a compatible service, Google or Azure, or any fsspec file system."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import functools
import importlib.util
import math
import mmap
import os
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, NoReturn, Self, TypeVar

from shardkit.arrays import Buffer
from shardkit.errors import IntegrityError, NotFoundError, StoreError, StoreFullError, StoreReadOnlyError
from shardkit.extras import shell_word
from shardkit.stores.file_operations import explained
from shardkit.stores.remote.addresses import OBJECT_SCHEMES, Address, check_key
from shardkit.stores.remote.clients import Client, ObjectProperties, endpoint_of, open_client
from shardkit.stores.remote.failures import Failure
from shardkit.stores.store import (
    DirectStore,
    ObjectStat,
    Stage,
    check_name,
    check_prefix,
    check_size,
    is_name,
)
from shardkit.stores.waiting import EXPIRED, FIRST_CONTACT, WAITS, RetryPolicy, Wait, pauses

_Result = TypeVar("_Result")

_ERRNO: Final = {
    "throttled": errno.EBUSY,
    "no-answer": errno.ETIMEDOUT,
    "expired": EXPIRED,
    "denied": errno.EACCES,
}
"""Kind of failure → `StoreError.errno`, by which the read path decides whether to retry."""
_S3_RIGHTS: Final = {
    "read": "s3:GetObject",
    "look at": "s3:GetObject",
    "list": "s3:ListBucket",
    "write": "s3:PutObject",
    "delete": "s3:DeleteObject",
}


class SpooledStage(Stage):
    """Stage that collects bytes in a local file and uploads them when it is published.

    The file has no name, so a killed process leaves no file.
    """

    def __init__(self, store: ObjectStore, file: Any) -> None:
        super().__init__(f"a temporary file in {tempfile.gettempdir()}")
        self._store, self._file = store, file

    def _append(self, data: memoryview) -> int:
        return int(self._file.write(data))

    def publish(self, name: str, *, replace: bool = False) -> bool:
        check_name(name)
        self._check_whole()
        with explained(f"read {self._path}"), self._map() as data:
            if replace:
                self._store.replace(name, data)
                return True
            return self._store.put_new(name, data)

    @contextlib.contextmanager
    def _map(self) -> Iterator[Any]:
        """Map the file; mapping is safe because no other process can truncate it."""
        if not self._size:
            yield b""
            return
        mapped = mmap.mmap(self._file.fileno(), self._size, access=mmap.ACCESS_READ)
        try:
            # a view, because clients treat the map itself as a file with a position
            yield memoryview(mapped)
        finally:
            with contextlib.suppress(BufferError):  # a client still has a view: releasing it closes the map
                mapped.close()


class ObjectStore(DirectStore):
    """Objects below a URL; implements `shardkit.stores.store.Store`.

    May be used from any thread, after a fork, and pickled. Clients are created per process on first use and read
    credentials from the environment; the store itself holds none.

    Args:
        address: Address of the root.
        read_only: Refuse every change.
        retry: Time limits of each operation. With ``deadline_s=0`` requests are repeated only with new credentials.
    """

    _PICKLED: Final = ("_address", "_read_only", "_retry", "_conditional")

    def __init__(
        self, address: Address, *, read_only: bool = False, retry: RetryPolicy | None = None
    ) -> None:
        self._address, self._read_only, self._retry = address, read_only, retry or RetryPolicy()
        self._conditional = address.scheme in OBJECT_SCHEMES.values()
        self._open()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._PICKLED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def _open(self) -> None:
        """Start without clients; also after unpickling in another process."""
        self._lock = threading.Lock()
        self._clients: dict[tuple[int, str], Any] = {}
        self._answered: set[int] = set()  # processes that have had an answer

    @property
    def url(self) -> str:
        return self._address.url

    @property
    def is_conditional(self) -> bool:
        """True if puts use put-if-absent; fsspec has none."""
        return self._conditional

    def local_path(self, name: str) -> Path | None:
        self._check_name(name)
        return None

    def with_retry(self, retry: RetryPolicy) -> Self:
        """Return the same root with other time limits."""
        return self._replace("_retry", retry)

    def for_one_writer(self) -> Self:
        """Return the same root without put-if-absent, for one writer at a time, whose threads may share the store.

        A put checks for the name first.
        """
        return self._replace("_conditional", False)

    def _replace(self, name: str, value: object) -> Self:
        changed = copy.copy(self)
        setattr(changed, name, value)
        return changed

    # Reading

    def get(self, name: str, *, max_bytes: int) -> bytes:
        self._check_name(name)
        size, data = self._try(name, "read", lambda client: client.get(name, max_bytes))
        self._check_size(name, size, max_bytes)
        self._check_length(name, memoryview(data).nbytes, size)
        return bytes(data)

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        return bytes(self.read_range(name, offset, length))

    def read_range(self, name: str, offset: int, length: int) -> Buffer:
        """Return a range as `get_range` does, without a copy: in the client's own buffer."""
        self._check_name(name)
        self._check_range(name, offset, length)
        if length == 0:  # HTTP has no empty ranges
            stat = self.head(name)
            if stat is None:
                self._refuse(name, "read", Failure("absent", ""))
            self._check_range(name, offset, length, stat.size)
            return b""
        data = self._try(name, "read", lambda client: client.get_range(name, offset, length))
        self._check_length(name, memoryview(data).nbytes, length)
        return data

    def head(self, name: str) -> ObjectStat | None:
        """Return size and ETag, and the SHA-256 that S3 computed when the object was written."""
        self._check_name(name)

        def look(client: Client) -> ObjectProperties | None:
            try:
                return client.stat(name)
            except Failure as failure:
                if failure.kind == "absent":
                    return None
                raise

        found = self._try(name, "look at", look, role=self._attesting)
        return None if found is None else ObjectStat(found.size, found.sha256, found.etag)

    def list_after(self, prefix: str, after: str = "") -> Iterator[str]:
        check_prefix(prefix)
        return (one.name for one in self._list(prefix, after, "data") if is_name(one.name))

    def _list(self, prefix: str, after: str, role: str) -> Iterator[ObjectProperties]:
        """Yield the objects below a folder, each once, even if the listing must be restarted."""
        last, what, since = after, prefix or "objects", WAITS.now()
        problem = Failure("no-answer", "")
        for _ in pauses(self._patience()):
            try:
                listed = self._client(role).list(prefix, last)
                while True:
                    # wait for the next name only, not while the caller processes it
                    with self._waiting("list", what, since) as wait:
                        wait.problem = problem.reason
                        found = self._answer(functools.partial(next, listed, None))
                    if found is None:
                        return
                    if found.name > last and found.name.startswith(prefix):
                        yield found
                        last = found.name
                    since = WAITS.now()
            except Failure as failure:
                if not failure.passing:
                    self._refuse(what, "list", failure)
                problem = failure
                self._renew(failure)
        self._refuse(what, "list", problem)

    # Writing

    def put_new(self, name: str, data: bytes) -> bool:
        """Create an object without overwriting; see `Store.put_new`.

        A put whose answer was lost may have succeeded, or may still succeed. It is therefore repeated, with the same
        write id in the object's metadata, until it is answered. The id then shows whether this call created the object.
        """
        self._check_name(name)
        self._check_put(name, len(data))
        if not self._conditional:
            with self._lock:
                if self.head(name) is not None:
                    return False
                self._try(name, "write", lambda client: client.put(name, data, write_id=None))
                return True
        return self._put_if_absent(name, data)

    def replace(self, name: str, data: bytes) -> None:
        self._check_name(name)
        self._check_put(name, len(data))
        self._try(name, "write", lambda client: client.put(name, data, write_id=None))

    def delete(self, name: str) -> None:
        self._check_name(name)
        self._check_writable(name)
        self._try(name, "delete", lambda client: client.delete(name))

    @contextlib.contextmanager
    def stage(self, suffix: str = "") -> Iterator[SpooledStage]:
        self._check_writable(suffix or "an object")
        with contextlib.ExitStack() as cleanup:
            with explained(f"make a temporary file in {tempfile.gettempdir()}", writing=True):
                file = cleanup.enter_context(tempfile.TemporaryFile(buffering=0))
            yield SpooledStage(self, file)

    def _check_name(self, name: str) -> None:
        check_name(name)

    def _put_if_absent(self, name: str, data: bytes) -> bool:
        write_id = uuid.uuid4().hex
        unclear = False

        def put(client: Client) -> bool:
            nonlocal unclear
            try:
                client.put(name, data, write_id=write_id)
            except Failure as failure:
                if failure.kind == "exists":
                    return unclear and self._is_mine(name, write_id)
                unclear = unclear or failure.kind == "no-answer"
                raise
            return True

        return self._try(name, "write", put)

    def _is_mine(self, name: str, write_id: str) -> bool:
        found: ObjectProperties = self._try(name, "look at", lambda client: client.stat(name))
        return found.write_id == write_id

    # Requests

    @property
    def _attesting(self) -> str:
        """Role of the client for `head`: "checksums" if stored checksums can be read, otherwise "data"."""
        return "checksums" if self._address.scheme == "s3" and _has_boto3() else "data"

    def _client(self, role: str) -> Client:
        """Return this process's client for a role: "data", or "checksums" to read stored checksums."""
        key = (os.getpid(), role)
        found = self._clients.get(key)
        if found is None:
            made = open_client(self._address, self._retry, checksums=role == "checksums")
            found = self._clients.setdefault(key, made)
        return found  # type: ignore[no-any-return]

    def _renew(self, failure: Failure) -> None:
        """Drop the clients if their credentials were refused; new clients read the credentials again."""
        if failure.kind in ("expired", "denied"):
            self._clients.clear()

    def _try(
        self, name: str, doing: str, request: Callable[[Any], _Result], *, role: str = "data"
    ) -> _Result:
        """Repeat a request until it is answered or the deadline has passed."""
        problem: Failure | None = None
        turns, renewed = pauses(self._patience()), False
        with self._waiting(doing, name) as wait:
            while True:
                expired = problem is not None and problem.kind == "expired"
                if next(turns, None) is None and (renewed or not expired):
                    break  # after expiry, new credentials get one attempt even past the deadline
                renewed = renewed or expired
                denied_before = problem is not None and problem.kind == "denied"
                try:
                    return self._answer(lambda: request(self._client(role)))
                except Failure as failure:
                    problem, wait.problem = failure, failure.reason
                    self._renew(failure)
                    # Some stores answer "denied" for an expired token, so try new credentials once.
                    if not failure.passing and (failure.kind != "denied" or denied_before):
                        break
        assert problem is not None
        return self._refuse(name, doing, problem)

    def _patience(self) -> RetryPolicy:
        """Return the retry policy, limited by `FIRST_CONTACT` until the store has answered once."""
        limit_s = FIRST_CONTACT.limit_s
        if math.isinf(limit_s) or os.getpid() in self._answered:
            return self._retry
        return dataclasses.replace(self._retry, deadline_s=min(self._retry.deadline_s, limit_s))

    def _answer(self, request: Callable[[], _Result]) -> _Result:
        """Return the result of a request; until the store has answered once, wait at most `FIRST_CONTACT.limit_s`."""
        if os.getpid() in self._answered or math.isinf(FIRST_CONTACT.limit_s):
            return request()
        try:
            found = _within(FIRST_CONTACT.limit_s, request)
        except Failure as failure:
            if failure.kind != "no-answer":
                self._answered.add(os.getpid())
            raise
        self._answered.add(os.getpid())
        return found

    def _waiting(self, doing: str, name: str, since: float | None = None) -> AbstractContextManager[Wait]:
        retry = self._retry
        deadline_s = max(retry.deadline_s, retry.attempt_s)
        return WAITS.waiting(self.url, f"{doing} {name}", deadline_s, since=since)

    def _refuse(self, name: str, doing: str, failure: Failure) -> NoReturn:
        """Raise the error that the store protocol requires for a failure."""
        if failure.kind == "absent":
            raise NotFoundError(
                f"{name} is not in {self.url}; check the URL, or run: shardkit verify {shell_word(self.url)}"
            )
        if failure.kind == "range":
            raise IntegrityError(
                f"{name} in {self.url}: it is shorter than expected; run: shardkit repair {shell_word(self.url)}"
            )
        advice = failure.advice
        if failure.kind == "denied":
            # the missing permission, named as in S3 policies if the store is S3
            right = _S3_RIGHTS.get(doing, doing) if self._address.scheme == "s3" else f"to {doing}"
            advice = f"get the right {right}, or set other credentials in the environment"
        endpoint = endpoint_of(self._address.scheme) if failure.kind == "no-answer" else ""
        text = f"cannot {doing} {name} in {self.url}{endpoint}: {failure.reason}; {advice}"
        if failure.kind == "denied" and doing in ("write", "delete"):
            raise StoreReadOnlyError(text)
        if failure.kind == "full":
            raise StoreFullError(text)
        error = StoreError(text)
        error.errno = _ERRNO.get(failure.kind, errno.EINVAL)
        raise error

    def _check_put(self, name: str, size: int) -> None:
        self._check_writable(name)
        check_size(size)


class ForeignStore(ObjectStore):
    """External objects, which are only read: adopted files, and sources of builds.

    The root is a whole bucket, or a folder at another URL. Any keys are allowed except those with empty parts, ``.`` or
    ``..``.
    """

    def _check_name(self, name: str) -> None:
        check_key(self.url, name)

    def list_keys(self, prefix: str) -> Iterator[tuple[str, ObjectStat]]:
        """Yield (key, size and ETag) below the folder `prefix` (empty, or ending in ``/``), in byte order."""
        # with boto3 if possible, because obstore stops at a key that has an empty part
        for found in self._list(prefix, "", self._attesting):
            if not found.name.endswith("/"):  # a folder marker
                yield found.name, ObjectStat(found.size, None, found.etag)


def _within(limit_s: float, request: Callable[[], _Result]) -> _Result:
    """Run a request on a new thread and return its result; after `limit_s`, abandon the thread and raise Failure."""
    answer: Future[_Result] = Future()

    def work() -> None:
        try:
            answer.set_result(request())
        except BaseException as error:  # noqa: BLE001 (raised by the caller)
            answer.set_exception(error)

    threading.Thread(target=work, name="shardkit-first-contact", daemon=True).start()
    try:
        return answer.result(limit_s)
    except TimeoutError:
        raise Failure("no-answer", f"no answer within {limit_s:g} s") from None


@functools.cache
def _has_boto3() -> bool:
    """Return True if boto3 is installed; cached, because every `head` asks and the check is slow."""
    return importlib.util.find_spec("boto3") is not None
