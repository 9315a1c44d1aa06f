"""One flipped bit anywhere, a file cut, lengthened, zeroed or swapped: always detected, never a wrong sample."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import shardkit
from shardkit.copies.repair import check_document, encode_parity, mirror_documents
from shardkit.copies.verify import verify
from shardkit.errors import ShardkitError, StoreError
from shardkit.repository.policy import Parity
from shardkit.repository.repository import Repository
from shardkit.stores.local import LocalStore
from tests.drills import drill_count

FORMATS = [("tar", "none"), ("arrow", "none"), ("arrow", "zstd")]
SCHEMA = {
    "image": "bytes",
    "text": "str",
    "meta": "json",
    "label": "int64",
    "tokens": "int32[16]",
    "tail": "uint8[*]",
}
VERSIONS = ("main", "v1")


@dataclass
class Bench:
    """A dataset, the samples that were put into it, and the files that hold it."""

    root: Path
    samples: dict[str, list[dict[str, object]]]

    @property
    def files(self) -> list[Path]:
        return sorted(
            p for p in self.root.rglob("*") if p.is_file() and p.relative_to(self.root).parts[0] != "tmp"
        )

    def pick(self, draw: random.Random) -> Path:
        """A file: first its kind, then one of that kind, so that small kinds are hit as often as shards."""
        kinds: dict[str, list[Path]] = {}
        for path in self.files:
            kinds.setdefault("log" if path.parent.name == "log" else path.suffix, []).append(path)
        return draw.choice(kinds[draw.choice(sorted(kinds))])


def make(root: Path, shard_format: str, compression: str) -> Bench:
    draw = random.Random(7)
    with shardkit.create(
        root, SCHEMA, stratify="label", format=shard_format, compression=compression, shard_size="64KiB",
        block_size="2KiB", split={"train": 0.7, "val": 0.3},
    ) as writer:  # fmt: skip
        for number in range(90):
            writer.add(
                {
                    "image": draw.randbytes(draw.randrange(1, 200)),
                    "text": "".join(draw.choices("abcdefgh äöü\n", k=draw.randrange(60))),
                    "meta": {"n": number, "half": number / 2},
                    "label": number % 3,
                    "tokens": [draw.randrange(-9, 9) for _ in range(16)],
                    "tail": list(range(number % 7)),
                },
                key=f"sample/{number}",
                source=("origin.bin", number),
            )
    repository = Repository.open(root)
    repository.commit({}, {"v1": repository.resolve("val")}, message="tag")
    bench = Bench(root, {name: list(read(root, name)) for name in VERSIONS})
    assert {".tar" if shard_format == "tar" and compression == "none" else None, ".selection"} - {None} <= {
        path.suffix for path in bench.files
    }
    return bench


def read(root: Path, name: str) -> Iterator[dict[str, object]]:
    dataset = shardkit.open(f"{root}@{name}")
    for number in range(len(dataset)):
        yield dataset[number]


def same(ours: dict[str, object], theirs: dict[str, object]) -> bool:
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[k], theirs[k]) for k in ours)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Bench]:
    folder = tmp_path_factory.mktemp("benches")
    return {pair: make(folder / "-".join(pair), *pair) for pair in FORMATS}


@contextmanager
def restored(*paths: Path) -> Iterator[None]:
    kept = [(path, path.read_bytes()) for path in paths]
    try:
        yield
    finally:
        for path, data in kept:
            path.chmod(0o644)
            path.write_bytes(data)


def check_detected(bench: Bench, what: str) -> None:
    """Verification finds the damage, and reading delivers what was written or raises."""
    result = verify(bench.root, level="read", jobs=1)
    assert result.exit_code == 4, f"{what}: verify says {result.exit_code}"
    for name in VERSIONS:
        expected = iter(bench.samples[name])
        try:
            for sample in read(bench.root, name):
                assert same(sample, next(expected)), f"{what}: a wrong sample of {name} was delivered"
        except ShardkitError:
            continue
        assert next(expected, None) is None, f"{what}: samples of {name} are missing"


def check_clean(bench: Bench, what: str) -> None:
    result = verify(bench.root, level="read", jobs=1)
    assert not result.damaged, f"{what}: a false alarm: {result.damaged[0]}"
    assert result.exit_code == 0


def flip(path: Path, draw: random.Random) -> str:
    data = bytearray(path.read_bytes())
    bit = draw.randrange(len(data) * 8)
    data[bit // 8] ^= 1 << bit % 8
    overwrite(path, bytes(data))
    return f"bit {bit} of {path.name} flipped"


def cut(path: Path, draw: random.Random) -> str:
    size = draw.randrange(path.stat().st_size)
    overwrite(path, path.read_bytes()[:size])
    return f"{path.name} cut to {size} bytes"


def lengthen(path: Path, draw: random.Random) -> str:
    more = draw.choice([b"\0", b"\n", b" ", draw.randbytes(513), bytes(1024)])
    overwrite(path, path.read_bytes() + more)
    return f"{path.name} lengthened by {len(more)} bytes"


def zero(path: Path, draw: random.Random) -> str:
    data = path.read_bytes()
    start = draw.randrange(len(data))
    stop = min(len(data), start + draw.choice([1, 64, 4096]))
    while not any(data[start:stop]):  # zeros over zeros are no damage
        start, stop = 0, stop + 1
    overwrite(path, data[:start] + bytes(stop - start) + data[stop:])
    return f"bytes {start} to {stop} of {path.name} zeroed"


def overwrite(path: Path, data: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(data)


Change = Callable[[Path, random.Random], str]


@pytest.mark.drill
@pytest.mark.parametrize("pair", FORMATS, ids="-".join)
@pytest.mark.parametrize(
    ("changes", "count"), [((flip,), 1000), ((cut, lengthen, zero), 750)], ids=["flip", "cut lengthen zero"]
)
def test_changed_files(
    benches: dict[tuple[str, str], Bench], pair: tuple[str, str], changes: tuple[Change, ...], count: int
) -> None:
    bench = benches[pair]
    for trial in range(-(-drill_count(count) // len(FORMATS))):
        draw = random.Random(f"{len(changes)} {pair} {trial}")
        path = bench.pick(draw)
        with restored(path):
            check_detected(bench, changes[trial % len(changes)](path, draw))
        check_clean(bench, f"trial {trial}")


@pytest.mark.drill
@pytest.mark.parametrize("pair", FORMATS, ids="-".join)
def test_swapped_files(benches: dict[tuple[str, str], Bench], pair: tuple[str, str]) -> None:
    bench = benches[pair]
    for trial in range(-(-drill_count(250) // len(FORMATS))):
        draw = random.Random(f"swap {pair} {trial}")
        first = bench.pick(draw)
        others = [p for p in bench.files if p.suffix == first.suffix and p.read_bytes() != first.read_bytes()]
        second = draw.choice(others or [p for p in bench.files if p != first])
        with restored(first, second):
            one, two = first.read_bytes(), second.read_bytes()
            overwrite(first, two)
            overwrite(second, one)
            check_detected(bench, f"{first.name} and {second.name} swapped")
        check_clean(bench, f"trial {trial}")


# ---- Flips on the way


class _Faulty(LocalStore):
    """A store whose first reads below a prefix fail, or have a bit of the last digit flipped."""

    def __init__(self, root: Path, prefix: str, *, failures: int = 0, flips: int = 0) -> None:
        super().__init__(root)
        self._prefix, self._failures, self._flips = prefix, failures, flips

    def get(self, name: str, *, max_bytes: int) -> bytes:
        data = super().get(name, max_bytes=max_bytes)
        if not name.startswith(self._prefix):
            return data
        self._failures, self._flips = self._failures - 1, self._flips - 1
        if self._failures >= 0:
            raise StoreError(f"{name}: input/output error")
        if self._flips >= 0:
            at = max(data.rfind(digit) for digit in _DIGITS)
            flipped = next(byte for byte in (data[at] ^ 1, data[at] ^ 2) if byte in _DIGITS)
            return data[:at] + bytes([flipped]) + data[at + 1 :]
        return data


_DIGITS = b"0123456789abcdef"


@pytest.mark.parametrize("prefix", ["parity/sets/", "parity/versions/", "erasures/"])
@pytest.mark.parametrize("failures", [1, 2, 3])
def test_a_document_in_which_a_bit_flips_on_the_way_replaces_none(
    failures: int, prefix: str, tmp_path: Path
) -> None:
    root, copy = tmp_path / "root", tmp_path / "copy"
    make(root, "arrow", "none")
    repository = Repository.open(root)
    encode_parity(repository, Parity(4), [repository.resolve()])
    (root / "erasures" / "one").mkdir(parents=True)
    (root / "erasures" / "one" / "report.json").write_bytes(b'{"rows":12}')
    shutil.copytree(root, copy)
    paths = sorted((root / prefix).rglob("*.json"))
    whole = [path.read_bytes() for path in paths]
    mirror_documents(_Faulty(root, prefix, failures=failures), _Faulty(copy, prefix, flips=1))
    assert [path.read_bytes() for path in paths] == whole
    paths[0].write_bytes(b"damaged")
    mirror_documents(LocalStore(root), _Faulty(copy, prefix, flips=1))
    assert paths[0].read_bytes() in (b"damaged", whole[0])
    mirror_documents(LocalStore(root), LocalStore(copy))
    assert [path.read_bytes() for path in paths] == whole


@pytest.mark.parametrize("folder", ["parity/sets", "parity/versions"])
def test_parity_documents_with_a_flipped_digit_are_refused(folder: str, tmp_path: Path) -> None:
    make(tmp_path, "arrow", "none")
    repository = Repository.open(tmp_path)
    encode_parity(repository, Parity(4), [repository.resolve()])
    for path in (tmp_path / folder).iterdir():
        name = f"{folder}/{path.name}"
        check_document(name, path.read_bytes())
        data = _Faulty(tmp_path, folder, flips=1).get(name, max_bytes=2**20)
        with pytest.raises(ShardkitError):
            check_document(name, data)
