"""`build --unique`: of equal values the first in the source stays, whatever the number of jobs."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardkit
import shardkit_tools
from shardkit.errors import ConfigurationError, UsageError
from shardkit_tools.building import engines
from shardkit_tools.building.passes import RowMarks, first_of_equals
from shardkit_tools.importers import line_ranges

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
    monkeypatch.setattr(line_ranges, "_PIECE_BYTES", 50)


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
