"""NumPy archives, adopted: a changed range is found by readers of its field; what cannot be adopted is named."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit.copies.verify import verify
from shardkit.errors import IntegrityError, ShardkitError, SourceError, UsageError
from shardkit_tools.adopting import adopt, arrays
from shardkit_tools.importers import ImportOptions

NUMBERS = np.random.default_rng(5)
ARRAYS: dict[str, Any] = {
    "image": NUMBERS.integers(0, 255, (300, 5, 3), np.uint8),
    "odd": NUMBERS.integers(-9, 9, 300),  # its rows begin at no multiple of 8 bytes
    "is_good": NUMBERS.integers(0, 2, 300).astype(bool),
    "half": NUMBERS.normal(0, 1, (300, 7)).astype(np.float16),
}


def write_archives(folder: Path) -> list[Path]:
    folder.mkdir()
    for number, rows in enumerate((slice(0, 180), slice(180, 300))):
        np.savez(folder / f"{number}.npz", **{name: array[rows] for name, array in ARRAYS.items()})
    return sorted(folder.iterdir())


def test_every_flipped_bit_is_found_in_its_range(tmp_path: Path) -> None:
    path = write_archives(tmp_path / "archives")[1]
    adopt(tmp_path / "archives", tmp_path / "root")
    root, data, chance = str(tmp_path / "root"), path.read_bytes(), random.Random(4)
    index = shardkit.open(root).reader.index(1)
    assert index.blocks == 1
    for name in ARRAYS:
        found = index.field_range(0, name)
        assert data[found.offset : found.offset + found.size] == ARRAYS[name][180:].tobytes()
        at = found.offset + chance.randrange(found.size)
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :])
        (damage,) = verify(root).damaged
        assert (damage.name, damage.blocks) == (str(path), (0,))
        reader = shardkit.open(root).reader
        with pytest.raises(IntegrityError, match=rf"block 0 in .*1\.npz: block 0 field '{name}': XXH3"):
            reader.read(1, 0, fields=[name])
        others = [other for other in ARRAYS if other != name]
        assert reader.read(1, 0, fields=others).rows == 120
        with pytest.raises(IntegrityError, match=r"block 0 in .*1\.npz"):
            shardkit.open(root)[200]
    for at in (3, len(data) - 1):  # of a name of a member, and of the directory at the end
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert verify(root).exit_code == 4
        assert np.array_equal(shardkit.open(root)[299]["half"], ARRAYS["half"][299])


def saved(path: Path, **arrays: Any) -> None:
    np.savez(path, **(ARRAYS | arrays))


def packed(path: Path) -> None:
    np.savez_compressed(path, **ARRAYS)


def damaged(path: Path) -> None:
    saved(path)
    data = path.read_bytes()
    at = data.index(ARRAYS["half"].tobytes()) + 50
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


REFUSED: dict[str, tuple[Callable[[Path], None], type[ShardkitError], str]] = {
    "compressed": (packed, SourceError, r"a\.npz: its arrays are compressed.*shardkit build"),
    "damaged": (damaged, SourceError, r"a\.npz: half\.npy: .*Bad CRC-32"),
    "fortran": (
        lambda path: saved(path, half=np.zeros((300, 2), order="F")),
        SourceError,
        r"a\.npz: half\.npy: stored column by column.*shardkit build",
    ),
    "big-endian": (
        lambda path: saved(path, odd=ARRAYS["odd"].astype(">i4")),
        SourceError,
        "stored big-endian",
    ),
    "bools": (
        lambda path: saved(path, is_good=np.full(300, 2, np.uint8).view(bool)),
        SourceError,
        r"a\.npz: .*'is_good': a bool is neither 0 nor 1; .*shardkit build",
    ),
    "type": (
        lambda path: saved(path, odd=np.zeros(300)),
        UsageError,
        "adopted rows keep their type, float64",
    ),
    "large": (
        lambda path: saved(path, more=np.zeros((300, 99))),
        SourceError,
        r"a\.npz: the archive has \d+ bytes.*expected at most 200000: .*shardkit build",
    ),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_cannot_be_adopted_is_named_with_the_way_on(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, error, message = REFUSED[case]
    monkeypatch.setattr(arrays, "MAX_WHOLE_BYTES", 200_000)
    write(tmp_path / "a.npz")
    options = ImportOptions(field_types={"odd": "int64"} if case == "type" else {})
    with pytest.raises(error, match=message):
        adopt(tmp_path / "a.npz", tmp_path / "root", options=options)
