from __future__ import annotations

import csv
import json
import os
import sys
import tempfile
import unicodedata
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import NotFoundError, ShardkitError, SourceError
from shardkit_tools.importers import ImportOptions, SourceFailure, folder, open_source
from shardkit_tools.importers.source_kinds import list_source
from tests.importer_conformance import check_importer, read_all
from tests.pictures import JPEG, PNG, encoded, photograph


def tree(root: Path, files: dict[str, bytes]) -> str:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return str(root)


def test_unknown_extensions_are_blobs(tmp_path: Path) -> None:
    assert list(open_source(tree(tmp_path, {"a.dat": b"1", "b.xyz": b"2", "c": b"3"})).schema) == ["blob"]


def test_classes_can_be_switched_off(tmp_path: Path) -> None:
    source = tree(tmp_path, {"x/1.png": PNG, "2.png": PNG})
    with pytest.raises(SourceError, match=r"2\.png: lies beside the class folders"):
        open_source(source)
    importer = open_source(source, options=ImportOptions(classes=False))
    assert "label" not in importer.schema
    assert len(check_importer(importer)) == 2


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.png": PNG, "b.wav": b"RIFF"}, r"mixed: audio \(b\.wav\), image \(a\.png\)"),
        ({"a.png": PNG, "a.jpg": JPEG}, r"a\.png: has the same stem as a\.jpg"),
        ({"a.png": PNG, "metadata.csv": b"file_name,t\n,x"}, r"metadata\.csv line 2: no file_name"),
        ({"a.png": PNG, "metadata.csv": b"name,t\na.png,x"}, r"metadata\.csv: no field 'file_name'"),
        ({"a.png": PNG, "metadata.csv": b"file_name,image\na.png,x"}, r"field 'image' has the name"),
        (
            {"x/a.png": PNG, "metadata.csv": b"file_name\nx/a.png", "x/metadata.csv": b"file_name\na.png"},
            r"x/metadata\.csv line 2: 'a\.png' has a row before it",
        ),
        ({"a.png": PNG, "metadata.csv": b"file_name\na.png", "x/metadata.jsonl": b"{}"}, r"several kinds"),
        ({"a.png": PNG, "a.txt": b"t", "c.txt": b"t"}, r"c\.txt: a sidecar without its sample"),
        (
            {"a.png": PNG, "annotations.json": b'{"images": [], "annotations": []}'},
            r"annotations\.json: a sidecar .*--on-error skip.*COCO's, are read as metadata\.jsonl",
        ),
        ({"a.png": PNG, "b.png": b""}, r"b\.png: an empty file"),
        ({"a.png": PNG, "b.png": b"<html>404</html>"}, r"b\.png: not an image \(it starts with 3c 68"),
        ({"a.png": PNG, "a.json": b"{"}, r"a\.json: not valid JSON"),
        (
            {"a.png": PNG, "a.json": b'{"x": 1, "x": 2}'},
            r"a\.json: not valid JSON \(the key 'x' is given twice",
        ),
        ({"a.png": PNG, "a.json": b'{"x": NaN}'}, r"a\.json: not valid JSON \(NaN"),
        ({"a.png": PNG, "a.json": b"[1]"}, r"a\.json: holds a list"),
        ({"a.png": PNG, "a.txt": b"\xff"}, r"a\.txt: not UTF-8 \(byte 0 is 0xff\)"),
        ({"a.json": b"{}", "b.txt": b""}, r"only sidecars"),
    ],
)
def test_errors_name_the_file(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        read_all(open_source(tree(tmp_path, files), "folder"))


def test_empty_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="holds no files"):
        open_source(str(tmp_path))
    tree(tmp_path, {"cat/a.png": PNG})
    (tmp_path / "dog").mkdir()
    with pytest.raises(SourceError, match="dog: an empty folder"):
        open_source(str(tmp_path))


def test_a_dataset_is_no_source(tmp_path: Path) -> None:
    source = tree(tmp_path, {"photos/a.png": PNG})
    assert len(read_all(open_source(source))) == 1
    tree(tmp_path, {"built/shardkit.json": b"{}", "built/log/1.json": b"{}"})
    for place in (source, f"{source}/built"):
        with pytest.raises(SourceError, match=r"built/?: a dataset, whose shards are no samples"):
            open_source(place)


def test_links_out_of_the_source_and_special_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(PNG)
    source = tree(tmp_path / "s", {"a.png": PNG})
    os.symlink("a.png", tmp_path / "s" / "b.png")
    assert len(read_all(open_source(source))) == 2
    os.symlink("../secret.png", tmp_path / "s" / "c.png")
    with pytest.raises(SourceError, match=r"c\.png: a symbolic link out of the source"):
        open_source(source)
    with pytest.raises(SourceError, match=r"c\.png: a symbolic link out of the source"):
        open_source(source + "/*.png")
    os.unlink(tmp_path / "s" / "c.png")
    os.mkfifo(tmp_path / "s" / "d.png")
    with pytest.raises(SourceError, match=r"d\.png: neither a file nor a folder"):
        open_source(source)


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["file", "link", "linked folder"])), max_size=8
    ),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_links_are_followed_on_request_or_where_all_files_are_links(
    entries: list[tuple[str, str]], follow: bool
) -> None:
    """The same samples as from a copy without links, or an error that names a link."""
    with tempfile.TemporaryDirectory() as text:
        source, pool = Path(text, "source"), Path(text, "pool")
        wanted = {}
        for number, (folder, how) in enumerate(entries):
            place = source / folder / (f"f{number}" if how == "linked folder" else f"{number}.png")
            place.parent.mkdir(parents=True, exist_ok=True)
            data = PNG + bytes([number])
            if how == "file":
                place.write_bytes(data)
            elif how == "link":
                pool.mkdir(exist_ok=True)
                (pool / f"{number}.png").write_bytes(data)
                place.symlink_to(pool / f"{number}.png")
            else:
                (pool / f"f{number}").mkdir(parents=True)
                (pool / f"f{number}" / "x.png").write_bytes(data)
                place.symlink_to(pool / f"f{number}")
            wanted[f"{folder}/f{number}/x" if how == "linked folder" else f"{folder}/{number}"] = data
        if not wanted:
            return
        kinds = {how for _, how in entries}
        options = ImportOptions(follow_links=follow)
        if "file" in kinds and len(kinds) > 1 and not follow:
            with pytest.raises(SourceError, match=r"symbolic link out of the source .*--follow-links"):
                open_source(str(source), options=options)
            return
        rows = read_all(open_source(str(source), options=options))
        assert {row.key: row.sample["image"] for row in rows} == wanted


@pytest.mark.parametrize("given", ["", "/*.png"])
def test_a_file_that_a_link_gives_a_second_time_is_noted(tmp_path: Path, given: str) -> None:
    tree(tmp_path, {"a.png": PNG})
    (tmp_path / "b.png").symlink_to("a.png")
    importer = open_source(f"{tmp_path}{given}")
    assert len(read_all(importer)) == 2
    assert any(
        "links inside the source count as files (1): b.png to" in note for note in importer.source.notes
    )


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_loops_of_links_are_named(tmp_path: Path, steps: int) -> None:
    """A folder that leads to itself through links, whether inside the source or through other folders."""
    tree(tmp_path, {"source/a.png": PNG})
    names = ["source", *(f"other{n}" for n in range(steps - 1))]
    for name, following in zip(names, [*names[1:], "source"], strict=True):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "next").symlink_to(tmp_path / following)
    with pytest.raises(SourceError, match=r"next: a loop of symbolic links"):
        open_source(str(tmp_path / "source"), options=ImportOptions(follow_links=True))


def test_links_to_folders_and_dangling_links_are_refused(tmp_path: Path) -> None:
    source = tree(tmp_path, {"cat/a.png": PNG})
    os.symlink("cat", tmp_path / "dog")
    with pytest.raises(SourceError, match="dog: a link to a folder"):
        open_source(source)
    os.unlink(tmp_path / "dog")
    os.symlink("nowhere", tmp_path / "cat" / "b.png")
    with pytest.raises(SourceError, match=r"b\.png: a symbolic link to .*does not exist"):
        open_source(source)


def test_a_file_that_changes_or_vanishes_is_named(tmp_path: Path) -> None:
    importer = open_source(tree(tmp_path, {"a.png": PNG, "b.png": PNG}))
    (tmp_path / "a.png").write_bytes(PNG + b"longer")
    with pytest.raises(SourceError, match=r"a\.png: changed since it was listed"):
        read_all(importer)
    os.unlink(tmp_path / "a.png")
    with pytest.raises(SourceError, match=r"a\.png: cannot be read"):
        read_all(importer)


def test_globs_and_missing_sources(tmp_path: Path) -> None:
    root = tree(tmp_path, {"x/a.png": PNG, "x/b.json": b"{}", "y/c.png": PNG})
    importer = open_source(f"{root}/**/*.png")
    assert [row.source_name for row in check_importer(importer)] == ["x/a.png", "y/c.png"]
    for missing in (f"{root}/nothing", f"{root}/*.gif"):
        with pytest.raises(NotFoundError, match=missing.replace("*", r"\*")):
            open_source(missing)


def test_records_beside_other_files_are_not_taken_for_samples(tmp_path: Path) -> None:
    source = tree(tmp_path, {"a.jsonl": b"{}", "README.md": b"hello"})
    with pytest.raises(SourceError, match=r"several kinds \(README\.md, a\.jsonl\); give a glob"):
        open_source(source)
    with pytest.raises(ShardkitError, match="no such importer; expected one of"):
        open_source(source, "excel")


@given(
    st.lists(
        st.tuples(st.sampled_from(["", "x/", "x/y/"]), st.booleans(), st.booleans()), min_size=1, max_size=6
    ),
    st.sampled_from(["jsonl", "csv", "parquet"]),
    st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_captions_are_joined_by_name_and_missing_ones_are_null(
    pictures: list[tuple[str, bool, bool]], suffix: str, nested: bool
) -> None:
    """Sidecars and rows of metadata, each missing for some files; metadata of a folder names its own files."""
    with tempfile.TemporaryDirectory() as text:
        root, rows, wanted = Path(text), [], {}
        for number, (folder, has_sidecar, has_row) in enumerate(pictures):
            tree(root, {f"{folder}{number}.png": PNG})
            row = {"file_name": f"{folder}{number}.png", "caption": f"caption {number}", "label": number}
            if has_sidecar:
                tree(root, {f"{folder}{number}.txt": b"text %d" % number})
            if has_row:
                rows.append(row)
            wanted[f"{folder}{number}"] = (
                f"text {number}" if has_sidecar else None,
                *((row["caption"], row["label"]) if has_row else (None, None)),
            )
        inside = [row for row in rows if nested and str(row["file_name"]).startswith("x/")]
        above = [row for row in rows if row not in inside]
        if above:
            write_metadata(root / f"metadata.{suffix}", above)
        if inside:
            named = [row | {"file_name": str(row["file_name"])[2:]} for row in inside]
            write_metadata(root / "x" / f"metadata.{suffix}", named)
        samples = check_importer(open_source(text, options=ImportOptions(classes=False)))
        found = {
            row.key: tuple(row.sample.get(name) for name in ("text", "caption", "label")) for row in samples
        }
        assert found == wanted


def write_metadata(path: Path, rows: list[dict[str, object]]) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as out:
            table = csv.DictWriter(out, rows[0])
            table.writeheader()
            table.writerows(rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.mark.parametrize(
    ("check", "form", "is_found"),
    [
        *[("decode", form, True) for form in ("JPEG", "PNG", "GIF", "BMP")],
        *[("", form, True) for form in ("JPEG", "PNG", "GIF", "WEBP")],
        *[("", form, False) for form in ("BMP", "TIFF")],
        *[("none", form, False) for form in ("JPEG", "WEBP")],
    ],
)
def test_pictures_cut_short_are_found_where_they_are_decoded(
    tmp_path: Path, check: Literal["", "decode", "none"], form: str, is_found: bool
) -> None:
    whole = encoded(photograph(0, 256, 192), form)
    cuts = [len(whole) * part // 8 for part in range(2, 7)]
    files = {f"{cut:06}.jpg": whole[:cut] for cut in cuts}
    source = open_source(tree(tmp_path, {**files, "whole.jpg": whole}), options=ImportOptions(check=check))
    rows = [row for task in source.tasks() for row in source.read(task)]
    assert [isinstance(row, SourceFailure) for row in rows] == [is_found] * len(cuts) + [False]


def test_large_folders_and_machines_without_pillow_say_that_pictures_are_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tree(tmp_path, {"1.jpg": JPEG[:-300], "2.jpg": JPEG, "3.jpg": JPEG})
    monkeypatch.setattr(folder, "_DECODED_FILES", 2)
    for check in ("", "decode", "none"):
        folder.why_not_decoded.cache_clear()
        opened = open_source(source, options=ImportOptions(check=check))
        assert isinstance(opened, folder.FolderImporter)
        said = [note for note in opened.source.notes if "--check decode" in note]
        assert [note.partition(", because ")[2].partition(";")[0] for note in said] == (
            [] if check else ["there are more than 2"]
        )
        rows = [row for task in opened.tasks() for row in opened.read(task)]
        assert isinstance(rows[0], SourceFailure) is (check == "decode")
    folder.why_not_decoded.cache_clear()
    monkeypatch.setattr(folder, "_DECODED_FILES", 3)
    monkeypatch.setitem(sys.modules, "PIL", None)
    opened = open_source(source)
    assert isinstance(opened, folder.FolderImporter)
    assert [note for note in opened.source.notes if "Pillow is not installed" in note]
    folder.why_not_decoded.cache_clear()


def test_metadata_joins_names_of_another_unicode_form(tmp_path: Path) -> None:
    """macOS decomposes the names of files; the JSON that names them is composed."""
    for name in ("é", "ü", "x"):
        (tmp_path / f"{unicodedata.normalize('NFD', name)}.png").write_bytes(PNG + name.encode())
    rows = [{"file_name": f"{name}.png", "text": name} for name in ("é", "ü")]
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {row.sample["image"]: row.sample.get("text") for row in read_all(open_source(str(tmp_path)))}
    assert found == {PNG + name.encode(): None if name == "x" else name for name in ("é", "ü", "x")}


def test_metadata_that_names_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(PNG)
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "images/1.png", "text": "x"}\n')
    with pytest.raises(SourceError, match=r"it names images/1\.png, and there is 1\.png"):
        open_source(str(tmp_path))


@pytest.mark.parametrize(
    "name",
    ["a.h5", "train.tfrecord-00000-of-00002", "b.ZIP", "c.pth", "d.tfrecord.gz", "chunk-0-1.zstd.bin", "a.mat", "a.rds",
     "a.dta", "a.safetensors"],
)  # fmt: skip
def test_containers_that_are_not_read_are_no_samples_of_bytes(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(SourceError, match=r"not read; (convert|write).*--from folder"):
        open_source(str(tmp_path))
    assert len(read_all(open_source(str(tmp_path), "folder"))) == 1


def test_links_to_nothing_and_files_without_rights_can_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(PNG)
    (tmp_path / "2.png").symlink_to(tmp_path / "gone.png")
    listed = list_source(str(tmp_path), skip=True)
    assert ([file.name for file in listed.files], listed.left_out) == (
        ["1.png"],
        {"2.png": "what cannot be read"},
    )
    listed = list_source(f"{tmp_path}/*.png", skip=True)
    assert ([file.name for file in listed.files], listed.left_out) == (
        ["1.png"],
        {"2.png": "what cannot be read"},
    )


def test_names_that_look_like_patterns_and_urls_of_files(tmp_path: Path) -> None:
    folder = tmp_path / "v[1] 100%"
    folder.mkdir()
    (folder / "1.png").write_bytes(PNG)
    sources = [f"{folder}", f"{folder}/*.png", f"file://{folder}", f"file://{quote(str(folder))}/1.png"]
    assert [[file.name for file in list_source(source).files] for source in sources] == [["1.png"]] * 4
