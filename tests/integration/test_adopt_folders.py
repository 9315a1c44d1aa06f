"""Folders of files, adopted: equal to their files and to a build, in a folder and a bucket, or refused."""

from __future__ import annotations

import csv
import json
import re
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import shardkit
from shardkit.audit import sample_lineage
from shardkit.copies.verify import verify
from shardkit.errors import FormatError, ShardkitError, SourceError, UsageError
from shardkit.formats import Texts
from shardkit.reading.adopted_places import FileGroup
from shardkit.reading.read_path import ReadSettings
from shardkit_tools.adopting import adopt
from shardkit_tools.adopting import adoption as adoption_module
from shardkit_tools.building.build_run import build
from shardkit_tools.importers import ImportOptions
from tests.command_line import typed
from tests.pictures import PNG
from tests.servers.fault_proxy import FaultProxy
from tests.servers.object_stores import s3_client, upload

BUCKETS = ("their-files",)
SETTINGS = ReadSettings(deadline_s=30, attempt_s=5, cool_down_s=0.2)
CLASSES = ("cats", "dogs", "Äpfel + x")
EACH = 14  # files of a class


def write_pictures(folder: Path, captions: int = 3) -> dict[str, bytes]:
    """Write pictures with captions beside two of three; return name → bytes."""
    rng, files = np.random.default_rng(3), {}
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
        for n in range(EACH):
            picture = Image.fromarray(rng.integers(0, 255, (8 + n, 20, 3), np.uint8))
            picture.save(folder / name / f"{n:03d}.png")
            files[f"{name}/{n:03d}.png"] = (folder / name / f"{n:03d}.png").read_bytes()
            if captions and n % captions:
                (folder / name / f"{n:03d}.txt").write_text(f"käption {n}\n")
    return files


def samples_of(root: object) -> list[dict[str, Any]]:
    ds = shardkit.open(str(root), settings=SETTINGS)
    return ds[:]


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_captions_and_metadata_are_joined_as_in_a_build(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "pictures"
    write_pictures(folder)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.png"))
    rows = [{"file_name": name, "score": n / 4, "who": f"Zoë {n}"} for n, name in enumerate(names[:-1])]
    with (folder / f"metadata.{form}").open("w", newline="") as out:
        if form == "jsonl":
            out.writelines(json.dumps(row) + "\n" for row in rows)
        else:
            writer = csv.DictWriter(out, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    adopt([folder], tmp_path / "root", block_size="4KiB")
    found = samples_of(tmp_path / "root")
    texts = [f"käption {n}\n" if n % 3 else None for _ in CLASSES for n in range(EACH)]
    others = [(row["score"], row["who"]) for row in rows] + [(None, None)]
    images = [(folder / name).read_bytes() for name in names]
    assert [(one["image"], one["text"], (one["score"], one["who"])) for one in found] == [
        *zip(images, texts, others, strict=True)
    ]
    assert not list((tmp_path / "root").rglob("*.rows")), "nothing was copied"
    build(str(folder), tmp_path / "built", shuffle=False)
    assert found == samples_of(tmp_path / "built")


def test_a_changed_object_of_a_bucket_is_named(tmp_path: Path, proxy: FaultProxy) -> None:
    write_pictures(tmp_path / "pictures")
    source, root = upload(proxy.endpoint, BUCKETS[0], tmp_path / "pictures"), str(tmp_path / "root")
    adopt([source], root, block_size="4KiB")
    key = f"{source.rpartition('/')[2]}/cats/001.png"
    data = bytearray((tmp_path / "pictures/cats/001.png").read_bytes())
    data[40] ^= 4
    with s3_client(proxy.endpoint) as s3:
        s3.put_object(Bucket=BUCKETS[0], Key=key, Body=bytes(data))
        with pytest.raises(ShardkitError) as raised:
            shardkit.open(root, settings=SETTINGS)[1]
        assert "cats/001.png" in str(raised.value)
        assert [one.name for one in verify(root, level="read").damaged] == [f"{source}/cats/001.png"]
        s3.delete_object(Bucket=BUCKETS[0], Key=key)
    assert [one.name for one in verify(root, level="list").damaged] == [f"{source}/cats/001.png"]


def test_a_copy_of_the_bytes_heals_a_group(tmp_path: Path) -> None:
    folder, root = tmp_path / "pictures", str(tmp_path / "root")
    files = write_pictures(folder)
    adopt([folder], root, block_size="4KiB")
    typed("place", root, "--location", f"b={tmp_path / 'b'},domain=b", "--copies", "2")
    typed("replicate", root)
    (folder / "cats" / "005.png").unlink()
    assert typed("repair", root)[0] == 0
    assert [sample["image"] for sample in samples_of(root)] == [files[name] for name in sorted(files)]


@pytest.mark.parametrize("command", ["adopt", "build"])
def test_bad_files_are_listed_at_once_or_left_out_and_counted(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "shardkit_tools.importers.source_files._TASK_FILES", 4
    )  # bad files are in several tasks
    folder, root = tmp_path / "pictures", str(tmp_path / "root")
    files = write_pictures(folder, captions=0)
    bad = {
        "cats/002.png": files["cats/002.png"][:90],
        "dogs/000.png": b"",
        "dogs/009.png": b"<html>not found</html>",
    }
    for name, data in bad.items():
        (folder / name).write_bytes(data)
    for _ in range(2):  # the second try finds the records of the first
        code, _, said = typed(command, folder, root, "--jobs", "1")
        assert (code, "3 samples cannot be read" in said) == (1, True), said
        assert all(name in said for name in bad)
    code, shown, said = typed(command, folder, root, "--jobs", "1", "--on-error", "skip")
    assert code == 0
    assert re.search("3 (rows|samples that cannot be read)", shown + said)
    found = sorted(sample["image"] for sample in samples_of(root))
    assert found == sorted(data for name, data in files.items() if name not in bad)


def test_strata_are_labels(tmp_path: Path) -> None:
    write_pictures(tmp_path / "pictures", captions=0)
    result = adopt([tmp_path / "pictures"], tmp_path / "root", stratify="label", block_size="2KiB")
    assert result.strata == {"0": EACH, "1": EACH, "2": EACH}
    build(str(tmp_path / "pictures"), tmp_path / "built", stratify="label", shuffle=False)
    assert {one.name for one in shardkit.open(tmp_path / "built").manifest.strata} == set(result.strata)
    found = samples_of(tmp_path / "root")
    assert [sample["label"] for sample in found] == [n for n in range(3) for _ in range(EACH)]


def adopt_killed(
    source: Path, root: Path, monkeypatch: pytest.MonkeyPatch, *, tasks: int, **settings: Any
) -> None:
    """Adopt some tasks of a source, and be interrupted."""
    adopt_file = adoption_module.AdoptWorker.adopt_file
    done: list[Any] = []

    def killed(self: Any, task: Any, *more: Any) -> Any:
        if len(done) == tasks:
            raise KeyboardInterrupt
        done.append(task)
        return adopt_file(self, task, *more)

    with monkeypatch.context() as patch:
        patch.setattr(adoption_module.AdoptWorker, "adopt_file", killed)
        with pytest.raises(KeyboardInterrupt):
            adopt([source], root, **settings)


def test_a_continued_adoption_numbers_the_labels_of_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finished group of dogs has the same files, but another class comes before it."""
    monkeypatch.setattr("shardkit_tools.importers.source_files._TASK_FILES", 4)
    folder, root = tmp_path / "pictures", tmp_path / "root"
    for name in (f"{kind}/{n}.png" for kind in ("cats", "dogs", "eels") for n in range(4)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(PNG + name.encode())
    adopt_killed(folder, root, monkeypatch, tasks=2)
    (folder / "cows").mkdir()
    (folder / "cats" / "3.png").rename(folder / "cows" / "3.png")
    adopt([folder], root)
    assert [sample["label"] for sample in samples_of(root)] == [0, 0, 0, 1, *[2] * 4, *[3] * 4]


def test_texts_and_names_of_every_kind(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    names = ["a b.txt", "nested/deep/c.txt", "nested/n\u0303.txt", "nested/\u00f1.txt", "%41#?.txt"]
    for n, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes("\ufeffzeile\r\n".encode() * n)
    (folder / ".hidden.txt").write_text("no")
    adopt([folder], tmp_path / "root", options=ImportOptions(classes=False))
    build(str(folder), tmp_path / "built", options=ImportOptions(classes=False), shuffle=False)
    found = samples_of(tmp_path / "root")
    assert [sample["text"].encode() for sample in found] == [
        (folder / name).read_bytes().removeprefix(BOM_UTF8) for name in sorted(names)
    ]
    assert found == samples_of(tmp_path / "built")


def test_a_sample_is_one_whole_file(tmp_path: Path) -> None:
    write_pictures(tmp_path / "pictures", captions=0)
    with pytest.raises(UsageError, match="'image' is needed"):
        adopt(
            [tmp_path / "pictures"], tmp_path / "root", options=ImportOptions(field_types={"image": "bytes?"})
        )
    (tmp_path / "a.txt").write_text("two\nlines\n")
    with pytest.raises(UsageError, match="whole files"):
        adopt([tmp_path / "a.txt"], tmp_path / "root", options=ImportOptions(per="line"))


def test_the_file_of_an_adopted_sample_is_named(tmp_path: Path) -> None:
    write_pictures(tmp_path / "pictures")
    rows = [tmp_path / "rows-0.csv", tmp_path / "rows-1.csv"]
    for path in rows:
        path.write_text(f"a\n1\n2\n{path.stem[-1]}\n")
    adopt([str(tmp_path / "pictures")], str(tmp_path / "folder"), jobs=1)
    adopt(list(map(str, rows)), str(tmp_path / "table"), jobs=1)
    first, last = f"{tmp_path}/pictures/cats/000", str(rows[1])
    for root, number, file, row in (("folder", 0, first, 0), ("table", 5, last, 2)):
        ds = shardkit.open(tmp_path / root)
        assert sample_lineage(ds, number)["source"] == {"name": file, "row": row, "sha256": None}
        assert f"shardkit export {tmp_path / root}@main --as urls" in typed("show", tmp_path / root)[1]


def test_splits_and_two_folders_are_refused_with_the_way_on(tmp_path: Path) -> None:
    write_pictures(tmp_path / "data" / "train")
    write_pictures(tmp_path / "data" / "val")
    with pytest.raises(UsageError, match="--ref train"):
        adopt([tmp_path / "data"], tmp_path / "root")
    with pytest.raises(SourceError, match="one folder at a time"):
        adopt([tmp_path / "data" / "train", tmp_path / "data" / "val"], tmp_path / "root")


def test_sizes_of_a_group_that_add_up_to_more_than_int64_are_refused() -> None:
    """They would wrap, and a negative size would be taken for one of a small file."""
    piece = (1 << 40) - 1
    pieces = (1 << 22) + 10
    with pytest.raises(FormatError, match="all pieces have 4611686018427387904 bytes and more"):
        FileGroup(
            digest="sha256:" + "0" * 64,
            names=Texts(np.empty(0, np.uint8), np.zeros(pieces + 1, np.int64)),
            xxh3=np.zeros(pieces, np.uint64),
            piece_size=np.full(pieces, piece),
            piece_is_file=np.ones(pieces, np.uint8),
            values=np.empty(0, np.uint8),
        )


def test_the_names_of_a_group_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    write_pictures(tmp_path / "pictures")
    adopt([tmp_path / "pictures"], tmp_path / "root")
    (document,) = (tmp_path / "root" / "locations").glob("*.files")
    group = FileGroup.from_bytes(document.read_bytes(), "it")
    first = group.names[0]
    evil = ("../" * len(first))[: len(first.encode())]
    data = bytearray(group.names.data.tobytes())
    data[: len(evil)] = evil.encode()
    names = type(group.names)(np.frombuffer(bytes(data), np.uint8), group.names.offsets)
    forged = FileGroup(
        digest=group.digest,
        names=names,
        xxh3=group.xxh3,
        piece_size=group.piece_size,
        piece_is_file=group.piece_is_file,
        values=group.values,
    )
    document.chmod(0o644)
    document.write_bytes(forged.to_bytes())
    with pytest.raises(ShardkitError, match="not the name of a file"):
        samples_of(tmp_path / "root")
    document.write_bytes(b"x" + document.read_bytes()[1:])
    with pytest.raises(ShardkitError):
        samples_of(tmp_path / "root")
