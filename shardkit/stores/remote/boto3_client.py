"""S3 through boto3: stored checksums, which obstore cannot read; and all requests of a forked process."""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Iterator
from typing import Any

from shardkit.stores.remote.addresses import Address
from shardkit.stores.remote.backoff import RetryPolicy
from shardkit.stores.remote.client import WRITE_ID, Buffer, Found
from shardkit.stores.remote.failures import classify, told


class Boto3Client:
    """One bucket and prefix; implements `client.Client`."""

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

    def get(self, name: str, max_bytes: int) -> tuple[int, Buffer]:

        def read() -> tuple[int, Buffer]:
            found = self._s3.get_object(**self._key(name))
            with contextlib.closing(found["Body"]) as body:
                size = int(found["ContentLength"])
                return size, body.read() if size <= max_bytes else b""

        return told(read)

    def get_range(self, name: str, offset: int, length: int) -> Buffer:
        """See `Client.get_range`."""

        def read() -> Buffer:
            found = self._s3.get_object(**self._key(name), Range=f"bytes={offset}-{offset + length - 1}")
            with contextlib.closing(found["Body"]) as body:
                return body.read(length)

        return told(read)

    def put(self, name: str, data: Buffer, *, write_id: str | None) -> None:
        settings: dict[str, Any] = {"Body": bytes(data), "ChecksumAlgorithm": "SHA256"}
        if write_id is not None:
            settings |= {"IfNoneMatch": "*", "Metadata": {WRITE_ID: write_id}}
        told(lambda: self._s3.put_object(**self._key(name), **settings))

    def stat(self, name: str) -> Found:

        def look() -> Found:
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

        return told(look)

    def list(self, prefix: str, after: str) -> Iterator[Found]:
        pages = self._s3.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket,
            Prefix=self._prefix + prefix,
            **({"StartAfter": self._prefix + after} if after else {}),
        )
        try:
            for page in pages:
                for found in page.get("Contents", ()):
                    name = found["Key"].removeprefix(self._prefix)
                    yield Found(name, int(found["Size"]), etag=found.get("ETag", ""))
        except Exception as error:  # noqa: BLE001 (whatever the client raises is classified)
            raise classify(error) from None

    def delete(self, name: str) -> None:
        told(lambda: self._s3.delete_object(**self._key(name)))

    def _key(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}
