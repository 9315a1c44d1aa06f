"""The clients below an object store: obstore where it can be used, boto3 where it cannot.

obstore runs on threads of its own that a forked child does not have: using it in the child of a process that used it
hangs. So clients belong to a process id, and a child of such a process is given boto3, which costs more processor
time per request and is otherwise the same. Both are told not to try again by themselves: who repeats what, and what a
lost answer means, is decided in one place (`object_store`).
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Final, NamedTuple, Protocol

from shardkit.errors import MissingDependency, StoreError
from shardkit.stores.remote.addresses import Address
from shardkit.stores.remote.failures import Failure, classified
from shardkit.stores.waiting import RetryPolicy

Buffer = Any
"""Bytes, or whatever has them behind the buffer protocol."""

WRITE_ID: Final = "shardkitwrite"
"""Metadata key under which a put notes which call made the object; Azure takes letters, digits and _ only, and some
proxies drop headers with _."""


class Found(NamedTuple):
    """An object as a listing or a request shows it."""

    name: str
    size: int
    write_id: str | None = None
    etag: str = ""
    """Changes when the object does; empty where the store has none."""
    sha256: str | None = None
    """Hex digest that the store keeps of the whole object, None where it keeps none or the client cannot ask."""


class Client(Protocol):
    """One attempt of each request; raises `Failure`."""

    def get(self, name: str, max_bytes: int) -> tuple[int, Buffer]:
        """(size, bytes); the bytes are empty and unread where size > max_bytes."""

    def get_range(self, name: str, offset: int, length: int) -> Buffer:
        """At most `length` bytes from `offset`, fewer at the end."""

    def put(self, name: str, data: Buffer, *, write_id: str | None) -> None:
        """Put over whatever is there; if `write_id` is given, only where nothing is there."""

    def stat(self, name: str) -> Found:
        """Everything that the client can learn of an object without reading it."""

    def list(self, prefix: str, after: str) -> Iterator[Found]:
        """Objects below the folder `prefix` after the name `after`, in byte order of names."""

    def delete(self, name: str) -> None:
        """Remove; absent is fine."""


# obstore asks again five minutes before the end: about once a minute
_TOKEN_LIFE: Final = timedelta(minutes=6)
# the first process id in which obstore was used, inherited by forked children
_obstore_process: int | None = None


_substitute: Callable[[Address], Client] | None = None


@contextlib.contextmanager
def substituted(opener: Callable[[Address], Client]) -> Iterator[None]:
    """Let object stores of this process that have no client yet take `opener`'s: for simulations."""
    global _substitute
    before, _substitute = _substitute, opener
    try:
        yield
    finally:
        _substitute = before


def open_client(address: Address, retry: RetryPolicy, *, checksums: bool = False) -> Client:
    """A client for this process.

    Args:
        address: of the root.
        retry: how long a request may take.
        checksums: one that reads the checksums that S3 stores, which obstore cannot.

    Raises:
        MissingDependency: The packages are not installed.
        StoreError: The process was forked after obstore was used, and the store is not S3.
    """
    global _obstore_process
    if _substitute is not None:
        return _substitute(address)
    if importlib.util.find_spec("obstore") is None:
        raise MissingDependency(f"{address.scheme}:// needs obstore; run: pip install 'shardkit[s3]'")
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
        except self._api.exceptions.BaseError:  # its text may quote what it was given
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
    def stat(self, name: str) -> Found:
        found = self._api.get(self._store, name, options={"head": True})
        write_id = dict(found.attributes).get(WRITE_ID)
        return Found(name, int(found.meta["size"]), write_id, found.meta["e_tag"] or "")

    def list(self, prefix: str, after: str) -> Iterator[Found]:
        with classified():
            chunks = self._api.list(self._store, prefix or None, offset=after or None, chunk_size=1000)
            for chunk in chunks:
                for meta in chunk:
                    yield Found(meta["path"], int(meta["size"]), etag=meta["e_tag"] or "")

    def delete(self, name: str) -> None:
        try:
            with classified():
                self._api.delete(self._store, name)
        except Failure as failure:
            if failure.kind != "absent":
                raise


def s3_options() -> dict[str, Any]:
    """Endpoint, region and credentials from the usual AWS environment, for obstore."""
    found = os.environ
    options: dict[str, Any] = {}
    endpoint = found.get("AWS_ENDPOINT_URL_S3") or found.get("AWS_ENDPOINT_URL")
    if endpoint:
        options |= {"endpoint": endpoint, "virtual_hosted_style_request": False}
    region = found.get("AWS_REGION") or found.get("AWS_DEFAULT_REGION")
    if importlib.util.find_spec("boto3") is not None:
        import boto3

        session = boto3.Session()
        region = region or session.region_name
        if session.get_credentials() is None:
            options["skip_signature"] = True  # a public bucket
        else:
            # profiles, roles and single sign-on as boto3 finds them; it renews those that expire
            providers = importlib.import_module("obstore.auth.boto3")
            options["credential_provider"] = providers.Boto3CredentialProvider(session, ttl=_TOKEN_LIFE)
    return options | {"region": region or "us-east-1"}


def google_options(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Where Google's storage is, if not at Google, for obstore, which finds all else in the environment by itself.

    ``STORAGE_EMULATOR_HOST`` is what Google's own clients call an emulator's address, with or without a scheme. Nobody
    signs in there: without a token in ``GOOGLE_BEARER_TOKEN`` a made-up one is sent, and no other credential at all.
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
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config

        session = boto3.Session()
        settings: dict[str, Any] = {
            "retries": {"total_max_attempts": 1},
            "connect_timeout": min(10.0, retry.attempt_s),
            "read_timeout": retry.attempt_s,
            "max_pool_connections": 64,
        }
        if os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
            settings["s3"] = {"addressing_style": "path"}
        if session.get_credentials() is None:
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
    def stat(self, name: str) -> Found:
        found = self._s3.head_object(**self._key(name), ChecksumMode="ENABLED")
        text = str(found.get("ChecksumSHA256") or "")
        whole = found.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT" and len(text) == 44
        return Found(
            name,
            int(found["ContentLength"]),
            found["Metadata"].get(WRITE_ID),
            found.get("ETag", ""),
            base64.b64decode(text).hex() if whole else None,
        )

    def list(self, prefix: str, after: str) -> Iterator[Found]:
        with classified():
            pages = self._s3.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket,
                Prefix=self._prefix + prefix,
                **({"StartAfter": self._prefix + after} if after else {}),
            )
            for page in pages:
                for found in page.get("Contents", ()):
                    name = found["Key"].removeprefix(self._prefix)
                    yield Found(name, int(found["Size"]), etag=found.get("ETag", ""))

    @classified()
    def delete(self, name: str) -> None:
        self._s3.delete_object(**self._key(name))

    def _key(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}
