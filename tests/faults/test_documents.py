"""Documents without a digest in their name: one bad answer costs a second request; bad ones are refused by name."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.audit.run_record import load_run, read_checkpoints
from shardkit.dataset.rewriting import ErasurePlan
from shardkit.documents import decode, encode, sha256_digest
from shardkit.errors import IntegrityError, ShardkitError
from shardkit.manifest import Manifest
from shardkit.reading.adopted_places import location_name, read_adopted_place
from shardkit.reading.attestations import Attestation, put_attestations, read_attestations
from shardkit.reading.inventory import parse_version_record
from shardkit.reading.parity.sets import SetRecord
from shardkit.repository.garbage import put_list, read_list, read_marks, write_marks
from shardkit.repository.locations import CopyMark, parse_spare
from shardkit.repository.log import Deletion, Identity, LogEntry
from shardkit.repository.versions import PartLocation
from shardkit.stores.file_operations import FileOperations, Handle, substituted
from shardkit.stores.local import LocalStore
from shardkit.testing.memory_store import MemoryStore
from shardkit.torch.checkpoint_format import checkpoint_names, read_checkpoint_manifest
from shardkit_trainer import load_configuration
from shardkit_trainer.run_directory import RunDirectory
from shardkit_trainer.training import train
from tests.command_line import call, output_of

ROWS = 60


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with parity and a copy, `mirror`, and one that is alone, `lone`."""
    base = tmp_path_factory.mktemp("documents")
    schema = {"x": "int64[16]", "label": "int64"}
    for name in ("root", "lone"):
        with shardkit.create(
            base / name, schema, shard_size=4_000, block_size=800, stratify="label"
        ) as writer:
            for number in range(ROWS):
                writer.add({"x": [number] * 16, "label": number % 3}, key=f"key-{number:05d}")
        assert call("tag", f"{base / name}@main", "v1")[0] == 0
    output_of(
        "place", base / "root", "--location", f"mirror={base / 'mirror'}", "--copies", 2, "--parity", "4+2"
    )
    return base


class BadAnswers(FileOperations):
    """The first readings of files whose path ends as `pattern` says come wrong.

    Args:
        pattern: of paths.
        spoil: what becomes of their bytes.
        times: how many readings of each path.
    """

    def __init__(self, pattern: str, spoil: Callable[[bytes], bytes], times: int) -> None:
        self._pattern, self._spoil, self._times = re.compile(pattern), spoil, times
        self.met: dict[str, int] = {}

    def open_file(self, parent: Handle, name: str) -> Handle:
        found = super().open_file(parent, name)
        if self._pattern.search(found.path):
            self.met[found.path] = self.met.get(found.path, 0) + 1
        return found

    def read(self, file: Handle, length: int, offset: int) -> bytes:
        data = super().read(file, length, offset)
        return self._spoil(data) if 0 < self.met.get(file.path, 0) <= self._times else data

    def read_into(self, file: Handle, buffer: memoryview, offset: int) -> int:
        count = super().read_into(file, buffer, offset)
        if 0 < self.met.get(file.path, 0) <= self._times:
            spoiled = self._spoil(bytes(buffer[:count]))
            buffer[: len(spoiled)] = spoiled
            return len(spoiled)
        return count


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]


SPOILS: dict[str, Callable[[bytes], bytes]] = {
    "flip": flipped,
    "zero": lambda data: bytes(len(data)),
    "empty": lambda _data: b"",
    "not text": lambda data: b"\xff\xfe" + data[2:],
}
DOCUMENTS = {
    "identity": r"shardkit\.json$",
    "log head": r"log/0+[23]\.json$",
    "manifest": r"\.manifest$",
    "page": r"\.page$",
    "index": r"\.index$",
}


def rows(url: Path) -> list[int]:
    dataset = shardkit.open(url)
    return sorted(int(dataset[i]["x"][0]) for i in range(len(dataset)))


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.parametrize("root", ["lone", "root"])
def test_one_bad_answer_costs_a_second_request(base: Path, root: str, document: str, spoil: str) -> None:
    bad = BadAnswers(f"/{root}/.*{DOCUMENTS[document]}", SPOILS[spoil], times=1)
    with substituted(bad):
        assert rows(base / root) == list(range(ROWS))
    assert bad.met, "nothing came wrong: the test has missed"


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("document", DOCUMENTS)
def test_bad_answers_for_good_are_read_from_another_location(base: Path, document: str, spoil: str) -> None:
    bad = BadAnswers(f"/root/.*{DOCUMENTS[document]}", SPOILS[spoil], times=10**9)
    with substituted(bad):
        assert rows(base / "root") == list(range(ROWS))


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("document", DOCUMENTS)
def test_without_another_location_an_error_names_it(base: Path, document: str, spoil: str) -> None:
    bad = BadAnswers(f"/lone/.*{DOCUMENTS[document]}", SPOILS[spoil], times=10**9)
    with substituted(bad), pytest.raises(ShardkitError) as caught:
        rows(base / "lone")
    assert any(re.search(DOCUMENTS[document].rstrip("$"), word) for word in str(caught.value).split())


def test_the_digest_is_checked_before_a_field_is_read(base: Path) -> None:
    """A forged format, or features of tomorrow, under a digest that does not fit: damage, not a newer version."""
    data = (base / "root" / "shardkit.json").read_bytes()
    for forged in (
        data.replace(b'"features":[]', b'"features":["tomorrow"]'),
        data.replace(b"shardkit-repository/1", b"shardkit-repository/9"),
        data.replace(b'"id"', b'"ID"'),
    ):
        assert forged != data
        with pytest.raises(IntegrityError, match="digest"):
            Identity.from_bytes(forged, "here")


# Documents that say what nobody writes

Parse = Callable[[bytes], object]


def sealed(body: dict[str, object]) -> bytes:
    """Canonical bytes of a document with their digest."""
    return encode({**body, "digest": sha256_digest(encode(body))})


def _in_memory(name: str, data: bytes) -> MemoryStore:
    store = MemoryStore()
    store.put_new(name, data)
    return store


def _found(base: Path, pattern: str) -> bytes:
    return min(base.glob(pattern)).read_bytes()


def _kinds(base: Path) -> dict[str, tuple[bytes, Parse]]:
    """Name → a good document, and what reads it."""
    digest = "sha256:" + "ab" * 32
    store = MemoryStore()
    put_list(store, 1, [f"objects/sha256/ab/{'ab' * 32}.tar"])
    garbage = store.get(next(iter(store.list_after("gc/lists/"))), max_bytes=10**6)
    write_marks(store, {f"objects/sha256/ab/{'ab' * 32}.tar": 1})
    marks = store.get("gc/marked.json", max_bytes=10**6)
    part = PartLocation(digest, "web", "b7e2a8f0-0000-0000-0000-000000000000", ("a", "b"))
    tar = encode({"format": "shardkit-adopted/1", "digest": digest, "urls": ["/x.tar"]})
    put_attestations(store, [Attestation("root", digest, "tar", "good", "read", "scrub")])
    attested = store.get(next(iter(store.list_after("attest/"))), max_bytes=10**6)
    plan = encode(
        ErasurePlan(
            request="r", reason="why", author="who", shards=(("ab", "cd", (1, 2)),), notes=(), samples=1
        )
    )
    return {
        "identity": (_found(base, "root/shardkit.json"), lambda data: Identity.from_bytes(data, "here")),
        "log entry": (_found(base, "root/log/*2.json"), lambda data: LogEntry.from_bytes(data, "here")),
        "locations": (
            _found(base, "root/shardkit-locations.json"),
            lambda data: parse_spare(data, "here"),
        ),
        "mark": (_found(base, "mirror/shardkit-copy.json"), lambda data: CopyMark.from_bytes(data, "here")),
        "parity set": (
            _found(base, "root/parity/sets/*.json"),
            lambda data: SetRecord.from_bytes(data, "here"),
        ),
        "parity version": (
            _found(base, "root/parity/versions/*.json"),
            lambda data: parse_version_record(data, "here"),
        ),
        "manifest": (_found(base, "root/objects/sha256/*/*.manifest"), Manifest.from_bytes),
        "part": (part.to_bytes(), lambda data: PartLocation.from_bytes(data, "here")),
        "adopted file": (
            tar,
            lambda data: read_adopted_place(_in_memory(location_name(digest), data), digest),
        ),
        "attestations": (
            attested,
            lambda data: read_attestations([_in_memory("attest/root/2026-01-01/a.json", data)]),
        ),
        "garbage": (garbage, lambda data: read_list(_renamed_list(data), Deletion(1, _digest(data)))),
        "marks": (marks, lambda data: read_marks(_in_memory("gc/marked.json", data))),
        "erasure": (plan, lambda data: decode(ErasurePlan, data, "here", max_bytes=10**6)),
    }


def _digest(data: bytes) -> str:
    return shardkit.formats.sha256_digest(data)


def _renamed_list(data: bytes) -> MemoryStore:
    return _in_memory(f"gc/lists/{1:020d}-{_digest(data).removeprefix('sha256:')}.json", data)


def _broken(good: bytes) -> Iterator[bytes]:
    """Bytes that are no document at all."""
    yield from (
        b"",
        good[:1],
        good[: len(good) // 2],
        good[:-1],
        good + b" ",
        b"null",
        b"[]",
        b"{}",
        b'""',
        b"7",
    )
    yield b"\xff\xfe\x00" + good
    yield good[: len(good) // 2] + b"\xc3\x28" + good[len(good) // 2 :]
    yield b"[" * 200_000
    yield b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    yield b'{"format":' + b"9" * 10_000 + b"}"
    yield b'{"format":"\\ud800"}'
    yield b"x" * (64 * 2**20)
    for position in range(0, len(good), max(1, len(good) // 40)):
        yield good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :]


BAD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 2**62, 2**63 - 1, "", "x", "\x00", "é" * 20_000, [], [None], [[1, 2, 3]], {}, {"a": 1}),
    *("sha256:" + "g" * 64, "9999-99-99T99:99:99Z", "2026-02-31T00:00:00Z"),
)


def _forged(good: bytes) -> Iterator[bytes]:
    """Canonical JSON, sealed where it was sealed, with one field of another kind, missing, or too many."""
    document = json.loads(good)
    is_sealed = document.pop("digest", None) if "digest" in document and _reseals(good) else None

    def written(changed: dict[str, Any]) -> bytes:
        return sealed(changed) if is_sealed else encode(changed)

    for key in document:
        yield written({name: value for name, value in document.items() if name != key})
        for value in BAD_VALUES:
            yield written({**document, key: value})
            if isinstance(document[key], dict):
                for inner in document[key]:
                    yield written({**document, key: {**document[key], inner: value}})
            if isinstance(document[key], list) and document[key]:
                yield written({**document, key: [value, *document[key][1:]]})
                if isinstance(document[key][0], dict):
                    for inner in document[key][0]:
                        first = {**document[key][0], inner: value}
                        yield written({**document, key: [first, *document[key][1:]]})
    yield written({**document, "more": 1})


def _reseals(good: bytes) -> bool:
    body = json.loads(good)
    body.pop("digest")
    return sealed(body) == good


KINDS = (
    *("identity", "log entry", "locations", "mark", "parity set", "parity version", "manifest", "part"),
    *("adopted file", "attestations", "garbage", "marks", "erasure"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_lies_there_the_error_is_ours(base: Path, kind: str) -> None:
    good, parse = _kinds(base)[kind]
    parse(good)
    for data in (*_broken(good), *_forged(good)):
        with contextlib.suppress(ShardkitError):
            parse(data)


# Documents of runs

RUN_FILES = (
    "run.json",
    "checkpoints/*.json",
    "ledger/state.json",
    "ledger/steps",
    "ledger/events",
)


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    with shardkit.create(folder / "data", {"text": "str"}, block_size="1KiB") as writer:
        for number in range(60):
            writer.add({"text": f"{number} bottles of beer on the wall"})
    settings = {
        "run.directory": folder / "run", "run.steps": 4, "run.device": "cpu", "data.dataset": folder / "data",
        "data.global_batch": 8, "data.lanes": 4, "model.field": "text", "model.context": 16, "model.layers": 1,
        "model.width": 16, "model.heads": 2, "checkpoint.every": 2, "log.telemetry_s": 0.0, "log.peak_flops": 1e9,
    }  # fmt: skip
    train(load_configuration(None, [f"{key}={value}" for key, value in settings.items()]))
    return folder / "run"


@pytest.mark.parametrize("pattern", RUN_FILES)
def test_documents_of_runs(trained_run: Path, tmp_path: Path, pattern: str) -> None:
    found = sorted(trained_run.glob(pattern))
    assert found
    for file in found[:1]:
        good = file.read_bytes()
        copy = tmp_path / "run"
        shutil.copytree(trained_run, copy)
        damaged = copy / file.relative_to(trained_run)
        for data in _broken(good) if len(good) < 100_000 else ():
            if len(data) > 10**7:
                continue
            damaged.write_bytes(data)
            with contextlib.suppress(ShardkitError):
                load_run(copy)
            with contextlib.suppress(ShardkitError):
                read_checkpoints(copy)
            with contextlib.suppress(ShardkitError):
                RunDirectory(str(copy), lead=False).manifest_of_run()
            with contextlib.suppress(ShardkitError):
                for name in checkpoint_names(LocalStore(copy, read_only=True)):
                    read_checkpoint_manifest(copy, name)
