"""Folders as people have them: what lies beside the samples is named, or left out and told of, never built in."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import shardkit
from shardkit.errors import SourceError
from shardkit_tools import build
from shardkit_tools.adopting import adopt
from shardkit_tools.importers import ImportOptions
from tests.command_line import call
from tests.pictures import JPEG, PNG


def pictures(folder: Path) -> None:
    for label in ("cat", "dog"):
        (folder / label).mkdir()
        for n in range(3):
            (folder / label / f"{n}.jpg").write_bytes(JPEG + b"%d" % n)


def pictures_with_sidecars(folder: Path) -> None:
    for n in range(3):
        (folder / f"{n}.jpg").write_bytes(JPEG + b"%d" % n)
        (folder / f"{n}.json").write_text(json.dumps({"n": n}))
        (folder / f"{n}.txt").write_text(f"caption {n}")


def tables(folder: Path) -> None:
    pa.parquet.write_table(pa.table({"n": [1, 2, 3]}), folder / "a.parquet")


def arrays(folder: Path) -> None:
    np.save(folder / "x.npy", np.arange(4))


def texts(folder: Path) -> None:
    for n in range(3):
        (folder / f"{n}.txt").write_text(f"text {n}")


def documents(folder: Path) -> None:
    (folder / "a.json").write_text('[{"n": 1}]')
    (folder / "b.json").write_text('[{"n": 2}]')


MAKERS = [pictures, pictures_with_sidecars, tables, arrays, texts, documents]
STRAYS = ["README.rst", "LICENSE", "Thumbs.db", "_SUCCESS"]


def build_again(folder: Path, root: Path, *, skip: bool) -> tuple[str, tuple[str, ...]]:
    made = build(folder, root, on_error="skip" if skip else "raise")
    assert made.manifest is not None
    return made.manifest.id, made.notes


@pytest.mark.parametrize("make", MAKERS)
def test_strays_are_named_or_left_out(tmp_path: Path, make: Callable[[Path], None]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    make(source)
    clean, _ = build_again(source, tmp_path / "clean", skip=False)
    for name in STRAYS if make is not texts else STRAYS[1:]:  # a README is a text
        (source / name).write_bytes(b"stray")
    (source / "nothing here").mkdir()
    with pytest.raises(SourceError, match="--on-error skip"):
        build(source, tmp_path / "refused")
    (source / "nothing here").rmdir()
    with pytest.raises(SourceError):
        build(source, tmp_path / "refused")
    (source / "nothing here").mkdir()
    found, notes = build_again(source, tmp_path / "skipped", skip=True)
    assert found == clean, "the version is that of the source without its strays"
    told = "\n".join(notes)
    assert "left out what is empty (1): nothing here/" in told
    assert all(name in told for name in STRAYS[1:])


def test_of_mixed_kinds_most_stay_and_a_tie_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    pictures(source)
    (source / "cat" / "sound.wav").write_bytes(b"RIFF")
    (source / "labels.csv").write_text("a,b\n1,2\n")
    code, told = call("build", source, tmp_path / "root", "--on-error", "skip")
    assert code == 0, told
    assert "left out what is not image (2): cat/sound.wav, labels.csv" in told
    assert len(shardkit.open(tmp_path / "root")) == 6
    code, told = call("build", source, tmp_path / "table", "--on-error", "skip", "--from", "csv")
    assert code == 0, told
    assert len(shardkit.open(tmp_path / "table")) == 1
    even = tmp_path / "even"
    even.mkdir()
    (even / "a.jpg").write_bytes(JPEG)
    (even / "b.csv").write_text("a\n1\n")
    code, told = call("build", even, tmp_path / "tie", "--on-error", "skip")
    assert (code, "several kinds" in told) == (1, True), told


DEBRIS = [
    "_SUCCESS",
    "_metadata",
    "_common_metadata",
    "_started_17",
    "Thumbs.db",
    "cache-0123456789abcdef.arrow",
    "__MACOSX/._x",
    "lost+found/",
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("call_it", [build, adopt])
def test_debris_of_other_programs_is_left_out_and_named(
    tmp_path: Path, make: Callable[[Path], None], call_it: Callable[..., Any]
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    make(source)
    if make is documents and call_it is adopt:
        return  # arrays of JSON are not adopted
    clean = call_it(source, tmp_path / "clean").manifest
    for name in DEBRIS:
        path = source / name
        (path if name.endswith("/") else path.parent).mkdir(exist_ok=True)
        if not name.endswith("/"):
            path.write_bytes(b"debris")
    found = call_it(source, tmp_path / "found")
    assert found.manifest.id == clean.id
    (note,) = [note for note in found.notes if "what other programs write next to samples (" in note]
    assert all(name.partition("/")[0] in note for name in sorted(DEBRIS)[:5])


@pytest.mark.parametrize("pattern", ["_*", "cache-*.arrow"])
def test_a_pattern_that_only_debris_matches_says_so(tmp_path: Path, pattern: str) -> None:
    for name in ("_SUCCESS", "cache-0123456789abcdef.arrow"):
        (tmp_path / name).write_bytes(b"debris")
    with pytest.raises(SourceError, match="no file that matches is a sample"):
        build(tmp_path / pattern, tmp_path / "root")


def test_a_class_with_nothing_but_debris_is_empty(tmp_path: Path) -> None:
    pictures(tmp_path)
    (tmp_path / "fox").mkdir()
    (tmp_path / "fox" / "Thumbs.db").write_bytes(b"debris")
    with pytest.raises(SourceError, match="fox: an empty folder"):
        build(tmp_path, tmp_path / "root")


@pytest.mark.parametrize(
    ("log", "table"),
    [
        ("_delta_log/0.json", "Delta Lake"),
        (".hoodie/hoodie.properties", "Hudi"),
        ("metadata/v1.metadata.json", "Iceberg"),
        ("x.lance/_versions/1.manifest", "Lance"),
    ],
)
def test_tables_whose_files_are_not_all_current_are_refused(tmp_path: Path, log: str, table: str) -> None:
    source = tmp_path / "source"
    (source / log).parent.mkdir(parents=True)
    (source / log).write_text("{}")
    tables(source)
    for command in ("build", "adopt"):
        code, told = call(command, source, tmp_path / "root", "--on-error", "skip")
        assert (code, f"a {table} table" in told) == (1, True), told
    assert build(source / "*.parquet", tmp_path / "root").rows == 3


# ---- Files that cannot be opened, among good ones


def _arrow(path: Path) -> None:
    table = pa.table({"n": [1, 2]})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def _png(path: Path) -> None:
    path.write_bytes(PNG + path.name.encode())


GOOD: dict[str, Callable[[Path], object]] = {
    "parquet": lambda path: pa.parquet.write_table(pa.table({"n": [1, 2]}), path),
    "arrow": _arrow,
    "csv": lambda path: path.write_text("n\n1\n2\n"),
    "jsonl": lambda path: path.write_text('{"n": 1}\n{"n": 2}\n'),
    "jsonl.gz": lambda path: path.write_bytes(gzip.compress(b'{"n": 1}\n')),
    "csv.gz": lambda path: path.write_bytes(gzip.compress(b"n\n1\n")),
    "npy": lambda path: np.save(path, np.arange(4)),
    "npz": lambda path: np.savez(path, n=np.arange(4)),
    "bin": lambda path: path.write_bytes(bytes(8)),
    "png": _png,
}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
TOKENS = ImportOptions(dtype="uint16", row=4)


@pytest.mark.parametrize("suffix", GOOD)
@pytest.mark.parametrize("bad", ["0", "2"])  # before and after the good file
@pytest.mark.parametrize("data", [b"\0" * 64, POINTER], ids=["zeros", "pointer"])
@pytest.mark.parametrize("call_it", [build, adopt])
def test_a_file_that_cannot_be_opened_is_named_or_left_out(
    tmp_path: Path, suffix: str, bad: str, data: bytes, call_it: Callable[..., Any]
) -> None:
    if call_it is adopt and suffix not in ("parquet", "arrow", "csv", "jsonl", "npy", "bin", "png"):
        return  # not adopted
    if data != POINTER and suffix in ("csv", "bin"):
        return  # a header, and tokens
    source = tmp_path / "source"
    source.mkdir()
    GOOD[suffix](source / f"1.{suffix}")
    options = TOKENS if suffix == "bin" else ImportOptions()
    clean = call_it(source, tmp_path / "clean", options=options).rows
    (source / f"{bad}.{suffix}").write_bytes(data)
    packed = suffix.endswith("gz")
    why = "git lfs pull" if data == POINTER else "cannot be decompressed" if packed else f"{bad}.{suffix}"
    with pytest.raises(SourceError, match=why):
        call_it(source, tmp_path / "refused", options=options)
    skipping = replace(options, skip_bad_rows=True)
    more = {"on_error": "skip"} if call_it is build else {}
    found = call_it(source, tmp_path / "skipped", options=skipping, **more)
    assert found.rows == clean
    told = [*found.notes, *map(str, found.skipped)]
    assert any(f"{bad}.{suffix}" in one for one in told), "what was lost is named"
