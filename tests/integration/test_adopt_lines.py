"""JSON lines and CSV, adopted: equal to json, to csv and to a build; bad lines are listed or left out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.copies.verify import verify
from shardkit.errors import SourceError, UsageError
from shardkit.reading.read_path import ReadSettings
from shardkit_tools.adopting import adopt
from shardkit_tools.importers import ImportOptions
from tests.integration.test_adopt_folders import adopt_killed

SETTINGS = ReadSettings(deadline_s=30, attempt_s=5, cool_down_s=0.2)


def rows_of(root: object) -> list[dict[str, Any]]:
    ds = shardkit.open(str(root), settings=SETTINGS)
    return ds[:]


def json_row(n: int) -> dict[str, Any]:
    row = {
        "id": n,
        "text": f"Zeile {n} \u2028 é\n",
        "x": n / 3,
        "tags": [n, "a", None],
        "of": {"z": 1, "a": None},
        "ok": n % 2 == 0,
        "big": 2**63 + n,
        "none": None,
    }
    return row if n % 5 else row | {"late": -n}


def write_json(folder: Path) -> list[dict[str, Any]]:
    """Write JSON lines with a byte-order mark, both line ends and empty lines; return the rows."""
    folder.mkdir()
    rows = [json_row(n) for n in range(240)]
    for file in range(3):
        with (folder / f"{file}.jsonl").open("w", newline="", encoding="utf-8") as out:
            out.write("\ufeff" * (file == 1))
            for n in range(80 * file, 80 * file + 80):
                out.write(json.dumps(rows[n], ensure_ascii=bool(n % 2)) + ("\r\n" if n % 7 == 0 else "\n"))
                out.write("  \n" * (n % 11 == 0))
    (folder / "empty.jsonl").write_bytes(b"")
    return rows


def test_bad_lines_are_listed_or_left_out_and_counted(tmp_path: Path) -> None:
    rows = write_json(tmp_path / "lines")
    path = tmp_path / "lines" / "0.jsonl"
    lines = path.read_bytes().split(b"\n")
    full = [place for place, line in enumerate(lines) if line.strip()]
    bad = {0: b'{"id": oops}', 30: b"[1]", 31: b'{"id": "x"}', 79: b'{"id": 1, "id": 2}'}
    for row, text in bad.items():
        lines[full[row]] = text
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(SourceError, match="line 1: not valid JSON"):
        adopt([tmp_path / "lines"], tmp_path / "root")
    options = ImportOptions(skip_bad_rows=True)
    result = adopt([tmp_path / "lines"], tmp_path / "root", options=options, block_size="2KiB")
    assert (result.rows, len(result.skipped)) == (236, 4)
    expected = [{"late": None} | row for n, row in enumerate(rows) if n not in bad]
    assert rows_of(tmp_path / "root") == expected
    assert not verify(str(tmp_path / "root"), level="decode").exit_code


def test_what_cannot_be_adopted_is_named_with_the_way_on(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"a": 1}]')
    with pytest.raises(SourceError, match=r"one JSON array.*shardkit build"):
        adopt([tmp_path / "a.json"], tmp_path / "root")
    (tmp_path / "w.csv").write_bytes("a,b\n1,2\n".encode("utf-16"))
    with pytest.raises(SourceError, match=r"utf-16.*shardkit build"):
        adopt([tmp_path / "w.csv"], tmp_path / "root")
    (tmp_path / "q.tsv").write_text('a\tb\n"x\t1\n')
    with pytest.raises(SourceError, match="--quote none"):
        adopt([tmp_path / "q.tsv"], tmp_path / "root")
    adopt([tmp_path / "q.tsv"], tmp_path / "root", options=ImportOptions(quote="none"))
    assert rows_of(tmp_path / "root") == [{"a": '"x', "b": 1}]


@pytest.mark.parametrize("options", [ImportOptions(flatten=True), ImportOptions(rename={"n": "m"})])
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_other_fields_than_the_stored_ones_are_refused(
    tmp_path: Path, name: str, options: ImportOptions
) -> None:
    """Readers of adopted files know neither, and members of objects would be null in every row."""
    rows = [{"a": {"b": n}, "n": n} for n in range(2)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"n": 3}]))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=r"(flatten|rename): .*shardkit build"):
        adopt([tmp_path / name], tmp_path / "root", options=options)


def test_a_continued_adoption_reads_cells_as_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cells"
    folder.mkdir()
    for name in ("a.csv", "b.csv", "c.csv"):
        (folder / name).write_text(f'a,b\n"x",1\n{name},2\n')
    adopt_killed(folder, tmp_path / "root", monkeypatch, tasks=2)
    adopt([folder], tmp_path / "root", options=ImportOptions(quote="none"))
    assert [row["a"] for row in rows_of(tmp_path / "root")][::2] == ['"x"'] * 3


def test_uneven_lines_make_smaller_blocks(tmp_path: Path) -> None:
    with (tmp_path / "a.jsonl").open("w") as out:
        out.writelines(json.dumps({"t": "x" * (5 if n < 500 else 20_000)}) + "\n" for n in range(600))
    adopt([tmp_path / "a.jsonl"], tmp_path / "root", block_size="1KiB")
    index = shardkit.open(tmp_path / "root").reader.index(0)
    assert int(index.block_size.max()) <= 64 << 10
    assert [len(row["t"]) for row in rows_of(tmp_path / "root")] == [5] * 500 + [20_000] * 100


_READ_CSV = """
import sys
import shardkit
from shardkit_tools.adopting import adopt
from shardkit_tools.building.build_run import build
build("a.csv", "built", jobs=1)
adopt(["a.csv"], "adopted")
assert shardkit.open("built")[:] == shardkit.open("adopted")[:]
assert "pandas" not in sys.modules
"""


def test_tables_of_text_do_not_import_pandas(tmp_path: Path) -> None:
    """It takes half a second, and `pyarrow.array` and `to_numpy` import it if it is installed."""
    pytest.importorskip("pandas")
    (tmp_path / "a.csv").write_bytes(b'a,b,c,d\n1,x,true,\n2,"y",false,1.5\n')
    subprocess.run([sys.executable, "-c", _READ_CSV], cwd=tmp_path, check=True)


_TEXT = st.text(max_size=12).map(lambda text: text.encode("utf-8", "replace").decode())
_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)
_ENDS = st.sampled_from(["\n", "\r\n", "\n\n", "\n \t\r\n"])


@settings(max_examples=25)
@given(st.lists(st.tuples(_TEXT, _JSON, _ENDS), min_size=1, max_size=30), st.booleans())
def test_any_json_comes_back(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[str, Any, str]], is_ascii: bool
) -> None:
    folder = tmp_path_factory.mktemp("any")
    with (folder / "a.jsonl").open("w", newline="", encoding="utf-8") as out:
        for text, value, end in lines:
            out.write(json.dumps({"t": text, "v": value}, ensure_ascii=is_ascii) + end)
    options = ImportOptions(field_types={"v": "json"})
    adopt([folder / "a.jsonl"], folder / "root", block_size=100, options=options)
    assert rows_of(folder / "root") == [{"t": text, "v": value} for text, value, _ in lines]
