"""Tars of somebody else, adopted where they lie: read as webdataset reads them, verified, or refused by name."""

from __future__ import annotations

import datetime as dt
import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from typer.testing import CliRunner

import shardkit
from shardkit.copies.verify import verify
from shardkit.dataset.merging import merge_datasets
from shardkit.dataset.removing import erase
from shardkit.errors import NotFoundError, SourceError, UsageError
from shardkit.repository.repository import Repository
from shardkit_tools.adopting import adopt
from shardkit_tools.building import engines
from shardkit_tools.building.build_run import build
from shardkit_tools.importers import ImportOptions
from shardkit_tools.main import make_app


def sample(tar: int, row: int) -> dict[str, Any]:
    return {
        "__key__": f"part{tar}/s{tar}_{row:04d}",
        "jpg": b"\xff\xd8\xff" + hashlib.sha256(f"{tar} {row}".encode()).digest() * (1 + row % 40),
        "cls": row // 40,
        "json": {"row": row, "text": "é" * (row % 5)},
        "txt": f"sample {row} ü",
        "tokens.npy": np.arange(row % 7, dtype=np.int32) - 3,
        "emb.npy": np.full((2, 3), row / 3, np.float32),
        "score.npy": np.float64(row / 7),
    }


def write_tars(folder: Path, tars: int = 3, rows: int = 120) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for tar in range(tars):
        paths.append(str(folder / f"{tar:03d}.tar"))
        with webdataset.TarWriter(paths[-1]) as writer:
            for row in range(rows):
                writer.write(sample(tar, row))
    return paths


def npy(array: Any, version: tuple[int, int] | None = None) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asarray(array), version=version)
    return stream.getvalue()


def write_tar(path: Path, members: Mapping[str, bytes], tar_format: int = tarfile.USTAR_FORMAT) -> str:
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return str(path)


@pytest.mark.parametrize("sizes", [[1 << 20], [5, 3 << 20], [1 << 20, 5], [700_000] * 3])
def test_the_last_block_of_a_tar_may_have_any_size(tmp_path: Path, sizes: list[int]) -> None:
    """Values of small blocks are checked together, after a MiB or at the end."""
    values = [bytes([row]) * size for row, size in enumerate(sizes)]
    path = write_tar(tmp_path / "a.tar", {f"{row}.bin": value for row, value in enumerate(values)})
    for block_size in ("1KB", "8MiB"):
        adopt([path], tmp_path / block_size, block_size=block_size)
        assert [sample["blob"] for sample in shardkit.open(tmp_path / block_size)] == values


def test_runs_of_one_label_are_strata(tmp_path: Path) -> None:
    tars = write_tars(tmp_path / "tars")
    adopt(tars, tmp_path / "root", stratify="label", block_size="4KiB")
    ds = shardkit.open(tmp_path / "root")
    assert ds.strata == {"0": 120, "1": 120, "2": 120}
    assert ds.table.segment_stratum.tolist() == [0, 1, 2] * 3
    assert ds.table.segment_rows.tolist() == [40] * 9
    plan = ds.plan(global_batch=6, lanes=2)
    labels = [ds[int(number)]["label"] for number in plan.step(3).ravel()]
    assert sorted(labels) == [0, 0, 1, 1, 2, 2], "each batch is balanced"
    with pytest.raises(SourceError, match=r"000\.tar: 120 runs of one text in 120 samples.*shardkit build"):
        adopt(tars, tmp_path / "other", stratify="text")


def test_root_and_tars_may_move_together_and_tars_alone_are_adopted_again(tmp_path: Path) -> None:
    tars = write_tars(tmp_path / "a" / "tars", tars=2)
    first = adopt(tars, tmp_path / "a" / "root")
    (tmp_path / "a").rename(tmp_path / "b")
    assert shardkit.open(tmp_path / "b" / "root")[150]["text"] == "sample 30 ü"
    (tmp_path / "b" / "tars").rename(tmp_path / "elsewhere")
    with pytest.raises(NotFoundError, match="shardkit adopt SOURCE"):
        shardkit.open(tmp_path / "b" / "root")[150]
    again = adopt([tmp_path / "elsewhere"], tmp_path / "b" / "root")
    assert again.manifest is not None
    assert first.manifest is not None
    assert again.manifest.id == first.manifest.id
    assert again.commit is None
    assert shardkit.open(tmp_path / "b" / "root")[150]["text"] == "sample 30 ü"


def test_adopted_data_is_selected_and_merged(tmp_path: Path) -> None:
    tars = write_tars(tmp_path / "tars", tars=2)
    adopt(tars, tmp_path / "root")
    merge_datasets({"x": tmp_path / "root", "y": tmp_path / "root"}, tmp_path / "merged")
    ds = shardkit.open(tmp_path / "merged")
    assert len(ds) == 480
    assert ds[250]["text"] == "sample 10 ü"
    assert not verify(str(tmp_path / "merged")).exit_code
    chosen = CliRunner().invoke(
        make_app("select"), ["select", str(tmp_path / "root"), "--where", "label == 1", "--ref", "one"]
    )
    assert chosen.exit_code == 0, chosen.output
    ds = shardkit.open(f"{tmp_path / 'root'}@one")
    assert [ds[n]["label"] for n in range(len(ds))] == [1] * 80
    with pytest.raises(UsageError, match=r"adopted shards, outside of this root.*erase them where they lie"):
        erase(str(tmp_path / "root"), rows=[3], reason="asked for")


def test_jobs_and_journal_do_not_change_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "SMALL_BYTES", 0)
    tars = write_tars(tmp_path / "tars", tars=4)
    ids = {adopt(tars, tmp_path / f"j{jobs}", jobs=jobs).manifest.id for jobs in (1, 2)}  # type: ignore[union-attr]
    assert len(ids) == 1


def hostile(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def two_names(path: Path) -> str:
    """A pax header that calls the member ``b.txt`` while its own header says ``a.txt``."""
    info = tarfile.TarInfo("a.txt")
    info.size = 2
    header = info.create_pax_header({**info.get_info(), "name": "a.txt"}, "utf-8")
    record = b"14 path=b.txt\n"
    extension = tarfile.TarInfo("x")
    extension.type, extension.size = tarfile.XHDTYPE, len(record)
    start = extension.tobuf(tarfile.USTAR_FORMAT) + record.ljust(512, b"\0")
    return hostile(path, start + header + b"hi".ljust(512, b"\0") + bytes(1024))


GOOD = {"a.txt": b"one", "a.cls": b"1"}
# what the reader of tars refuses is tested with the importer; one case shows that adoption uses it
REFUSED: dict[str, tuple[Callable[[Path], str], str]] = {
    "two names": (two_names, r"member 'b\.txt' is called 'a\.txt' in its own header.*shardkit build"),
    "number": (
        lambda p: write_tar(p, {**GOOD, "b.txt": b"", "b.cls": b"-01"}),
        r"'b\.cls'.*not an integer.*build",
    ),
    "range": (lambda p: write_tar(p, {**GOOD, "b.txt": b"", "b.cls": b"9" * 19}), r"sample 'b'.*int64"),
    "text": (lambda p: write_tar(p, {**GOOD, "b.txt": b"\xff", "b.cls": b"1"}), r"sample 'b'.*UTF-8"),
    "big-endian": (
        lambda p: write_tar(p, {"a.npy": npy(np.arange(3, dtype=">i4"))}),
        r"a\.npy.*dtype >i4.*build",
    ),
    "columns": (lambda p: write_tar(p, {"a.npy": npy(np.ones((2, 3), order="F"))}), "Fortran order.*build"),
    "shape": (
        lambda p: write_tar(p, {"a.npy": npy(np.ones((2, 3))), "b.npy": npy(np.ones((3, 2)))}),
        r"float64\[\*,\*\] cannot be read where it lies.*build",
    ),
    "named": (lambda p: write_tar(p.with_suffix(".tar.gz"), GOOD), "compressed.*shardkit build"),
}


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ({"b.txt": b""}, r"'b'.*'label' is missing"),
        ({"b.txt": b"", "b.cls": b"1", "b.json": b"{}"}, "field 'meta'"),
    ],
    ids=["missing", "added"],
)
def test_other_fields_than_those_of_the_samples_looked_at_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: dict[str, bytes], message: str
) -> None:
    monkeypatch.setattr("shardkit_tools.importers.webdataset._SCAN_SAMPLES", 1)
    path = write_tar(tmp_path / "bad.tar", {**GOOD, **later})
    with pytest.raises(SourceError, match=rf"bad\.tar.*{message}.*--schema"):
        adopt([path], tmp_path / "root")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_adopted_is_refused_by_name_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    write, message = REFUSED[name]
    path = write(tmp_path / "bad.tar")
    with pytest.raises(SourceError, match=rf"(?s)bad\.tar.*{message}"):
        adopt([path], tmp_path / "root")
    assert not (tmp_path / "root" / "locations").exists()
    if (tmp_path / "root").exists():
        assert Repository.open(tmp_path / "root").head().n == 0


def test_schema_of_later_tars_is_held_to_the_first(tmp_path: Path) -> None:
    one = write_tar(tmp_path / "1.tar", {f"a{n:04d}.npy": npy(np.zeros(2, np.int32)) for n in range(1000)})
    two = write_tar(tmp_path / "2.tar", {"b.npy": npy(np.zeros(3, np.int32))})
    with pytest.raises(SourceError, match=r"2\.tar member 'b\.npy'.*shape \(3,\).*int32\[\*\]"):
        adopt([one, two], tmp_path / "root")
    adopt([one, two], tmp_path / "root", options=ImportOptions(field_types={"array": "int32[*]"}))
    assert shardkit.open(tmp_path / "root")[1000]["array"].tolist() == [0, 0, 0]
    (tmp_path / "copy.tar").write_bytes(Path(one).read_bytes())
    with pytest.raises(SourceError, match=r"copy\.tar: the same bytes as .*1\.tar"):
        adopt([one, tmp_path / "copy.tar"], tmp_path / "other")


def test_uneven_samples_make_smaller_blocks(tmp_path: Path) -> None:
    """Many small samples first would otherwise put hundreds of large ones into a block."""
    members = {f"a{n:04d}.bin": bytes([n % 256]) * (1 if n < 40 else 90_000) for n in range(120)}
    adopt([write_tar(tmp_path / "a.tar", members)], tmp_path / "root", block_size="32KiB")
    ds = shardkit.open(tmp_path / "root")
    assert int(ds.table.largest_block[0]) <= 65 * 32 * 1024
    assert [ds[n]["blob"] for n in range(120)] == list(members.values())


def test_command(tmp_path: Path) -> None:
    tars = write_tars(tmp_path / "tars", tars=2)
    root = str(tmp_path / "root")
    dry = CliRunner().invoke(make_app("adopt"), ["adopt", *tars, root, "--dry-run", "--json"])
    assert dry.exit_code == 0, dry.output
    assert json.loads(dry.output)["samples"] == 240
    assert not (tmp_path / "root").exists()
    done = CliRunner().invoke(make_app("adopt"), ["adopt", *tars, root, "--stratify", "label"])
    assert done.exit_code == 0, done.output
    for word in ("strata", "order", "blocks", "custody", "erasure"):
        assert f"\n  {word} " in done.output
    document = json.loads(CliRunner().invoke(make_app("adopt"), ["adopt", *tars, root, "--json"]).output)
    assert document["id"] == shardkit.open(root).manifest.id
    assert "order" in document["does_not_hold"]
    with pytest.raises(UsageError, match=r"expected whole numbers or text \(label, text\)"):
        adopt(tars, root, stratify="emb")


def test_exported_sums_and_urls_name_the_tars(tmp_path: Path) -> None:
    tars = write_tars(tmp_path / "ta rs", tars=2)
    root = tmp_path / "root"
    adopt(tars, root)
    listed = CliRunner().invoke(make_app("export"), ["export", str(root), "--as", "urls"])
    assert listed.output.splitlines() == tars
    sums = CliRunner().invoke(make_app("export"), ["export", str(root), "--as", "sha256sums"])
    (tmp_path / "sums").write_text(sums.output)
    check = ["sha256sum", "-c", "--strict", str(tmp_path / "sums")]
    done = subprocess.run(check, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [f"{tar}: OK" in done.stdout for tar in tars] == [True, True]
    with open(tars[0], "r+b") as stream:
        stream.write(b"?")
    assert subprocess.run(check, cwd=root, capture_output=True, check=False).returncode == 1


@pytest.mark.parametrize(
    ("extension", "data", "kind", "value"),
    [
        ("cls", b"7", "decimal[9,2]", Decimal(7)), ("cls", b"7", "int8", 7), ("cls", b"1", "bool", True),
        ("txt", b"7\n", "int16", 7), ("txt", b"7", "decimal[9,2]", Decimal(7)), ("txt", b"0.25", "float32", 0.25),
        ("txt", b"20240102", "date", dt.date(2024, 1, 2)), ("txt", b"2024-01-02\n", "date", dt.date(2024, 1, 2)),
        ("txt", b"true", "bool", True), ("txt", b"[1, 2]", "int32[2]", [1, 2]), ("txt", b"7", "str", "7"),
        ("json", b'["a"]', "str[*]", ["a"]), ("json", b"[1, 2]", "int32[*]", [1, 2]), ("json", b"7", "int64", 7),
        ("json", b'"2024-01-02"', "date", dt.date(2024, 1, 2)), ("json", b"[1]", "json", [1]),
    ],
)  # fmt: skip
def test_members_are_of_the_types_that_are_given(
    extension: str, data: bytes, kind: str, value: object, tmp_path: Path
) -> None:
    """A build converts what a member holds; an adoption finds the same where it lies, or refuses."""
    (tmp_path / "tars").mkdir()
    tar = write_tar(tmp_path / "tars/a.tar", {f"{row:02d}.x.{extension}": data for row in range(20)})
    options = ImportOptions(field_types={"x": kind})
    build(tar, tmp_path / "built", options=options)
    expected = [value] * 20
    assert [np.asarray(one["x"]).tolist() for one in shardkit.open(tmp_path / "built")] == expected
    try:
        adopt([tar], tmp_path / "adopted", options=options)
    except SourceError as error:
        assert "read it into shards of its own instead" in str(error)  # noqa: PT017  others are adopted
    else:
        assert [np.asarray(one["x"]).tolist() for one in shardkit.open(tmp_path / "adopted")] == expected
