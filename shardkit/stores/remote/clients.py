"""Clients of remote stores: obstore or boto3 for object stores, fsspec for other URLs.

obstore runs its own threads, which a forked child lacks: it hangs in the child of a process that used it. So clients
belong to a process id, and such a child uses boto3, which costs more processor time per request. Retries inside the
clients are switched off: `object_store` alone decides what to repeat and what a lost answer means.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import importlib.util
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import urlsplit

from shardkit.arrays import Buffer
from shardkit.credentials import hide_credentials
from shardkit.errors import MissingDependency, StoreError, StoreFullError, StoreReadOnlyError, UsageError
from shardkit.extras import install_command
from shardkit.stores.file_operations import store_error
from shardkit.stores.remote.addresses import OBJECT_SCHEMES, Address
from shardkit.stores.remote.failures import Failure, classified
from shardkit.stores.waiting import RetryPolicy

WRITE_ID: Final = "shardkitwrite"
"""Metadata key of the id of the call that created an object. Letters only, because Azure allows only letters, digits
and _, and some proxies drop headers with _."""


class ObjectProperties(NamedTuple):
    """Properties of an object, from a listing or a request."""

    name: str
    size: int
    write_id: str | None = None
    etag: str = ""
    """Changes whenever the object changes; empty if the store has none."""
    sha256: str | None = None
    """Hex digest that the store keeps of the whole object; None if it keeps none or the client cannot read it."""


class Client(Protocol):
    """Makes one attempt per request and raises `Failure`."""

    def get(self, name: str, max_bytes: int) -> tuple[int, Buffer]:
        """Return (size, bytes); the bytes are empty and not read if size > max_bytes."""

    def get_range(self, name: str, offset: int, length: int) -> Buffer:
        """Return `length` bytes from `offset`, fewer at the end."""

    def put(self, name: str, data: Buffer, *, write_id: str | None) -> None:
        """Write an object: overwrite it, or, if `write_id` is given, fail if it exists."""

    def stat(self, name: str) -> ObjectProperties:
        """Return the properties of an object without reading it."""

    def list(self, prefix: str, after: str) -> Iterator[ObjectProperties]:
        """Yield objects below the folder `prefix` after the name `after`, in byte order of names."""

    def delete(self, name: str) -> None:
        """Remove an object; no error if it is absent."""


# obstore renews five minutes before expiry, so about once a minute
_TOKEN_LIFE: Final = timedelta(minutes=6)
# the first process id in which obstore was used, inherited by forked children
_obstore_process: int | None = None


_substitute: Callable[[Address], Client] | None = None


@contextlib.contextmanager
def substituted(opener: Callable[[Address], Client]) -> Iterator[None]:
    """Make object stores of this process without a client yet use the clients of `opener`; for simulations."""
    global _substitute
    before, _substitute = _substitute, opener
    try:
        yield
    finally:
        _substitute = before


def open_client(address: Address, retry: RetryPolicy, *, checksums: bool = False) -> Client:
    """Return a client for this process.

    Args:
        address: root of the store.
        retry: source of the timeout of one attempt.
        checksums: prefer the client that can read stored checksums (boto3).

    Raises:
        MissingDependency: obstore or fsspec is not installed.
        StoreError: the process is a fork of one that used obstore, and boto3 cannot be used.
        UsageError: an environment variable holds an endpoint that is no URL.
    """
    global _obstore_process
    if _substitute is not None:
        return _substitute(address)
    _check_endpoint(address.scheme)
    package = "obstore" if address.scheme in OBJECT_SCHEMES.values() else "fsspec"
    if importlib.util.find_spec(package) is None:
        raise MissingDependency(f"{address.scheme}:// needs {package}; run: {install_command('s3')}")
    if package == "fsspec":
        return FsspecClient(address)
    forked = _obstore_process not in (None, os.getpid())
    if (forked or checksums) and address.scheme == "s3" and importlib.util.find_spec("boto3") is not None:
        return Boto3Client(address, retry)
    if forked:
        raise StoreError(
            f"{address.url} was used before this process was forked, and its client does not work in the child; start "
            'processes with "spawn" or "forkserver", or install boto3 for s3://'
        )
    _obstore_process = os.getpid()
    return ObstoreClient(address, retry)


class ObstoreClient:
    """S3, Google Cloud Storage and Azure through obstore."""

    def __init__(self, address: Address, retry: RetryPolicy) -> None:
        self._api = importlib.import_module("obstore")
        stores = importlib.import_module("obstore.store")
        options: dict[str, Any] = {
            "client_options": {
                "timeout": timedelta(seconds=10 * retry.attempt_s),
                "connect_timeout": timedelta(seconds=min(10.0, retry.attempt_s)),
                "read_timeout": timedelta(seconds=retry.attempt_s),
                "allow_http": True,
                "pool_idle_timeout": timedelta(seconds=20),
            },
            "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=retry.attempt_s)},
        }
        if address.path:
            options["prefix"] = address.path
        try:
            if address.scheme == "s3":
                options |= {"checksum_algorithm": "SHA256", **s3_options()}
                self._store = stores.S3Store(address.host, **options)
            elif address.scheme == "gs":
                self._store = stores.GCSStore(address.host, **google_options(), **options)
            else:
                self._store = stores.AzureStore(address.host, **options)
        except self._api.exceptions.BaseError:  # its text may quote credentials
            raise Failure(
                "refused", "what the environment says of its endpoint or credentials is unusable"
            ) from None

    @classified()
    def get(self, name: str, max_bytes: int) -> tuple[int, Buffer]:
        found = self._api.get(self._store, name)
        size = int(found.meta["size"])
        return size, found.buffer() if size <= max_bytes else b""

    @classified()
    def get_range(self, name: str, offset: int, length: int) -> Buffer:
        return self._api.get_range(self._store, name, start=offset, length=length)

    @classified()
    def put(self, name: str, data: Buffer, *, write_id: str | None) -> None:
        settings: dict[str, Any] = {"use_multipart": False}
        if write_id is not None:
            settings |= {"mode": "create", "attributes": {WRITE_ID: write_id}}
        self._api.put(self._store, name, data, **settings)

    @classified()
    def stat(self, name: str) -> ObjectProperties:
        found = self._api.get(self._store, name, options={"head": True})
        write_id = dict(found.attributes).get(WRITE_ID)
        return ObjectProperties(name, int(found.meta["size"]), write_id, found.meta["e_tag"] or "")

    def list(self, prefix: str, after: str) -> Iterator[ObjectProperties]:
        with classified():
            chunks = self._api.list(self._store, prefix or None, offset=after or None, chunk_size=1000)
            for chunk in chunks:
                for meta in chunk:
                    yield ObjectProperties(meta["path"], int(meta["size"]), etag=meta["e_tag"] or "")

    def delete(self, name: str) -> None:
        try:
            with classified():
                self._api.delete(self._store, name)
        except Failure as failure:
            if failure.kind != "absent":
                raise


_ENDPOINTS: Final = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "gs": ("STORAGE_EMULATOR_HOST",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""Kind of object store → environment variables that set an endpoint other than the public one."""


def endpoint_of(scheme: str) -> str:
    """Return `` at ENDPOINT (VARIABLE)`` for messages; empty for the public endpoint."""
    for name in _ENDPOINTS.get(scheme, ()):
        if os.environ.get(name):
            return f" at {hide_credentials(os.environ[name])} ({name})"
    return ""


def _check_endpoint(scheme: str) -> None:
    """Refuse an endpoint that is no URL, because obstore ends the process on some of them."""
    for name in _ENDPOINTS.get(scheme, ()):
        text = os.environ.get(name, "")
        url = text if "://" in text or scheme != "gs" else f"http://{text}"
        if text and not _is_endpoint(url):
            raise UsageError(
                f"{name}={hide_credentials(text)!r} is no address of an object store; set it to a URL such as "
                "http://127.0.0.1:9000"
            )


def _is_endpoint(url: str) -> bool:
    try:
        parts = urlsplit(url)
        has_port = parts.port is None or parts.port > 0  # an impossible port raises
    except ValueError:
        return False
    is_plain = url.isascii() and url.isprintable() and " " not in url
    return is_plain and has_port and parts.scheme in ("http", "https") and bool(parts.hostname)


def s3_options() -> dict[str, Any]:
    """Return obstore's options for S3: endpoint, region and credentials from the usual AWS environment."""
    found = os.environ
    options: dict[str, Any] = {}
    endpoint = found.get("AWS_ENDPOINT_URL_S3") or found.get("AWS_ENDPOINT_URL")
    if endpoint:
        options |= {"endpoint": endpoint, "virtual_hosted_style_request": False}
    region = found.get("AWS_REGION") or found.get("AWS_DEFAULT_REGION")
    if importlib.util.find_spec("boto3") is not None:
        session, has_credentials = _open_session()
        region = region or session.region_name
        if not has_credentials:
            options["skip_signature"] = True  # a public bucket
        else:
            # boto3 finds profiles, roles and single sign-on, and renews expiring credentials
            providers = importlib.import_module("obstore.auth.boto3")
            options["credential_provider"] = providers.Boto3CredentialProvider(session, ttl=_TOKEN_LIFE)
    return options | {"region": region or "us-east-1"}


@classified()
def _open_session() -> tuple[Any, bool]:
    """Return boto3's session for the environment, and False if there are no credentials, as for a public bucket."""
    import boto3

    session = boto3.Session()
    return session, session.get_credentials() is not None


def google_options(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return obstore's options for an emulator of Google Cloud Storage; obstore reads other settings by itself.

    ``STORAGE_EMULATOR_HOST`` is the emulator's address, with or without a scheme, as for Google's own clients. The only
    credential sent to it is the token in ``GOOGLE_BEARER_TOKEN``, or a made-up one.
    """
    found = os.environ if environment is None else environment
    endpoint = found.get("STORAGE_EMULATOR_HOST")
    if not endpoint:
        return {}
    if "://" not in endpoint:
        endpoint = f"http://{endpoint}"
    return {"base_url": endpoint.rstrip("/"), "bearer_token": found.get("GOOGLE_BEARER_TOKEN") or "emulator"}


class Boto3Client:
    """S3 through boto3."""

    def __init__(self, address: Address, retry: RetryPolicy) -> None:
        from botocore import UNSIGNED
        from botocore.config import Config

        session, has_credentials = _open_session()
        settings: dict[str, Any] = {
            "retries": {"total_max_attempts": 1},
            "connect_timeout": min(10.0, retry.attempt_s),
            "read_timeout": retry.attempt_s,
            "max_pool_connections": 64,
        }
        if os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
            settings["s3"] = {"addressing_style": "path"}
        if not has_credentials:
            settings["signature_version"] = UNSIGNED
        region = session.region_name or os.environ.get("AWS_REGION") or "us-east-1"
        self._s3: Any = session.client("s3", region_name=region, config=Config(**settings))
        self._bucket = address.host
        self._prefix = f"{address.path}/" if address.path else ""

    @classified()
    def get(self, name: str, max_bytes: int) -> tuple[int, Buffer]:
        found = self._s3.get_object(**self._key(name))
        with contextlib.closing(found["Body"]) as body:
            size = int(found["ContentLength"])
            return size, body.read() if size <= max_bytes else b""

    @classified()
    def get_range(self, name: str, offset: int, length: int) -> Buffer:
        found = self._s3.get_object(**self._key(name), Range=f"bytes={offset}-{offset + length - 1}")
        with contextlib.closing(found["Body"]) as body:
            return body.read(length)

    @classified()
    def put(self, name: str, data: Buffer, *, write_id: str | None) -> None:
        settings: dict[str, Any] = {"Body": bytes(data), "ChecksumAlgorithm": "SHA256"}
        if write_id is not None:
            settings |= {"IfNoneMatch": "*", "Metadata": {WRITE_ID: write_id}}
        self._s3.put_object(**self._key(name), **settings)

    @classified()
    def stat(self, name: str) -> ObjectProperties:
        found = self._s3.head_object(**self._key(name), ChecksumMode="ENABLED")
        text = str(found.get("ChecksumSHA256") or "")
        whole = found.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT" and len(text) == 44
        return ObjectProperties(
            name,
            int(found["ContentLength"]),
            found["Metadata"].get(WRITE_ID),
            found.get("ETag", ""),
            base64.b64decode(text).hex() if whole else None,
        )

    def list(self, prefix: str, after: str) -> Iterator[ObjectProperties]:
        with classified():
            pages = self._s3.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket,
                Prefix=self._prefix + prefix,
                **({"StartAfter": self._prefix + after} if after else {}),
            )
            for page in pages:
                for found in page.get("Contents", ()):
                    name = found["Key"].removeprefix(self._prefix)
                    yield ObjectProperties(name, int(found["Size"]), etag=found.get("ETag", ""))

    @classified()
    def delete(self, name: str) -> None:
        self._s3.delete_object(**self._key(name))

    def _key(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}


_TEMPORARIES: Final = "tmp"
_ETAGS: Final = ("ETag", "etag", "md5Hash", "content_md5")
"""Keys under which file systems report a value that changes with the bytes; times are not reliable."""


class FsspecClient:
    """Any file system that fsspec supports, for one writer at a time.

    fsspec has no atomic put-if-absent: most of its file systems check for the name and then write.
    """

    def __init__(self, address: Address) -> None:
        fsspec = importlib.import_module("fsspec")
        with _as_failure():
            try:
                system, root = fsspec.core.url_to_fs(
                    address.url, skip_instance_cache=True, use_listings_cache=False
                )
            except FileNotFoundError:  # of this machine, such as a key
                raise Failure("refused", "a file that the configuration names cannot be read") from None
            except TypeError:  # some file systems, such as sftp, pass unknown options to their client
                system, root = fsspec.core.url_to_fs(address.url, skip_instance_cache=True)
            except ValueError:
                raise StoreError(
                    f"cannot open the root in {address.url}: fsspec knows no such URL; expected a path, s3://, gs://, "
                    "az:// or a scheme of fsspec's list"
                ) from None
        self._system, self._root = system, root.rstrip("/")

    def get(self, name: str, max_bytes: int) -> tuple[int, Buffer]:
        size = self.stat(name).size
        return size, self.get_range(name, 0, size) if 0 < size <= max_bytes else b""

    def get_range(self, name: str, offset: int, length: int) -> Buffer:
        with _as_failure():
            data: Buffer = self._system.cat_file(self._path(name), start=offset, end=offset + length)
        if len(data) > length:  # a plain HTTP server; `ObjectStore` refuses fewer bytes
            raise Failure("refused", "the server sends whole files where a range is asked for; download them")
        return data

    def put(self, name: str, data: Buffer, *, write_id: str | None) -> None:
        """Write under a temporary name, then move, so that no reader sees an incomplete object."""
        assert write_id is None, "fsspec has no put-if-absent"
        temporary, final = self._path(f"{_TEMPORARIES}/{uuid.uuid4().hex}"), self._path(name)
        with _as_failure(writing=name):
            for path in (final, temporary):
                self._system.makedirs(os.path.dirname(path), exist_ok=True)
            try:
                self._system.pipe_file(temporary, bytes(data))
                self._system.mv(temporary, final)
            except BaseException:
                with contextlib.suppress(Exception):
                    self._system.rm_file(temporary)
                raise

    def stat(self, name: str) -> ObjectProperties:
        with _as_failure():
            info = self._system.info(self._path(name))
        if info.get("type") != "file" or info.get("size") is None:
            raise Failure("absent", "no file")
        return ObjectProperties(
            name, int(info["size"]), etag=next((str(info[key]) for key in _ETAGS if info.get(key)), "")
        )

    def list(self, prefix: str, after: str) -> Iterator[ObjectProperties]:
        with _as_failure():
            self._system.invalidate_cache()
            try:
                found = self._system.find(self._path(prefix).rstrip("/"), detail=True)
            except FileNotFoundError:
                return
            sizes = {self._name(path): int(info.get("size") or 0) for path, info in found.items()}
        yield from (ObjectProperties(name, sizes[name]) for name in sorted(sizes) if name > after)

    def delete(self, name: str) -> None:
        with _as_failure(writing=name), contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _name(self, path: str) -> str:
        return str(self._system._strip_protocol(path)).removeprefix(self._root).lstrip("/")  # noqa: SLF001


@contextlib.contextmanager
def _as_failure(writing: str = "") -> Iterator[None]:
    """Turn exceptions of a file system into `Failure`; errors of full or read-only ones pass and are not retried."""
    try:
        yield
    except (Failure, StoreError):
        raise
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise Failure("absent", "no such file") from None
    except (ImportError, ValueError) as error:
        hint = str(error) if isinstance(error, ImportError) else type(error).__name__
        raise Failure("refused", f"{hint}; see fsspec's list of URLs") from None
    except OSError as error:
        told = store_error(error, f"write {writing}", writing=bool(writing)) if error.errno else None
        if isinstance(told, (StoreFullError, StoreReadOnlyError)):
            raise told from None
        raise Failure("denied" if isinstance(error, PermissionError) else "no-answer", "no answer") from None
    except Exception as error:  # noqa: BLE001 (whatever the file system raises)
        raise Failure("refused", type(error).__name__) from None
