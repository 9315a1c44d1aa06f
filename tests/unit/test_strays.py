"""Folders as people have them: what lies beside the samples is named, or left out and told of, never built in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import shardkit
from shardkit.errors import SourceError
from shardkit_tools import build
from tests.command_line import call

JPEG = b"\xff\xd8\xff"


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
