"""Serve a folder as a bucket by the reading requests of S3, with every answer a given time late.

    python slow_bucket.py FOLDER LATENCY_S      prints its port; the bucket is FOLDER's name

Bodies are sent by sendfile, so that the server needs little processor time next to the readers that are measured.
Requests are not authenticated; the server listens on 127.0.0.1 only.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

__all__ = ["slow_bucket"]

_REASONS = {
    200: "OK",
    206: "Partial Content",
    404: "Not Found",
    405: "Method Not Allowed",
    416: "Range Not Satisfiable",
}


class _Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes = b""
    file: Path | None = None  # sent from ``start``, ``length`` bytes, instead of the body
    start: int = 0
    length: int = 0


@contextlib.contextmanager
def slow_bucket(folder: Path, latency_s: float) -> Iterator[str]:
    """Serve ``folder`` in a process of its own; yield the endpoint."""
    command = [sys.executable, str(Path(__file__).resolve()), str(folder), str(latency_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def _answer(folder: Path, method: str, target: str, headers: dict[str, str]) -> _Answer:
    parts = urlsplit(target)
    bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
    query = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
    if method not in ("GET", "HEAD"):
        return _Answer(405, {}, _error("MethodNotAllowed"))
    if bucket != folder.name:
        return _Answer(404, {}, _error("NoSuchBucket"))
    if not key:
        return _Answer(200, {"content-type": "application/xml"}, _listing(folder, query))
    path = (folder / key).resolve()
    if not path.is_relative_to(folder) or not path.is_file():
        return _Answer(404, {}, _error("NoSuchKey"))
    stat = path.stat()
    found = {
        "etag": _etag(stat.st_mtime_ns, stat.st_size),
        "last-modified": email.utils.formatdate(stat.st_mtime, usegmt=True),
        "accept-ranges": "bytes",
        "content-type": "application/octet-stream",
    }
    bounds = re.fullmatch(r"bytes=(\d*)-(\d*)", headers.get("range", ""))
    if not bounds:
        return _Answer(200, found, file=path, length=stat.st_size)
    first, last = bounds.groups()
    start = int(first) if first else max(0, stat.st_size - int(last))
    end = min(int(last) + 1, stat.st_size) if first and last else stat.st_size
    if start >= end:
        return _Answer(416, {"content-range": f"bytes */{stat.st_size}"}, _error("InvalidRange"))
    found["content-range"] = f"bytes {start}-{end - 1}/{stat.st_size}"
    return _Answer(206, found, file=path, start=start, length=end - start)


def _etag(mtime_ns: int, size: int) -> str:
    return f'"{mtime_ns:x}{size:x}"'


def _error(code: str) -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


def _listing(folder: Path, query: dict[str, str]) -> bytes:
    """Return the keys of a prefix, all in one page."""
    if "location" in query:
        return b"<?xml version='1.0'?><LocationConstraint/>"
    prefix, delimiter, after = (query.get(name, "") for name in ("prefix", "delimiter", "start-after"))
    rows: list[str] = []
    folders: dict[str, None] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        key = path.relative_to(folder).as_posix()
        if not key.startswith(prefix) or key <= after:
            continue
        head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
        if found:
            folders[prefix + head + delimiter] = None
            continue
        stat = path.stat()
        rows.append(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{escape(_etag(stat.st_mtime_ns, stat.st_size))}</ETag><Size>{stat.st_size}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
        )
    common = "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in folders)
    return (
        "<?xml version='1.0'?><ListBucketResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'>"
        f"<Name>{escape(folder.name)}</Name><Prefix>{escape(prefix)}</Prefix><MaxKeys>1000000</MaxKeys>"
        f"<KeyCount>{len(rows) + len(folders)}</KeyCount><IsTruncated>false</IsTruncated>{''.join(rows)}{common}"
        "</ListBucketResult>"
    ).encode()


async def _serve(folder: Path, latency_s: float) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, target, _ = lines[0].split(" ")
                headers = {
                    name.strip().lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in lines[1:])
                }
                await reader.readexactly(int(headers.get("content-length", 0)))
                await asyncio.sleep(latency_s)
                await _send(writer, method, _answer(folder, method, target, headers))
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def _send(writer: asyncio.StreamWriter, method: str, answer: _Answer) -> None:
    length = answer.length if answer.file is not None else len(answer.body)
    headers = {**answer.headers, "content-length": str(length)}
    lines = [f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    if method != "HEAD" and answer.file is None:
        writer.write(answer.body)
    await writer.drain()
    if method != "HEAD" and answer.file is not None and length:
        with answer.file.open("rb") as file:
            await asyncio.get_running_loop().sendfile(writer.transport, file, answer.start, length)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]).resolve(), float(sys.argv[2])))
