"""Every command with the least rights that the storage SPEC's table says ("Rights"), and with one of them less.

The server behind the proxy would allow everything: the proxy is the policy. It knows the buckets of the root and of its
copy, and answers 403 AccessDenied to whatever is not allowed there, as S3 does.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends

import shardkit
from shardkit.copies.collecting import collect
from shardkit.repository.repository import Repository
from shardkit.stores.local import open_store
from tests.command_line import call
from tests.servers.fault_proxy import Fault, FaultProxy, Request

ROOT, COPY = "the-root", "the-copy"
BUCKETS = (ROOT, COPY)
READ = frozenset({"s3:GetObject", "s3:ListBucket"})
PUT = frozenset({"s3:PutObject"})
DELETE = frozenset({"s3:DeleteObject"})
NAMES = {"read": READ, "put": PUT, "delete": DELETE}


def right_of(request: Request) -> str:
    query = urlsplit(request.path).query
    if request.method == "PUT":
        return "s3:PutObject"
    if request.method == "DELETE" or (request.method == "POST" and query.startswith("delete")):
        return "s3:DeleteObject"
    if request.method == "POST":
        return "s3:AbortMultipartUpload"  # never needed: nothing is put in parts
    return "s3:ListBucket" if "list-type" in query or "prefix=" in query else "s3:GetObject"


@dataclass
class Rights:
    """Of each bucket: operations, and where an operation is allowed below some prefixes only."""

    allowed: dict[str, frozenset[str]] = field(default_factory=dict)
    below: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    used: set[tuple[str, str]] = field(default_factory=set)

    def decide(self, request: Request) -> Fault | None:
        bucket, _, key = urlsplit(request.path).path.lstrip("/").partition("/")
        right = right_of(request)
        self.used.add((bucket, right))
        ok = right in self.allowed.get(bucket, frozenset())
        prefixes = self.below.get((bucket, right))
        if ok and prefixes is not None and request.method != "POST":
            ok = any(f"/{prefix}" in f"/{key}" for prefix in prefixes)
        return None if ok else Fault("status", status=403, code="AccessDenied")


class Scene:
    """A root in one bucket with a copy in another, made with all rights; then commands with some."""

    root, copy = f"s3://{ROOT}/data", f"s3://{COPY}/data"

    def __init__(self, proxy: FaultProxy, folder: Path) -> None:
        self.proxy, self.folder = proxy, folder

    def make(self, mode: str) -> None:
        """Make what most commands begin with; the next time, put it back."""
        if mode not in _MADE:
            _restore({ROOT: {}, COPY: {}})
            self.add("main", 0)
            place = ["place", self.root, "--location", f"copy={self.copy},domain=copy", "--copies", "2"]
            assert self.call([*place, "--mode", mode])[0] == 0
            _MADE[mode] = _objects()
        _restore(_MADE[mode])

    def add(self, ref: str, first: int) -> None:
        with shardkit.create(
            self.root, {"text": "str"}, ref=ref, shard_size="16KiB", block_size="4KiB"
        ) as writer:
            for number in range(first, first + 24):
                writer.add({"text": f"row {number:05d} {'x' * 40}"}, key=f"k{number}")

    def call(self, arguments: list[str], rights: Rights | None = None) -> tuple[int, str]:
        if rights is not None:
            self.proxy.faults = rights.decide
        try:
            return call("--timeout=120", *arguments)
        finally:
            self.proxy.faults = lambda _request: None

    def source(self) -> str:
        path = self.folder / "rows.jsonl"
        path.write_text("".join(json.dumps({"text": f"new {n}"}) + "\n" for n in range(50)))
        return str(path)

    def prepared(self, command: str) -> list[str]:
        """What `prepare` makes, made once for all tests of a command and put back for each."""
        if command not in _PREPARED:
            _restore({ROOT: {}, COPY: {}})
            _PREPARED[command] = (prepare(self, command), _objects())
        arguments, objects = _PREPARED[command]
        _restore(objects)
        return arguments


Objects = dict[str, dict[str, bytes]]
"""Of each bucket, by name."""

_MADE: dict[str, Objects] = {}
_PREPARED: dict[str, tuple[list[str], Objects]] = {}


def _objects() -> Objects:
    buckets = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets
    return {name: {key: one.value for key, one in buckets[name].keys.items()} for name in BUCKETS}


def _restore(objects: Objects) -> None:
    """Change the server's memory: a request for each object would cost more than the commands."""
    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    for bucket, wanted in objects.items():
        for key in list(backend.buckets[bucket].keys):
            backend.buckets[bucket].keys.pop(key)
        for key, data in wanted.items():
            backend.put_object(bucket, key, data)


def _contents(url: str) -> dict[str, bytes]:
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    return {key.removeprefix(f"{prefix}/"): data for key, data in _objects()[bucket].items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources, scratch and lists of keys."""
    return tmp_path_factory.mktemp("rights")


@pytest.fixture
def scene(proxy: FaultProxy, folder: Path) -> Scene:
    return Scene(proxy, folder)


def prepare(scene: Scene, command: str) -> list[str]:
    """What the command needs to have something to do; its arguments."""
    root, keys = scene.root, scene.folder / "keys.txt"
    keys.write_text("k3\n")
    if command == "build, async":
        scene.make("async")
        return ["build", scene.source(), root, "--ref", "new", "--scratch", str(scene.folder)]
    if command == "build, sync":
        scene.make("sync")
        return ["build", scene.source(), root, "--ref", "new", "--scratch", str(scene.folder)]
    if command == "first build":
        return ["build", scene.source(), root, "--scratch", str(scene.folder)]
    scene.make("async" if command == "replicate" else "sync")
    if command == "replicate":
        scene.add("more", 500)
        return ["replicate", root]
    if command == "place":
        return ["place", root, "--copies", "1", "--parity", "2+2"]
    if command == "place, emptied":
        return ["place", root, "--copies", "1", "--empty", "copy", "--grace", "0s"]
    if command == "scrub":
        return ["scrub", root]
    if command == "repair":
        copy, whole = open_store(scene.copy), open_store(scene.root)
        name = next(name for name in copy.list_after("objects/") if name.endswith((".tar", ".arrow")))
        copy.replace(name, b"rotten")
        name = next(name for name in whole.list_after("objects/") if name.endswith(".index"))
        whole.replace(name, b"rotten")
        return ["repair", root]
    if command in ("gc", "gc, deleting"):
        scene.add("old", 900)
        Repository.open(root).commit({"old": None}, message="dropped")
        collect(Repository.open(root), delete=True, grace_s=0, history_s=0)
        deleting = ["--delete"] if command == "gc, deleting" else []
        return ["gc", root, "--grace", "0s", "--history", "0s", *deleting]
    if command == "remove":
        return ["remove", root, "--keys", str(keys), "--reason", "asked for"]
    if command == "remove, erased":
        return ["remove", root, "--keys", str(keys), "--reason", "asked for", "--erase"]
    return [command, root]


# command → rights on the root, rights on the copy, prefixes to which an operation is limited
TABLE: dict[str, tuple[str, str, dict[tuple[str, str], tuple[str, ...]]]] = {
    "show": ("read", "", {}),
    "verify": ("read", "", {}),
    "build, async": ("read put", "", {}),
    "build, sync": ("read put", "read put", {}),
    "first build": ("read put", "", {}),
    "remove": ("read put", "read put", {}),
    "remove, erased": ("read put delete", "read put delete", {}),
    "replicate": ("read", "read put", {}),
    "place": ("read put", "read put", {}),
    "place, emptied": ("read put", "read put delete", {}),
    "scrub": ("read put", "read", {(ROOT, "s3:PutObject"): ("attest/",)}),
    "repair": ("read put", "read put", {}),
    "gc": ("read", "read", {}),
    "gc, deleting": ("read put delete", "read put delete", {}),
}


def rights_for(command: str) -> Rights:
    root, copy, below = TABLE[command]
    sets = {ROOT: root, COPY: copy}
    allowed = {
        bucket: frozenset().union(*(NAMES[one] for one in names.split())) for bucket, names in sets.items()
    }
    return Rights(allowed, below)


@pytest.mark.parametrize("command", TABLE)
def test_with_the_least_rights_a_command_succeeds(scene: Scene, command: str) -> None:
    arguments, rights = scene.prepared(command), rights_for(command)
    code, told = scene.call(arguments, rights)
    assert code == 0, told
    for bucket, allowed in rights.allowed.items():
        unused = {right for right in allowed - READ if (bucket, right) not in rights.used}
        assert not unused, "the table is of the least rights"


LESS = [
    (command, bucket, name)
    for command, (root, copy, _) in TABLE.items()
    for bucket, names in ((ROOT, root), (COPY, copy))
    for name in names.split()
]


# What is done without the copy: it is reported, and the next call continues there. Nothing is deleted while the copy's
# log cannot be compared with the root's.
GOES_ON = {("place, emptied", "read"), ("place, emptied", "delete"), ("gc", "read"), ("gc, deleting", "put"),
           ("gc, deleting", "delete")}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("command", "bucket", "name"), LESS)
def test_with_one_right_less_it_says_which(scene: Scene, command: str, bucket: str, name: str) -> None:
    arguments, rights = scene.prepared(command), rights_for(command)
    rights.allowed[bucket] -= NAMES[name]
    code, told = scene.call(arguments, rights)
    assert "Traceback" not in told
    assert any(right in told for right in NAMES[name]), told
    assert (code == 0) == (bucket == COPY and (command, name) in GOES_ON), told


def test_the_probe_leaves_a_few_bytes_where_it_may_not_delete(scene: Scene) -> None:
    arguments = scene.prepared("first build")
    assert _contents(scene.root) == {}
    assert scene.call(arguments, rights_for("first build"))[0] == 0
    left = {name: data for name, data in _contents(scene.root).items() if name.startswith("probe/")}
    assert len(left) == 5
    assert sum(map(len, left.values())) < 1_000
