"""Builds that pack documents into rows or keep the first of equal values: one id for any jobs and after kills."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardkit
import shardkit_tools
from shardkit.dataset.scratch import ScratchFolder
from shardkit.errors import ConfigurationError, SourceError, UsageError
from shardkit_tools.building import engines
from shardkit_tools.building import packing as packing_module
from shardkit_tools.building.packing import pack
from shardkit_tools.building.passes import RowMarks, first_of_equals
from shardkit_tools.importers import ImportOptions, line_ranges
from tests.command_line import document_of, output_of
from tests.faults.killed_operations import run_in_child

# ---- `build --pack`: every token once, document borders kept, little padding, one id for any jobs and after kills


OPTIONS = ImportOptions(field_types={"tokens": "int32[*]"})


@given(lengths=st.lists(st.integers(0, 70), max_size=80), capacity=st.integers(1, 40))
def test_every_item_is_in_one_row_and_only_long_documents_are_cut(lengths: list[int], capacity: int) -> None:
    packing = pack(np.array(lengths, dtype=np.int64), capacity)
    seen: Counter[tuple[int, int]] = Counter()
    fill = []
    for row in range(len(packing)):
        pieces = range(int(packing.row_start[row]), int(packing.row_start[row + 1]))
        fill.append(sum(int(packing.length[piece]) for piece in pieces))
        assert 0 < fill[-1] <= capacity
        numbers = [int(packing.document[piece]) for piece in pieces]
        assert numbers == sorted(set(numbers))
        for piece in pieces:
            start, length = int(packing.start[piece]), int(packing.length[piece])
            seen.update((int(packing.document[piece]), at) for at in range(start, start + length))
    assert seen == Counter((n, at) for n, length in enumerate(lengths) for at in range(length))
    pieces_of = Counter(packing.document.tolist())
    assert all(pieces_of[n] == 1 for n, length in enumerate(lengths) if 0 < length <= capacity)
    # Best fit never opens a row that it does not need: no two rows would fit into one.
    assert all(a + b > capacity for a, b in zip(sorted(fill), sorted(fill)[1:], strict=False))


def test_best_fit_takes_the_fullest_row_that_has_room() -> None:
    packing = pack(np.array([6, 5, 2, 4, 3], dtype=np.int64), 10)
    rows = [
        packing.document[a:b].tolist() for a, b in zip(packing.row_start, packing.row_start[1:], strict=False)
    ]
    # 6 opens a row and 5 another; 4 goes to the 6 (room 4, not 5), 3 to the 5, 2 to what is left of that one.
    assert rows == [[0, 3], [1, 2, 4]]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_ranges, "_RANGE_BYTES", 2_000)
    monkeypatch.setattr(line_ranges, "READ_BYTES", 500)
    monkeypatch.setattr(engines, "SMALL_BYTES", 0)
    monkeypatch.setattr(packing_module, "_GROUP_BYTES", 3_000)


def documents(path: Path, lengths: list[int]) -> list[list[int]]:
    """Documents whose tokens are all different, of languages by turns."""
    made = []
    at = 1
    with path.open("w") as lines:
        for n, length in enumerate(lengths):
            made.append(list(range(at, at + length)))
            at += length
            lines.write(json.dumps({"tokens": made[-1], "lang": ["de", "en"][n % 3 == 0], "n": n}) + "\n")
    return made


def check(root: Path, made: list[list[int]], length: int, strata: dict[int, str] | None = None) -> None:
    ds = shardkit.open(str(root))
    found: dict[int, list[int]] = {}
    for number in range(len(ds)):
        row: dict[str, Any] = ds[number]
        borders, tokens = row["boundaries"].tolist(), row["tokens"].tolist()
        assert len(tokens) == length
        assert borders[0] == 0
        assert not any(tokens[borders[-1] :])
        for begin, end in itertools.pairwise(borders):
            assert begin < end
            assert tokens[begin:end] == list(range(tokens[begin], tokens[begin] + end - begin))
            assert tokens[begin] not in found
            found[tokens[begin]] = tokens[begin:end]
            if strata is not None:
                assert strata[tokens[begin]] == row["lang"]
    assert [token for first in sorted(found) for token in found[first]] == [t for one in made for t in one]
    # What is found begins where documents begin, or a multiple of the length behind that.
    assert set(found) == {one[at] for one in made for at in range(0, len(one), length)}


@pytest.mark.usefixtures("small")
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=60).filter(any),
    length=st.integers(1, 64),
    shuffle=st.booleans(),
)
def test_packed_rows_hold_every_token_once(
    tmp_path: Path, lengths: list[int], length: int, *, shuffle: bool
) -> None:
    folder = tmp_path / secrets.token_hex(8)
    folder.mkdir()
    made = documents(folder / "a.jsonl", lengths)
    named: dict[str, Any] = {
        "options": OPTIONS,
        "pack": {"tokens": length},
        "shuffle": shuffle,
        "format": "arrow",
    }
    result = shardkit_tools.build(folder / "a.jsonl", folder / "root", **named)
    check(folder / "root", made, length)
    assert result.packed is not None
    assert result.packed.tokens == sum(lengths)
    assert result.packed.padding == result.rows * length - sum(lengths)
    counted = shardkit_tools.build(folder / "a.jsonl", folder / "root", dry_run=True, **named)
    assert (counted.packed, counted.rows, counted.raw_bytes) == (result.packed, result.rows, result.raw_bytes)


LENGTHS = [(n * 37) % 101 for n in range(200)]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("format", [pytest.param("tar", marks=pytest.mark.slow), "arrow"])
def test_strata_are_not_mixed_and_jobs_do_not_matter(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if format == "tar":  # headers count
        monkeypatch.setattr(packing_module, "_GROUP_BYTES", 150_000)
    made = documents(tmp_path / "a.jsonl", LENGTHS)
    ids = set()
    for jobs in (1, 2):
        result = shardkit_tools.build(
            tmp_path / "a.jsonl",
            tmp_path / f"{jobs}",
            options=OPTIONS,
            pack={"tokens": 64},
            stratify="lang",
            unique="n",
            split={"a": 0.4, "b": 0.6},
            split_by="lang",
            format=format,
            jobs=jobs,
        )
        assert result.manifest is not None
        ids.add(result.manifest.id)
    assert len(ids) == 1
    assert result.packed is not None
    assert result.packed.padding < 0.2 * result.packed.tokens
    langs = {token: ["de", "en"][n % 3 == 0] for n, one in enumerate(made) for token in one}
    check(tmp_path / "2", made, 64, langs)
    assert result.manifest is not None
    assert result.manifest.build["pack"] == {"field": "tokens", "length": 64}
    held = [
        {shardkit.open(f"{tmp_path / '2'}@{name}")[n]["lang"] for n in range(split.selected)}
        for name, split in result.splits.items()
    ]
    assert not set.intersection(*held)
    assert sum(split.selected for split in result.splits.values()) == result.rows


@pytest.mark.usefixtures("small")
def test_a_build_that_is_killed_while_it_packs_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents(tmp_path / "a.jsonl", LENGTHS)
    named: dict[str, Any] = {"options": OPTIONS, "pack": {"tokens": 64}}
    whole = shardkit_tools.build(tmp_path / "a.jsonl", tmp_path / "whole", **named)
    put, left = ScratchFolder.put_record, [4]

    def put_or_die(folder: ScratchFolder, name: str, data: bytes, **how: bool) -> None:
        if name.startswith("packed-"):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
        put(folder, name, data, **how)

    def die() -> None:
        monkeypatch.setattr(ScratchFolder, "put_record", put_or_die)
        shardkit_tools.build(tmp_path / "a.jsonl", tmp_path / "root", **named)

    assert run_in_child(die) == -signal.SIGKILL
    packed = []
    real = packing_module.PackWorker.work

    def counted(self: packing_module.PackWorker, *arguments: Any) -> Any:
        packed.append(arguments[0].number)
        return real(self, *arguments)

    monkeypatch.setattr(packing_module.PackWorker, "work", counted)
    result = shardkit_tools.build(tmp_path / "a.jsonl", tmp_path / "root", **named)
    assert result.manifest is not None
    assert whole.manifest is not None
    assert result.manifest.id == whole.manifest.id
    assert packed[0] == 4  # the four before were found
    assert len(packed) > 1


def test_what_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    documents(tmp_path / "a.jsonl", [0, 0])
    for pack_, said in (
        ({"n": 8}, "expected rows of any length"),
        ({"x": 8}, "no such field"),
        ({"tokens": 0}, "length"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            shardkit_tools.build(tmp_path / "a.jsonl", tmp_path / "root", options=OPTIONS, pack=pack_)
    with pytest.raises(SourceError, match="nothing to pack"):
        shardkit_tools.build(tmp_path / "a.jsonl", tmp_path / "root", options=OPTIONS, pack={"tokens": 8})


def test_command_line(tmp_path: Path) -> None:
    made = documents(tmp_path / "a.jsonl", LENGTHS[:50])
    common = ["build", tmp_path / "a.jsonl", tmp_path / "root", "--schema", "tokens=int32[*]", "-j1"]
    said = document_of(*common, "--pack", "tokens=64", "--unique", "tokens")
    assert said["packed"]["tokens"] == sum(map(len, made))
    assert said["duplicates"] == sum(not one for one in made) - 1
    check(tmp_path / "root", made, 64)
    assert "padding" in output_of(*common, "--pack", "tokens=64")
    assert "tokens=2048" in output_of(*common, "--pack", "tokens", code=2)


# ---- `build --unique`: of equal values the first in the source stays, whatever the number of jobs


VALUES = st.sampled_from(["", "a", "aa", "b", "ä", "a\n"])


@given(st.lists(VALUES, max_size=40))
def test_first_of_equals_is_that_of_a_walk_with_a_set(values: list[str]) -> None:
    columns = RowMarks(unique=0).marks([[value.encode() for value in values]])
    seen: set[str] = set()
    expected = [place for place, value in enumerate(values) if not (value in seen or seen.add(value))]  # type: ignore[func-returns-value]
    assert first_of_equals(columns).tolist() == expected


@pytest.fixture
def many_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_ranges, "_RANGE_BYTES", 300)
    monkeypatch.setattr(line_ranges, "READ_BYTES", 50)


@pytest.mark.usefixtures("many_tasks")
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(VALUES, min_size=1, max_size=60), shuffle=st.booleans())
def test_a_build_keeps_the_first_of_each_value(tmp_path: Path, values: list[str], *, shuffle: bool) -> None:
    folder = tmp_path / secrets.token_hex(8)
    folder.mkdir()
    lines = folder / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": text, "n": n}) + "\n" for n, text in enumerate(values)))
    result = shardkit_tools.build(lines, folder / "root", unique="text", shuffle=shuffle, stratify="n")
    ds = shardkit.open(str(folder / "root"))
    found = {sample["text"]: sample["n"] for sample in ds[:]}
    assert found == {text: values.index(text) for text in values}
    assert len(ds) == len(found)
    assert result.duplicates == len(values) - len(found)
    assert shardkit_tools.build(lines, folder / "root", unique="text", dry_run=True).rows == len(found)


@pytest.mark.usefixtures("many_tasks")
def test_any_number_of_jobs_gives_one_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "SMALL_BYTES", 0)
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": f"text {n * n % 37}", "n": n}) + "\n" for n in range(120)))
    ids = set()
    for jobs in (1, 2):
        result = shardkit_tools.build(lines, tmp_path / f"{jobs}", unique="text", jobs=jobs)
        assert result.manifest is not None
        assert result.manifest.build["unique"] == "text"
        ids.add(result.manifest.id)
    assert len(ids) == 1


def test_settings_that_cannot_be_carried_out_are_refused(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "a"}\n')
    with pytest.raises(ConfigurationError, match="--unique words: no such field; the fields are text"):
        shardkit_tools.build(lines, tmp_path / "root", unique="words")
    with pytest.raises(UsageError, match="append"):
        shardkit_tools.build(lines, tmp_path / "root", unique="text", append=True)
