"""Lineage; files of the ledger under mutation; signatures without their package."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.audit import load_run, version_lineage
from shardkit.audit.plans import open_recorded
from shardkit.audit.run_record import damaged_records
from shardkit.audit.signing import verify_envelope
from shardkit.dataset.run_plans import made_again
from shardkit.dataset.samples import population_of
from shardkit.errors import FormatError, MissingDependency, PlanError
from shardkit.ledger.ledger import (
    STEPS_MAGIC,
    encode_line,
    encode_record,
    parse_lines,
    parse_records,
)
from tests.property.test_plan_chains import no_costs, no_removal


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> shardkit.Dataset:
    root = str(tmp_path_factory.mktemp("data") / "d")
    with shardkit.create(
        root, schema={"x": "int64", "kind": "str"}, stratify="kind", format="tar", message="first"
    ) as writer:
        for number in range(100):
            writer.add(
                {"x": number, "kind": "ab"[number % 2]}, key=f"k/{number}", source=("a.csv", number + 2)
            )
    return shardkit.open(root)


def test_lineage_of_a_version_names_its_ancestors(dataset: shardkit.Dataset) -> None:
    found = version_lineage(dataset)
    assert found["id"] == dataset.manifest.id
    assert found["parts"][0]["ancestors"] == []
    assert found["parts"][0]["build"] == dict(dataset.manifest.build)


def test_settings_of_a_later_version_are_refused(dataset: shardkit.Dataset) -> None:
    population = population_of(dataset.manifest, dataset.table)
    with pytest.raises(PlanError, match="zigzag"):
        made_again(
            [{"manifest": "", "settings": {"global_batch": 4, "zigzag": 1}, "change": None}],
            lambda _: population,
            no_costs,
            no_removal,
        )


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 10**6))
def test_a_changed_record_or_line_is_found(count: int, where: int) -> None:
    data, check = bytearray(STEPS_MAGIC), 0
    for step in range(count):
        record, check = encode_record(step, 3, 0, bytes([step] * 32), check)
        data += record
    assert damaged_records(parse_records(bytes(data))) == []
    position = len(STEPS_MAGIC) + where % (len(data) - len(STEPS_MAGIC))
    data[position] ^= 1 + where % 255
    assert (position - len(STEPS_MAGIC)) // 56 in damaged_records(parse_records(bytes(data)))

    lines, check = bytearray(), 0
    for step in range(count):
        line, check = encode_line({"step": step, "text": "ä\r\u2028"}, check)
        lines += line
    assert [document["step"] for document, _ in parse_lines(bytes(lines), "x")] == list(range(count))
    assert len(list(parse_lines(bytes(lines[:-1]), "x"))) == count - 1
    position = where % (len(lines) - 1)
    lines[position] ^= 1 + where % 255
    with pytest.raises(FormatError):
        list(parse_lines(bytes(lines), "x"))


def test_signing_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingDependency, match=r"pip install .*cryptography"):
        verify_envelope(b"{}", tmp_path / "key.pub")


@pytest.mark.parametrize("configured", ["", "data"])
@pytest.mark.parametrize("parts", [1, 2])
def test_the_dataset_of_a_run_is_found_from_any_folder(
    configured: str, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it lay, however it was named; and beside the run, where both were moved."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    for name in ("data", "more")[:parts]:
        with shardkit.create(name, {"x": "int64"}) as writer:
            for number in range(32):
                writer.add({"x": number})
    names = {"first": "data", "second": "more"}
    ds = shardkit.open("data" if parts == 1 else names)
    with ds.loader(ds.plan(8), run="run", telemetry=None) as loader:
        for _ in loader:
            pass
    monkeypatch.chdir(tmp_path)
    for place in ("home", "elsewhere"):
        Path("home").rename(place)
        record = load_run(tmp_path / place / "run")
        if configured or parts > 1:
            data = {"dataset": configured} if parts == 1 else {"parts": names}
            record.settings = {"configuration": {"data": data}}
        [event] = record.plans
        assert open_recorded(record, event).manifest.id == ds.manifest.id
        Path(place).rename("home")
