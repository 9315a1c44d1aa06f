"""Forms that sources have besides the plainest: compressed, in one JSON array, in other encodings."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from shardkit.errors import SourceError, UsageError
from shardkit_tools.importers import Importer, ImportOptions, open_source
from shardkit_tools.importers.json_arrays import read_array
from shardkit_tools.importers.protocol import SourceFile
from shardkit_tools.importers.source_files import open_plain
from tests.importer_conformance import check_importer

ROWS = [{"n": n, "text": f"row {n} é"} for n in range(50)]
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstandard.compress,
    "xz": lzma.compress,
    "bz2": lambda data: bz2.compress(data[:99]) + bz2.compress(data[99:]),
}


def samples(path: Path, **options: Any) -> list[dict[str, object]]:
    importer: Importer = open_source(str(path), options=ImportOptions(**options))
    return [dict(row.sample) for row in check_importer(importer)]


def table(delimiter: str = ",") -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, ["n", "text"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return out.getvalue()


TEXTS = {
    "csv": table(),
    "tsv": table("\t"),
    "jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
    "ndjson": "".join(json.dumps(row) + "\n" for row in ROWS),
    "json": json.dumps(ROWS),
}


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize("form", [*TEXTS, "txt"])
def test_each_text_is_read_compressed(tmp_path: Path, form: str, packed: str) -> None:
    path = tmp_path / f"rows.{form}.{packed}"
    text = TEXTS.get(form, "one text é\nof two lines\n")
    path.write_bytes(PACKERS[packed](text.encode()))
    assert samples(path) == (ROWS if form != "txt" else [{"text": text}])
    if form == "txt":
        lines = samples(path, per="line")
        assert lines == [{"text": "one text é"}, {"text": "of two lines"}]


@pytest.mark.parametrize("packed", PACKERS)
def test_a_compressed_text_that_is_cut_names_the_file(tmp_path: Path, packed: str) -> None:
    data = PACKERS[packed](random.Random(1).randbytes(40_000).hex().encode())
    for kept in (len(data) // 2, len(data) - 5):
        path = tmp_path / f"rows.txt.{packed}"
        path.write_bytes(data[:kept])
        with pytest.raises(SourceError, match=r"rows\.txt"):
            samples(path)


@pytest.mark.slow
def test_xz_streams_behind_one_another_are_one_text_and_memory_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.xz"
    lines = [json.dumps(row).encode() + b"\n" for row in ROWS]
    streams = lzma.compress(b"".join(lines[:20])), lzma.compress(b"".join(lines[20:]))
    for padding in (0, 8, 300_000, 600_000):  # more than is read at a time
        for end in (0, padding):
            path.write_bytes(streams[0] + bytes(padding) + streams[1] + bytes(end))
            assert samples(path) == ROWS
    greedy = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30}]
    path.write_bytes(lzma.compress(lines[0], lzma.FORMAT_XZ, filters=greedy))
    with pytest.raises(SourceError, match="Memory usage limit"):
        samples(path)


@given(
    st.lists(st.tuples(st.sampled_from([b"", b"a" * 140_000, b"abcdefg" * 99]), st.booleans(), st.booleans(),
                       st.booleans()), min_size=1, max_size=4),
    st.data(),
)  # fmt: skip
def test_zstd_frames_of_every_kind_are_read_whole_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory,
    frames: list[tuple[bytes, bool, bool, bool]],
    data: st.DataObject,
) -> None:
    """0.1 took the end of a file that was cut for the end of its text."""
    packed, borders, text = b"", {0}, b""
    for content, checksum, sized, skippable in frames:
        if skippable:
            packed += b"\x53\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"extra"
            borders.add(len(packed))
        made = zstandard.ZstdCompressor(write_checksum=checksum, write_content_size=sized)
        if sized:
            packed += made.compress(content)
        else:
            writer = made.compressobj()
            packed += writer.compress(content) + writer.flush()
        borders.add(len(packed))
        text += content
    cut = data.draw(st.sampled_from([0, *range(1, min(len(packed), 30))]) | st.integers(0, len(packed)))
    path = tmp_path_factory.mktemp("zstd") / "text.txt.zst"
    path.write_bytes(packed[: len(packed) - cut])
    file = SourceFile(path.name, str(path), len(packed) - cut, "")
    with open_plain(file) as stream:
        if len(packed) - cut in borders:
            found = stream.read()
            assert text.startswith(found) if cut else found == text
        else:
            with pytest.raises(SourceError, match="cannot be decompressed"):
                stream.read()


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf", b" \n\t"])
def test_a_json_array_is_its_items(tmp_path: Path, indent: int | None, mark: bytes) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(mark + json.dumps(ROWS, indent=indent).encode())
    assert samples(path) == ROWS


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(JSON, max_size=6), st.sampled_from([None, 0, 3]), st.integers(1, 40))
@example(items=[0.0, 1e-300], indent=None, piece=1)
def test_items_are_those_that_were_written_wherever_pieces_end(
    tmp_path_factory: pytest.TempPathFactory, items: list[Any], indent: int | None, piece: int
) -> None:
    path = tmp_path_factory.mktemp("array") / "items.json"
    path.write_text(json.dumps(items, indent=indent), encoding="utf-8")
    file = SourceFile("items.json", str(path), path.stat().st_size, "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardkit_tools.importers.json_arrays._PIECE", piece)
        assert list(read_array(file)) == items


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"a": 1}, {"a": 2}', "item 2.*ends there"),
        ('[{"a": 1}, {"a": ', "item 2: not valid JSON"),
        ('[{"a": 1} {"a": 2}]', "item 1: expected a comma"),
        ('[{"a": 1},]', "item 2: not valid JSON"),
        ('[{"a": 1}] []', "after the end of the array"),
        ('[{"a": 1, "a": 2}]', "key 'a' is given twice"),
        ('[{"a": NaN}]', "NaN is not a JSON number"),
        ("[1, 2]", "item 1: holds a int, not an object"),
        ("[]", "no fields found"),
    ],
)
def test_what_is_no_array_of_objects_is_said(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(SourceError, match=said):
        samples(path)


def test_an_item_that_does_not_fit_costs_itself(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"n": 1}, {"n": "two"}, {"n": 3}]))
    importer = open_source(str(path), options=ImportOptions(skip_bad_rows=True))
    found = list(importer.read(importer.tasks()[0]))
    assert [getattr(row, "sample", None) for row in found] == [{"n": 1}, None, {"n": 3}]


def test_tables_in_other_encodings(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    for encoding in ("latin-1", "cp1252", "utf-16-le", "mac-roman"):
        path.write_bytes(table().encode(encoding))
        assert samples(path, encoding=encoding) == ROWS
    path.write_bytes(table().encode("utf-16"))
    assert samples(path) == ROWS, "a mark says it"
    path.write_bytes(table(";").encode("latin-1"))
    assert samples(path, encoding="latin-1") == ROWS
    with pytest.raises(SourceError, match="--encoding latin-1"):
        samples(path)
    with pytest.raises(SourceError, match="not utf-16"):
        samples(path, encoding="utf-16")
    for name in ("klingon", "hex"):
        with pytest.raises(UsageError, match="no such encoding"):
            samples(path, encoding=name)


def test_the_recipe_names_an_encoding_where_it_is_another(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(table().encode("latin-1"))
    assert open_source(str(path), options=ImportOptions(encoding="latin1")).describe() == {
        "importer": "csv", "encoding": "iso8859-1",
    }  # fmt: skip
    path.write_text(table())
    assert open_source(str(path)).describe() == {"importer": "csv"}
