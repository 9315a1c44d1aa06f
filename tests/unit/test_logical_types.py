"""Dates, times and decimals: exact both ways, in every format, table and command that shows them."""

from __future__ import annotations

import datetime as dt
import zoneinfo
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkit
from shardkit.errors import SampleError, SchemaError, UsageError
from shardkit.formats import FieldType
from shardkit.formats.values import Logical, logical_text
from tests.command_line import output_of

BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
SCHEMA = {
    "day": "date",
    "at": "time[us]",
    "when": "timestamp[us]",
    "seen": "timestamp[ms, Europe/Berlin]",
    "fine": "timestamp[ns, UTC]",
    "took": "duration[ms]",
    "price": "decimal[9,2]",
    "due": "date?",
}


def sample(number: int) -> dict[str, Any]:
    start = dt.datetime(2026, 11, 20, 12, 30, 0, 250_000)  # noqa: DTZ001  # a field without a zone
    return {
        "day": dt.date(1969, 12, 25) + dt.timedelta(days=number),
        "at": dt.time(23, 59, 59, number),
        "when": start + dt.timedelta(microseconds=number),
        "seen": start.replace(tzinfo=BERLIN) + dt.timedelta(days=30 * number),
        "fine": np.datetime64("2026-11-20T12:30:00.000000001", "ns") + np.timedelta64(number, "ns"),
        "took": dt.timedelta(milliseconds=1500 * (number - 2)),
        "price": Decimal("-1.25") + number,
        "due": None if number % 2 else dt.date(2027, 1, 1),
    }


@pytest.mark.parametrize("text", [*SCHEMA.values(), "time[ns]", "timestamp[s, +05:30]", "decimal[18,18]"])
def test_a_type_is_written_as_it_is_read(text: str) -> None:
    assert str(FieldType.parse(text)) == text
    assert FieldType.parse(f"{text.rstrip('?')}?").optional


@pytest.mark.parametrize(
    "text", ["date[us]", "timestamp", "duration[us, UTC]", "decimal[19,2]", "decimal[2,3]", "time[m]"]
)
def test_other_types_are_refused(text: str) -> None:
    with pytest.raises(SchemaError, match="unknown"):
        FieldType.parse(text)


@given(st.datetimes(timezones=st.timezones()), st.sampled_from(["us", "ns"]))
def test_a_moment_survives_in_any_zone(when: dt.datetime, unit: str) -> None:
    kind = Logical.parse(f"timestamp[{unit}, UTC]")
    assert kind is not None
    try:
        utc = when.astimezone(dt.UTC)
        number = kind.number(when)
    except (ValueError, OverflowError):
        return  # outside of the years 1 to 9999, or of int64
    found = kind.value(number)
    if unit == "ns":
        assert found == np.datetime64(utc.replace(tzinfo=None), "ns")
    else:
        assert found == utc
    assert (
        kind.number(when.isoformat()) == kind.number(logical_text(found) if unit == "us" else found) == number
    )


@given(st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=1 - 10**7, max_value=10**7 - 1))
def test_every_digit_survives(value: Decimal) -> None:
    kind = Logical.parse("decimal[9,2]")
    assert kind is not None
    found = kind.value(kind.number(value))
    assert found == value
    assert found.as_tuple().exponent == -2
    assert kind.number(logical_text(found)) == kind.number(value)


@given(st.timedeltas())
def test_a_duration_survives_as_text(took: dt.timedelta) -> None:
    kind = Logical.parse("duration[us]")
    assert kind is not None
    if abs(took) > dt.timedelta(days=10**8):
        return  # of int64
    text = logical_text(kind.value(kind.number(took)))
    assert kind.number(text) == kind.number(took)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("day", dt.datetime(2026, 1, 1), "expected a date"),  # noqa: DTZ001
        ("day", "20.11.2026", "ISO 8601"),
        ("when", dt.datetime(2026, 1, 1, tzinfo=dt.UTC), "has a zone"),
        ("seen", dt.datetime(2026, 1, 1), "says no zone"),  # noqa: DTZ001
        ("seen", "2026-01-01T00:00:00.0001+00:00", "not exact"),
        ("seen", np.datetime64("NaT"), "expected a timestamp"),
        ("took", dt.timedelta(microseconds=1), "not exact"),
        ("took", "3 seconds", "PT1.5S"),
        ("price", 1.25, "float is not exact"),
        ("price", Decimal("0.001"), "more digits"),
        ("price", Decimal(10) ** 7, "more digits"),
        ("price", Decimal("1E+999999"), "out of range"),
        ("price", Decimal("NaN"), "Decimal"),
        ("at", 86_400_000_000, "before 24:00"),
        ("fine", np.datetime64("2300-01-01", "s"), "exact|range"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, field: str, value: object, why: str) -> None:
    with (
        pytest.raises(SampleError, match=why) as refusal,
        shardkit.create(tmp_path / "root", schema=SCHEMA) as writer,
    ):
        writer.add({**sample(0), field: value})
    assert repr(field) in str(refusal.value)


@pytest.mark.parametrize(("form", "compression"), [("tar", "none"), ("arrow", "none"), ("arrow", "zstd")])
def test_values_come_back_from_every_format(tmp_path: Path, form: str, compression: str) -> None:
    root = tmp_path / "root"
    with shardkit.create(root, schema=SCHEMA, format=form, compression=compression, stratify="day") as writer:
        for number in range(6):
            writer.add(sample(number), key=f"k{number}")
    ds = shardkit.open(root)
    found = {ds.key(row): ds[row] for row in range(len(ds))}
    for number in range(6):
        assert found[f"k{number}"] == sample(number)
        assert found[f"k{number}"]["seen"].tzinfo.key == "Europe/Berlin"
    assert sorted(ds.strata) == sorted(sample(number)["day"].isoformat() for number in range(6))
    assert ds.manifest.schema["price"] == FieldType.parse("decimal[9,2]")

    table = ds.to_arrow()
    assert table.schema.field("price").type == pa.decimal128(9, 2)
    assert table.schema.field("seen").type == pa.timestamp("ms", "Europe/Berlin")
    for name in ("day", "at", "when", "seen", "took", "price", "due"):
        assert table.column(name).to_pylist() == [row[name] for row in ds], name
    assert table.column("fine").cast(pa.int64()).to_pylist() == [int(row["fine"].astype(int)) for row in ds]

    batch = next(iter(ds.loader(ds.plan(global_batch=6, lanes=1), rank=0, world=1, tensors=False)))
    days = {dt.date(1970, 1, 1) + dt.timedelta(days=int(day)) for day in batch["day"]}
    assert days == {sample(number)["day"] for number in range(6)}
    assert batch["price"].dtype == np.int64
    assert batch.valid["due"].sum() == 3


def test_a_shard_says_what_its_numbers_mean_to_other_programs(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with shardkit.create(
        root, schema={"when": "timestamp[us, UTC]", "day": "date"}, format="arrow"
    ) as writer:
        writer.add({"when": "2026-11-20T12:30:00Z", "day": "2026-11-20"})
    (shard,) = root.glob("objects/sha256/*/*.arrow")
    table = pa.ipc.open_file(pa.memory_map(str(shard))).read_all()
    assert table.column("when").to_pylist() == [dt.datetime(2026, 11, 20, 12, 30, tzinfo=dt.UTC)]
    assert table.column("day").to_pylist() == [dt.date(2026, 11, 20)]


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ("day < '1969-12-27'", 2),
        ("day in ('1969-12-25', '1970-01-01')", 1),
        ("price >= 0.75", 4),
        ("price == '-1.25'", 1),
        ("seen > '2026-12-01T00:00:00+01:00'", 5),
        ("took < 'PT0S' and not (day == '1969-12-25')", 1),
    ],
)
def test_a_condition_compares_with_texts(tmp_path: Path, where: str, rows: int) -> None:
    root = tmp_path / "root"
    with shardkit.create(root, schema=SCHEMA) as writer:
        for number in range(6):
            writer.add(sample(number))
    ds = shardkit.open(root)
    assert len(ds.select(where=where)) == rows
    with pytest.raises(UsageError, match="ISO 8601"):
        ds.select(where="day < 'yesterday'")


def test_a_condition_means_the_same_in_every_block(tmp_path: Path) -> None:
    schema = {"price": "decimal[9,2]", "day": "date"}
    with shardkit.create(tmp_path / "root", schema=schema, format="tar", block_size="4KiB") as writer:
        for number in range(400):
            writer.add({"price": Decimal(number) / 4, "day": dt.date(1970, 1, 1) + dt.timedelta(days=number)})
    ds = shardkit.open(tmp_path / "root")
    assert ds.manifest.raw_bytes > 20 * 4096, "many blocks"
    chosen = ds.select(where="price >= 50 and price < 75.5 and not (price == '60.25')")
    assert sorted(row["price"] for row in chosen) == [
        Decimal(number) / 4 for number in range(200, 302) if number != 241
    ]
    assert len(ds.select(where="price > -0.25 and day < '1970-04-11'")) == 100


def test_texts_of_a_csv_become_dates_where_asked(tmp_path: Path) -> None:
    source = tmp_path / "rows.csv"
    source.write_text("day,price,seen\n2026-11-20,1.5,2026-11-20T12:00:00+01:00\n,2,2026-11-21T12:00:00Z\n")
    options = [
        "--schema",
        "day=date?",
        "--schema",
        "price=decimal[9,2]",
        "--schema",
        "seen=timestamp[s, UTC]",
    ]
    output_of("build", str(source), str(tmp_path / "root"), "--no-shuffle", *options)
    assert shardkit.open(tmp_path / "root")[:] == [
        {
            "day": dt.date(2026, 11, 20),
            "price": Decimal("1.50"),
            "seen": dt.datetime(2026, 11, 20, 11, tzinfo=dt.UTC),
        },
        {"day": None, "price": Decimal("2.00"), "seen": dt.datetime(2026, 11, 21, 12, tzinfo=dt.UTC)},
    ]
