"""A primary that is damaged before or while it is read, and a good second location: the same batches."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.errors import IntegrityError, NotFoundError
from tests.command_line import output_of

ROWS = 120
FORMATS = {
    "tar": {"format": "tar", "compression": "none"},
    "arrow": {"format": "arrow", "compression": "none"},
}


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for position in range(40, len(data), 97):
        data[position] ^= 0x80
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flip": _flip,
    "zero": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "truncate": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 3]),
    "delete": lambda path: path.unlink(),
}


def shards(root: Path) -> list[Path]:
    return sorted(path for kind in ("tar", "arrow") for path in root.glob(f"objects/sha256/*/*.{kind}"))


def damage(root: Path, how: str) -> None:
    for path in shards(root):
        path.chmod(0o644)
        DAMAGES[how](path)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Format → a root with a copy beside it, both as they were built."""
    found = {}
    for name, layout in FORMATS.items():
        base = tmp_path_factory.mktemp(name)
        schema = {"value": "int64", "kind": "str", "text": "str", "note": "json"}
        with shardkit.create(
            base / "root",
            schema,
            stratify="kind",
            shard_size="8KiB",
            block_size="512B",
            **layout,  # type: ignore[arg-type]
        ) as writer:
            for number in range(ROWS):
                text = "wörter und mehr " * (number % 5 + 1)
                note = {"n": number, "of": ["a", "ü"]}
                writer.add({"value": number, "kind": "aab"[number % 3], "text": text, "note": note})
        output_of("place", base / "root", "--location", f"far={base / 'far'}", "--copies", "2")
        assert shards(base / "far")
        found[name] = base
    return found


@pytest.fixture
def fresh(roots: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a format's root, with the same second location."""
    numbers = itertools.count()

    def made(name: str) -> Path:
        return shutil.copytree(roots[name] / "root", tmp_path / f"root-{next(numbers)}")

    return made


@pytest.fixture
def both(roots: dict[str, Path]) -> Iterator[Callable[[Path, str, str], None]]:
    """Damages a root and its second location, which is put back after the test."""
    kept = {path: path.read_bytes() for base in roots.values() for path in shards(base / "far")}

    def spoil(root: Path, name: str, how: str) -> None:
        damage(root, how)
        damage(roots[name] / "far", how)

    yield spoil
    for path, data in kept.items():
        path.write_bytes(data)


detours: list[float] = []
"""Of each loader that `batches` made: copies that it found wrong or missing."""


def batches(root: Path, run: Path, at: Callable[[int], None] = lambda _step: None) -> list[Any]:
    dataset = shardkit.open(root)
    plan = dataset.plan(global_batch=12, seed=3, lanes=4)
    found = []
    with contextlib.closing(
        dataset.loader(plan, rank=0, world=1, tensors=False, prefetch=0, run=run)
    ) as loader:
        for number, batch in enumerate(loader):
            found.append(
                (batch["samples"].tolist(), batch["value"].tolist(), list(batch["text"]), list(batch["note"]))
            )
            at(number)
        stats = loader.stats()
        detours.append(stats["remote_mismatches"] + stats["remote_missing"])
    return found


@pytest.mark.parametrize("when", ["before", "while"])
@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", FORMATS)
def test_the_loader_reads_on_elsewhere(
    roots: dict[str, Path], fresh: Callable[[str], Path], tmp_path: Path, name: str, how: str, when: str
) -> None:
    root = fresh(name)
    expected = batches(roots[name] / "root", tmp_path / "whole")
    assert len(expected) == ROWS // 12

    def at(number: int) -> None:
        if number == 2 and when == "while":
            damage(root, how)

    if when == "before":
        damage(root, how)
    assert batches(root, tmp_path / "disturbed", at) == expected
    assert detours[-2] == 0
    assert detours[-1] > 0 or when == "while"


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", FORMATS)
def test_where_both_are_bad_the_error_names_the_shard_and_what_to_run(
    fresh: Callable[[str], Path], both: Callable[[Path, str, str], None], tmp_path: Path, name: str, how: str
) -> None:
    root = fresh(name)
    names = [path.name for path in shards(root)]
    both(root, name, how)
    with pytest.raises((IntegrityError, NotFoundError)) as caught:
        batches(root, tmp_path / "run")
    assert any(one in str(caught.value) for one in names), caught.value
    assert "shardkit " in str(caught.value)
