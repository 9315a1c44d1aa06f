"""A strict server of what obstore asks of Google Cloud Storage's XML API, in this process, over objects in memory.

No emulator that can be had speaks these requests: fake-gcs-server takes no plain PUT and ignores where a listing shall
begin, others know the JSON requests alone. This one was written from Google's documentation, not from a client, and
refuses whatever it does not know, so that nothing passes by being overlooked. Under
https://cloud.google.com/storage/docs/ these pages say what it keeps:

* xml-api/put-object, xml-api/put-object-upload: one PUT per object; ``Content-MD5`` and ``x-goog-hash`` (MD5) are
  compared with the body; ``x-goog-meta-*``.
* request-preconditions: ``x-goog-if-generation-match``, 0 for "is not there"; 412 ``PreconditionFailed``. The condition
  and the change are one step (consistency), and a body that does not come whole changes nothing.
* xml-api/get-object-download, xml-api/head-object, xml-api/delete-object: ``Range``, 206, 416 ``InvalidRange``; 204.
* xml-api/get-bucket-list: ``list-type=2`` in byte order of names, pages, ``start-after``, ``continuation-token``.
* xml-api/reference-headers, xml-api/reference-status: the other headers, and codes of errors.
* objects: names. quotas: one change per second of an object under one name, else 429 (`GoogleServer.change_every_s`).

What the real service has beyond that is not here: CRC32C of objects, versions and holds, storage classes, encryption
keys, multipart and resumable uploads, compositions, the exchange of keys for tokens, gRPC and HTTP/2.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import functools
import hashlib
import itertools
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, unquote
from xml.sax.saxutils import escape

from tests.servers.serving import Requests, serving

__all__ = ["TOKEN", "GoogleServer", "google_environment", "google_server"]

TOKEN: Final = "ya29.canary-token-canary-token-0001"
"""The only bearer token that the server takes."""

_MOST_KEYS: Final = 1000
_COMMON: Final = frozenset(
    {"host", "user-agent", "accept", "accept-encoding", "authorization", "connection", "date"}
)
_HEADERS: Final = {
    "PUT": frozenset(
        {"content-length", "content-type", "content-md5", "x-goog-hash", "x-goog-if-generation-match"}
    ),
    "GET": frozenset({"range", "content-length", "if-match", "if-none-match", "x-goog-if-generation-match"}),
    "HEAD": frozenset({"content-length", "if-match", "if-none-match", "x-goog-if-generation-match"}),
    "DELETE": frozenset({"content-length", "content-type", "x-goog-if-generation-match"}),
}
_METADATA: Final = re.compile(r"x-goog-meta-[a-z0-9-]+")
_RANGE: Final = re.compile(r"bytes=(\d*)-(\d*)")
_LIST: Final = frozenset(
    {"list-type", "prefix", "delimiter", "start-after", "continuation-token", "max-keys"}
)


@dataclass(frozen=True)
class _Object:
    """One generation of an object."""

    data: bytes
    generation: int
    content_type: str
    metadata: Mapping[str, str]
    modified: float

    @functools.cached_property  # each answer has it
    def md5(self) -> bytes:
        return hashlib.md5(self.data, usedforsecurity=False).digest()

    @property
    def etag(self) -> str:
        """Of an object that came by one PUT: its MD5."""
        return f'"{self.md5.hex()}"'


class _Request(NamedTuple):
    method: str
    bucket: str
    name: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


class _Answer(NamedTuple):
    status: int
    headers: Mapping[str, str] = {}
    body: bytes = b""


class _RefusedError(Exception):
    """Ends a request with an error document."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(status, code, message)
        self.status, self.code, self.message = status, code, message


class GoogleServer:
    """The objects, and what was asked. Made by `google_server`.

    Attributes:
        endpoint: ``http://127.0.0.1:PORT``.
        counts: requests answered, by (method, status); listings have the method "LIST".
        body_bytes: of objects, given out.
        refused: what was asked that the server does not know; empty if the client is understood.
        page_size: most names of one listing.
        change_every_s: seconds between two changes under one name, sooner is 429 ``SlowDown``; Google asks for 1.
        token: the bearer token that is taken.
    """

    def __init__(self, *buckets: str) -> None:
        self.endpoint = ""
        self.counts: Counter[tuple[str, int]] = Counter()
        self.body_bytes = 0
        self.refused: list[str] = []
        self.page_size = _MOST_KEYS
        self.change_every_s = 0.0
        self.token = TOKEN
        self._buckets: dict[str, dict[str, _Object]] = {bucket: {} for bucket in buckets}
        self._changed: dict[tuple[str, str], float] = {}
        self._generations = itertools.count(1_700_000_000_000_001)
        self._lock = threading.Lock()

    def answer(self, request: _Request) -> _Answer:
        """Carry out one request."""
        try:
            found = self._answer(request)
        except _RefusedError as error:
            if error.status in (400, 405, 501):
                self.refused.append(f"{request.method} {error.code}: {error.message}")
            text = (
                "<?xml version='1.0' encoding='UTF-8'?>"
                f"<Error><Code>{error.code}</Code><Message>{escape(error.message)}</Message></Error>"
            )
            found = _Answer(error.status, {"Content-Type": "application/xml; charset=UTF-8"}, text.encode())
        method = "LIST" if request.method == "GET" and not request.name else request.method
        with self._lock:
            self.counts[method, found.status] += 1
            self.body_bytes += len(found.body) if method == "GET" else 0
        return found

    def _answer(self, request: _Request) -> _Answer:
        if request.headers.get("authorization") != f"Bearer {self.token}":
            raise _RefusedError(401, "AuthenticationRequired", "Authentication required.")
        known = _HEADERS.get(request.method)
        if known is None:
            raise _RefusedError(405, "MethodNotAllowed", f"{request.method} is not known here")
        for name in request.headers:
            if name not in _COMMON | known and not (request.method == "PUT" and _METADATA.fullmatch(name)):
                raise _RefusedError(400, "InvalidArgument", f"header {name} is not known here")
        if request.bucket not in self._buckets:
            raise _RefusedError(404, "NoSuchBucket", "The specified bucket does not exist.")
        if not request.name:
            if request.method != "GET":
                raise _RefusedError(501, "NotImplemented", f"{request.method} of a bucket is not known here")
            return self._list(request)
        if request.query:
            raise _RefusedError(501, "NotImplemented", f"parameters {sorted(request.query)} of an object")
        _check_name(request.name)
        if request.method == "PUT":
            return self._put(request)
        return self._delete(request) if request.method == "DELETE" else self._get(request)

    def _put(self, request: _Request) -> _Answer:
        _check_hashes(request)
        metadata = {name: value for name, value in request.headers.items() if _METADATA.fullmatch(name)}
        content_type = request.headers.get("content-type", "application/octet-stream")
        with self._lock:
            found = self._buckets[request.bucket].get(request.name)
            self._check_pace(request)
            _check_generation(request, found)
            made = _Object(request.body, next(self._generations), content_type, metadata, time.time())
            self._buckets[request.bucket][request.name] = made
            self._changed[request.bucket, request.name] = time.monotonic()
        return _Answer(200, _described(made))

    def _delete(self, request: _Request) -> _Answer:
        with self._lock:
            found = self._buckets[request.bucket].get(request.name)
            if found is None:
                raise _no_key()
            self._check_pace(request)
            _check_generation(request, found)
            del self._buckets[request.bucket][request.name]
            self._changed[request.bucket, request.name] = time.monotonic()
        return _Answer(204)

    def _get(self, request: _Request) -> _Answer:
        with self._lock:
            found = self._buckets[request.bucket].get(request.name)
        if found is None:
            raise _no_key()
        _check_generation(request, found)
        if request.headers.get("if-match", found.etag) not in (found.etag, "*"):
            raise _RefusedError(412, "PreconditionFailed", "At least one of the pre-conditions did not hold.")
        headers = {
            **_described(found),
            "Content-Type": found.content_type,
            "Accept-Ranges": "bytes",
            **found.metadata,
        }
        if request.headers.get("if-none-match") in (found.etag, "*"):
            return _Answer(304, headers)
        wanted = request.headers.get("range")
        if wanted is None:
            return _Answer(200, headers, found.data)
        first, end = _parse_range(wanted, len(found.data))
        headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(found.data)}"
        return _Answer(206, headers, found.data[first:end])

    def _list(self, request: _Request) -> _Answer:
        query = request.query
        if query.get("list-type") != "2" or query.keys() - _LIST:
            raise _RefusedError(501, "NotImplemented", f"listing with {sorted(query)} is not known here")
        if query.get("delimiter"):
            raise _RefusedError(501, "NotImplemented", "listing with a delimiter is not known here")
        most = min(self.page_size, _whole(query.get("max-keys", str(_MOST_KEYS)), "max-keys"))
        prefix, after = query.get("prefix", ""), query.get("start-after", "")
        if "continuation-token" in query:
            after = _decode_token(query["continuation-token"])
        with self._lock:
            objects = dict(self._buckets[request.bucket])
        names = sorted(
            (name for name in objects if name.startswith(prefix) and name > after),
            key=lambda one: one.encode(),
        )
        page, more = names[:most], len(names) > most
        contents = "".join(_listed(name, objects[name]) for name in page)
        token = base64.urlsafe_b64encode(b"after " + page[-1].encode()).decode() if more else ""
        text = (
            "<?xml version='1.0' encoding='UTF-8'?>"
            "<ListBucketResult xmlns='http://doc.s3.amazonaws.com/2006-03-01'>"
            f"<Name>{request.bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>"
            + (f"<NextContinuationToken>{token}</NextContinuationToken>" if more else "")
            + f"{contents}</ListBucketResult>"
        )
        return _Answer(200, {"Content-Type": "application/xml; charset=UTF-8"}, text.encode())

    def _check_pace(self, request: _Request) -> None:
        last = self._changed.get((request.bucket, request.name))
        if last is not None and time.monotonic() - last < self.change_every_s:
            raise _RefusedError(
                429, "SlowDown", "The object exceeded the rate limit for object mutation operations."
            )


def _no_key() -> _RefusedError:
    return _RefusedError(404, "NoSuchKey", "The specified key does not exist.")


def _check_name(name: str) -> None:
    """Google's rules for names of objects."""
    bad = (
        name in (".", "..") or name.startswith(".well-known/acme-challenge/") or "\r" in name or "\n" in name
    )
    if bad or len(name.encode()) > 1024:
        raise _RefusedError(400, "InvalidObjectName", f"object name {name[:80]!r}")


def _check_generation(request: _Request, found: _Object | None) -> None:
    wanted = request.headers.get("x-goog-if-generation-match")
    if wanted is not None and _whole(wanted, "generation") != (found.generation if found else 0):
        raise _RefusedError(412, "PreconditionFailed", "At least one of the pre-conditions did not hold.")


def _check_hashes(request: _Request) -> None:
    declared = [request.headers[name] for name in ("content-md5",) if name in request.headers]
    for one in filter(None, request.headers.get("x-goog-hash", "").split(",")):
        kind, _, value = one.strip().partition("=")
        if kind != "md5":
            raise _RefusedError(501, "NotImplemented", f"x-goog-hash {kind!r}: only md5 is known here")
        declared.append(value)
    actual = base64.b64encode(hashlib.md5(request.body, usedforsecurity=False).digest()).decode()
    if any(one != actual for one in declared):
        raise _RefusedError(400, "BadDigest", "The MD5 that was declared is not that of the body.")


def _parse_range(text: str, size: int) -> tuple[int, int]:
    match = _RANGE.fullmatch(text)
    if match is None or not any(match.groups()):
        raise _RefusedError(400, "InvalidArgument", f"range {text!r}: one range is expected")
    first, last = match.groups()
    begin = max(0, size - int(last)) if not first else int(first)
    end = size if not first or not last else min(size, int(last) + 1)
    if begin >= end:
        raise _RefusedError(416, "InvalidRange", "The requested range cannot be satisfied.")
    return begin, end


def _whole(text: str, what: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise _RefusedError(400, "InvalidArgument", f"{what} {text!r}: a number is expected")
    return int(text)


def _decode_token(text: str) -> str:
    with contextlib.suppress(ValueError):
        head, _, name = base64.urlsafe_b64decode(text).decode().partition(" ")
        if head == "after" and name:
            return name
    raise _RefusedError(400, "InvalidArgument", "continuation-token was not given out here")


def _described(found: _Object) -> dict[str, str]:
    return {
        "ETag": found.etag,
        "Last-Modified": email.utils.formatdate(found.modified, usegmt=True),
        "x-goog-generation": str(found.generation),
        "x-goog-metageneration": "1",
        "x-goog-hash": f"md5={base64.b64encode(found.md5).decode()}",
        "x-goog-stored-content-encoding": "identity",
        "x-goog-stored-content-length": str(len(found.data)),
        "x-goog-storage-class": "STANDARD",
    }


def _listed(name: str, found: _Object) -> str:
    modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.modified))
    return (
        f"<Contents><Key>{escape(name)}</Key><Generation>{found.generation}</Generation>"
        f"<MetaGeneration>1</MetaGeneration><LastModified>{modified}</LastModified>"
        f"<ETag>{escape(found.etag)}</ETag><Size>{len(found.data)}</Size></Contents>"
    )


@contextlib.contextmanager
def google_server(*buckets: str) -> Iterator[GoogleServer]:
    """Serve empty buckets on 127.0.0.1."""
    served = GoogleServer(*buckets)

    class Handler(Requests):
        def respond(self) -> None:
            _handle(self, served)

    with serving(Handler) as served.endpoint:
        yield served


def google_environment(endpoint: str) -> dict[str, str]:
    """The environment of a client of this server: where it is, and a token instead of Google's own sign-in."""
    return {"STORAGE_EMULATOR_HOST": endpoint, "GOOGLE_BEARER_TOKEN": TOKEN, "NO_PROXY": "127.0.0.1"}


def _handle(handler: Requests, served: GoogleServer) -> None:
    """Read one request whole, answer it."""
    path, _, query = handler.path.partition("?")
    bucket, _, name = path.lstrip("/").partition("/")
    headers = {key.lower(): value for key, value in handler.headers.items()}
    length = headers.get("content-length")
    body = b""
    if length is not None and length.isdigit():
        body = handler.rfile.read(int(length))
        if len(body) != int(length):
            handler.close_connection = True
            return  # the body did not come whole: nothing happened
    if (handler.command == "PUT" and length is None) or "transfer-encoding" in headers:
        handler.close_connection = True
        answer = _Answer(411, {}, b"<Error><Code>MissingContentLength</Code></Error>")
    else:
        parameters = dict(parse_qsl(query, keep_blank_values=True))
        answer = served.answer(
            _Request(
                handler.command, unquote(bucket), unquote(name, errors="strict"), parameters, headers, body
            )
        )
    length_of = {} if answer.status in (204, 304) else {"Content-Length": str(len(answer.body))}
    handler.reply(answer.status, {**answer.headers, **length_of}, answer.body)
