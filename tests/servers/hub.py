"""The few calls of the Hugging Face Hub that its file system makes, over a folder of files."""

from __future__ import annotations

import hashlib
import json
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from tests.servers.serving import Requests, serving

__all__ = ["Hub", "hub"]

_SHA = "5" * 40
"""The commit that main names."""


class Hub:
    """A dataset repository.

    Attributes:
        url: for HF_ENDPOINT. folder: of its files. token: that a request must bear. calls: (method, path) of each.
        fails: paths of files that are answered with 500, and a redirect that holds a signature.
    """

    def __init__(self, url: str, name: str, folder: Path, token: str) -> None:
        self.url, self.name, self.folder, self.token = url, name, folder, token
        self.calls: list[tuple[str, str]] = []
        self.fails: set[str] = set()

    def entry(self, path: Path) -> dict[str, Any]:
        """What the hub says of a file or folder."""
        name = path.relative_to(self.folder).as_posix()
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
        data = path.read_bytes()
        return {
            "type": "file",
            "path": name,
            "oid": hashlib.sha1(data, usedforsecurity=False).hexdigest(),
            "size": len(data),
        }

    def answer(self, path: str, form: dict[str, list[str]]) -> object | None:
        """What an API call gives; None: not found."""
        api = f"/api/datasets/{self.name}"
        head, _, inside = path.removeprefix(f"{api}/").partition("/")
        revision, _, folder = inside.partition("/")
        if path == api or (head == "revision" and inside in ("main", _SHA)):
            return {"id": self.name, "sha": _SHA, "private": True, "tags": [], "siblings": []}
        if not path.startswith(f"{api}/") or revision not in ("main", _SHA):
            return None
        if head == "tree":
            here = self.folder / folder
            return [self.entry(one) for one in sorted(here.rglob("*"))] if here.is_dir() else None
        if head == "paths-info":
            return [self.entry(self.folder / one) for one in form["paths"] if (self.folder / one).exists()]
        return None


class _Handler(Requests):
    hub: ClassVar[Hub]

    def send(self, code: int, body: bytes, **headers: str) -> None:
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        self.reply(code, {**named, "Content-Length": str(len(body))}, body)

    def respond(self) -> None:
        hub = self.hub
        path = urllib.parse.unquote(self.path.partition("?")[0])
        form = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        hub.calls.append((self.command, path))
        revision = path.removeprefix(f"/datasets/{hub.name}/resolve/").partition("/")[0]
        files = f"/datasets/{hub.name}/resolve/{_SHA if revision == _SHA else 'main'}/"
        is_private = path.startswith((f"/api/datasets/{hub.name}", files))
        found: object = None
        if is_private and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.send(401, b"{}", X_Error_Message="Invalid credentials")
        elif path.startswith(files):
            self.file(hub, path.removeprefix(files))
        elif (found := hub.answer(path, urllib.parse.parse_qs(form))) is not None:
            self.send(200, json.dumps(found).encode(), Content_Type="application/json")
        else:
            self.send(404, b"{}", X_Error_Code="RepoNotFound")

    def file(self, hub: Hub, inside: str) -> None:
        if inside in hub.fails:
            signed = f"{self.path}?X-Amz-Signature=secretsignature"
            return self.send(403, b"denied") if "?" in self.path else self.send(302, b"", Location=signed)
        data = (hub.folder / inside).read_bytes()
        asked = self.headers.get("Range")
        if asked is None:
            return self.send(200, data, ETag='"x"')
        start, _, end = asked.removeprefix("bytes=").partition("-")
        part = data[int(start) : int(end or len(data)) + 1]
        return self.send(206, part, Content_Range=f"bytes {start}-{end}/{len(data)}", ETag='"x"')


@contextmanager
def hub(name: str, folder: Path, token: str) -> Iterator[Hub]:
    """Serve a folder as the dataset repository `name` (``user/dataset``) on 127.0.0.1."""

    class Handler(_Handler):
        hub = Hub("", name, folder, token)

    with serving(Handler) as Handler.hub.url:
        yield Handler.hub
