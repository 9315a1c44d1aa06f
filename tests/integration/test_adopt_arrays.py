"""Arrays and files of tokens, adopted: equal to NumPy's reading, under every command, or refused by name."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
import shardkit_tools
from shardkit.errors import ShardkitError, SourceError, UsageError
from shardkit.reading.read_path import ReadSettings
from shardkit_tools.adopting import adopt
from shardkit_tools.adopting import adoption as adoption_module
from shardkit_tools.importers import ImportOptions
from tests.command_line import typed
from tests.unit.test_importer_numpy import write

SETTINGS = ReadSettings(deadline_s=30, attempt_s=5, cool_down_s=0.2)
ROW = 64  # tokens
TOKENS: dict[str, Any] = {"options": ImportOptions(dtype="uint16", row=ROW)}
INDEX = "4b3fd28ad8092b8ddef38f64197f9ac2ddf02c65eb5065fbc2dd4acfe51253b8"
VERSION = "sha256:bf1880a6da818d2acbc74b6eb5f35f083acebb8241cc8294d215fe33c3be5fad"


def write_tokens(folder: Path, rows: tuple[int, ...] = (500, 333), rest: int = 5) -> tuple[list[str], Any]:
    """Write files of tokens, each with `rest` tokens more than full rows; return paths and all rows."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, paths, expected = np.random.default_rng(7), [], []
    for number, count in enumerate(rows):
        values = rng.integers(0, 50257, count * ROW + rest).astype("<u2")
        paths.append(str(folder / f"part{number}.bin"))
        values.tofile(paths[-1])
        expected.append(values[: count * ROW].reshape(count, ROW))
    return paths, np.concatenate(expected)


def rows_of(root: object, field: str) -> Any:
    ds = shardkit.open(str(root), settings=SETTINGS)
    return np.stack([np.asarray(sample[field]) for sample in ds[:]])


def test_scalars_of_an_array_are_samples(tmp_path: Path) -> None:
    values = np.arange(5000, dtype=np.int32)[::-1].copy()
    np.save(tmp_path / "x.npy", values)
    shardkit_tools.adopt(tmp_path / "x.npy", tmp_path / "root", block_size="1KiB")
    assert rows_of(tmp_path / "root", "value").tolist() == values.tolist()


def test_the_bytes_of_an_index_and_the_id_of_a_version_are_fixed(tmp_path: Path) -> None:
    """A change of them is a change of the format."""
    np.arange(4096, dtype="<u2").tofile(tmp_path / "t.bin")
    result = adopt([tmp_path / "t.bin"], tmp_path / "root", block_size="1KiB", **TOKENS)
    assert result.manifest is not None
    (index,) = shardkit.open(tmp_path / "root").table.index_digest
    assert bytes(index).hex() == INDEX
    assert result.manifest.id == VERSION


def test_an_index_takes_no_memory_per_row(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((100_000, 2), np.uint8))
    adopt([tmp_path / "x.npy"], tmp_path / "root")
    ds = shardkit.open(tmp_path / "root")
    assert ds.table.index_size.tolist()[0] < 4_000
    assert len(ds.reader.index(0).keys()) == len(ds) == 100_000


def test_found_selected_planned_trained_and_audited(tmp_path: Path) -> None:
    paths, values = write_tokens(tmp_path / "tokens")
    root = str(tmp_path / "root")
    code, out, err = typed("adopt", *paths, root, "--dtype", "uint16", "--row", ROW, "--json")
    assert code == 0, err
    assert json.loads(out)["samples"] == len(values)
    code, out, err = typed("find", root, "--field", "key=0000000501", "--json")
    assert code == 0, err
    assert json.loads(out)["found"][0]["sample"] == 501
    (tmp_path / "few").write_text("3\n501\n832\n")
    code, out, err = typed("select", root, "--rows", tmp_path / "few", "--ref", "few")
    assert code == 0, err
    np.testing.assert_array_equal(rows_of(f"{root}@few", "tokens"), values[[3, 501, 832]])
    assert typed("plan", root, "--global-batch", 24)[0] == 0
    assert typed("cat", root, 501)[0] == typed("ls", root)[0] == typed("show", root)[0] == 0
    ds, run = shardkit.open(root), tmp_path / "run"
    with ds.loader(ds.plan(global_batch=24, lanes=4), rank=0, world=1, run=run) as loader:
        assert sum(len(batch.samples) for batch in loader) == len(values) // 24 * 24
    code, out, err = typed("audit", run)
    assert code == 0, out + err
    code, out, err = typed("rebuild", root, "--ref", "rebuilt")
    assert code == 0, err
    assert shardkit.open(f"{root}@rebuilt").manifest.format == "arrow"
    np.testing.assert_array_equal(
        np.sort(rows_of(f"{root}@rebuilt", "tokens"), axis=0), np.sort(values, axis=0)
    )
    with pytest.raises(UsageError, match=r"cannot append"):
        shardkit.create(root, {"tokens": f"uint16[{ROW}]"}, format="arrow", append=True)
    for kind in ("webdataset", "parquet", "jsonl", "croissant", "sha256sums", "urls"):
        code, out, err = typed("export", root, "--as", kind, "--out", tmp_path / kind)
        assert (code, err) == (0, ""), kind
    croissant = json.loads((tmp_path / "croissant").read_text())
    assert [one["sha256"] for one in croissant["distribution"]] == [
        hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths
    ]
    assert (tmp_path / "urls").read_text().split() == paths


def test_a_file_after_one_that_grew_gets_other_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished work of an interrupted adoption is kept only if rows still have the same numbers."""
    paths, _ = write_tokens(tmp_path / "tokens", (100, 100), rest=0)

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(adoption_module, "put_manifest", stopped)
        with pytest.raises(KeyboardInterrupt, match="run the same command again"):
            adopt(paths, tmp_path / "root", **TOKENS)
    Path(paths[1]).write_bytes(Path(paths[1]).read_bytes() + bytes(2 * ROW))
    assert adopt(paths, tmp_path / "root", **TOKENS).reused == 1
    with monkeypatch.context() as patch:
        patch.setattr(adoption_module, "put_manifest", stopped)
        with pytest.raises(KeyboardInterrupt, match="run the same command again"):
            adopt(paths, tmp_path / "other", **TOKENS)
    Path(paths[0]).write_bytes(bytes(2 * ROW) + Path(paths[0]).read_bytes())
    assert adopt(paths, tmp_path / "other", **TOKENS).reused == 0
    ds = shardkit.open(tmp_path / "other")
    assert [ds.key(row) for row in (100, 101, 201)] == ["0000000100", "0000000101", "0000000201"]


def test_documents_are_read_again_if_only_their_index_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "documents"
    folder.mkdir()
    write(folder, [[[1, 2, 3]], [[4]]], "uint16", "megatron")

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(adoption_module, "put_manifest", stopped)
        with pytest.raises(KeyboardInterrupt, match="run the same command again"):
            adopt(folder, tmp_path / "root", from_="tokens")
    write(folder, [[[1]], [[2, 3, 4]]], "uint16", "megatron")
    adopt(folder, tmp_path / "root", from_="tokens")
    assert [row["tokens"].tolist() for row in shardkit.open(tmp_path / "root")] == [[1], [2, 3, 4]]


def npy(folder: Path, values: Any, name: str = "a.npy") -> list[str]:
    np.save(folder / name, values)
    return [str(folder / name)]


def short(folder: Path) -> list[str]:
    path = Path(npy(folder, np.zeros((9, 4)))[0])
    path.write_bytes(path.read_bytes()[:-3])
    return [str(path)]


def tokens(folder: Path, size: int = 1000) -> list[str]:
    (folder / "t.bin").write_bytes(bytes(size))
    return [str(folder / "t.bin")]


def documents(folder: Path, start: int = 0, length: int = 500) -> list[str]:
    """Write an index of one document next to a file of tokens, as Megatron does."""
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2)  # uint16, one sequence, two borders
    (folder / "t.idx").write_bytes(head + struct.pack("<iqqq", length, start, 0, 1))
    return [*tokens(folder), str(folder / "t.idx")]


REFUSED: dict[str, tuple[Callable[[Path], list[str]], dict[str, Any], type[ShardkitError], str]] = {
    "fortran": (
        lambda p: npy(p, np.zeros((4, 5), order="F")),
        {},
        SourceError,
        r"a\.npy.*Fortran.*shardkit build",
    ),
    "big-endian": (
        lambda p: npy(p, np.zeros((4, 5), ">i4")),
        {},
        SourceError,
        r"a\.npy.*big-endian.*shardkit build",
    ),
    "bools": (
        lambda p: npy(p, np.array([0, 1, 2], np.uint8).view(bool)),
        {},
        SourceError,
        r"a\.npy: a bool is neither 0 nor 1.*shardkit build",
    ),
    "empty rows": (lambda p: npy(p, np.zeros((5, 0))), {}, SourceError, "empty arrays; .*shardkit build"),
    "cut": (short, {}, SourceError, r"a\.npy: .*cut short"),
    "no type": (tokens, {}, UsageError, r"t\.bin: nothing says.*--dtype uint16 --row 2048"),
    "no row": (tokens, {"options": ImportOptions(dtype="uint16")}, UsageError, r"--row 2048"),
    "documents in rows": (documents, {**TOKENS, "from_": "tokens"}, UsageError, "name only the .bin files"),
    "documents apart": (
        lambda p: documents(p, 2, 499),
        {"from_": "tokens"},
        SourceError,
        r"t\.bin: its documents do not follow one another.*shardkit build",
    ),
    "empty documents": (
        lambda p: documents(p, 0, 0),
        {"from_": "tokens"},
        SourceError,
        r"t\.bin row 0: a block of empty documents; .*shardkit build",
    ),
    "type of documents": (
        documents,
        {"from_": "tokens", "options": ImportOptions(field_types={"tokens": "int32[*]"})},
        UsageError,
        r"documents keep their type, uint16\[\*\]",
    ),
    "stratify": (tokens, {**TOKENS, "stratify": "tokens"}, UsageError, "are one stratum"),
    "schema": (
        tokens,
        {"options": ImportOptions(dtype="uint16", row=ROW, field_types={"tokens": "bytes"})},
        UsageError,
        r"keep their type, uint16\[64\]",
    ),
    "dtype of npy": (
        lambda p: npy(p, np.zeros(4)),
        {"from_": "npy", "options": ImportOptions(dtype="int8")},
        UsageError,
        "leave them out",
    ),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_cannot_be_adopted_is_named_with_the_way_on(tmp_path: Path, case: str) -> None:
    write, settings, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        adopt(write(tmp_path), tmp_path / "root", **settings)
