"""Records: what is written comes back, what a stranger wrote does no harm."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.telemetry import Record, parse_record
from shardkit.telemetry.records import MAX_LINE_BYTES, lanes_text, parse_lanes

NUMBERS = st.floats(min_value=0.001, max_value=1e12, allow_nan=False)


@given(
    values=st.dictionaries(st.text(min_size=1, max_size=30), NUMBERS, max_size=20),
    lanes=st.sets(st.integers(0, 3000), max_size=60),
    rank=st.integers(0, 99_999),
    host=st.text(max_size=50),
)
def test_what_is_written_comes_back(values: dict[str, float], lanes: set[int], rank: int, host: str) -> None:
    record = Record(
        time=12.5, rank=rank, world=rank + 1, host=host, lanes=tuple(sorted(lanes)), values=values
    )
    line = record.to_line()
    assert line.count(b"\n") == 1
    found = parse_record(line)
    assert found is not None
    assert (found.time, found.rank, found.host, found.lanes) == (12.5, rank, host, record.lanes)
    assert found.values == pytest.approx(values, abs=1e-6)


def test_zeros_are_left_out_and_read_as_zero() -> None:
    line = Record(time=1.0, rank=0, values={"a": 0.0, "b": 2.0}).to_line()
    found = parse_record(line)
    assert found is not None
    assert list(found.values) == ["b"]
    assert found.value("a") == 0.0


@given(st.sets(st.integers(0, 65_535), max_size=100))
def test_lanes_come_back(lanes: set[int]) -> None:
    assert parse_lanes(lanes_text(sorted(lanes))) == tuple(sorted(lanes))


def test_lanes_are_short() -> None:
    assert lanes_text(range(4096)) == "0-4095"
    assert lanes_text([0, 1, 2, 7, 9, 10]) == "0-2,7,9-10"


@pytest.mark.parametrize(
    "text", ["1-", "-1", "2-1", "0-9999999", "3,2", "a", "1,,2", "١", None, 7, "0-65536"]
)
def test_other_lanes_are_refused(text: object) -> None:
    assert parse_lanes(text) is None


def document(**changes: Any) -> bytes:
    plain = json.loads(Record(time=1.0, rank=0, values={"a": 1.0}).to_line())
    return json.dumps({**plain, **changes}).encode()


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000,
        document(v=2), document(rank=-1), document(rank="0"), document(rank=True), document(rank=1 << 60),
        document(time="now"), document(time=None), document(host="x" * 300), document(host=1), document(lanes=[1]),
        document(values={"a": "1"}), document(values={"a": None}), document(values=[1]),
        document(values={str(i): 1 for i in range(1000)}), document(tables={"t": [[[1]]]}), document(tables={"t": [1]}),
        document(tables={"t": [["x" * 300]]}), document(tables={"t": [["x"]] * 100}), document(interval_s="2"),
        document(values={"a": 1e400}), b'{"v":1,"time":NaN,"rank":0}', b" " * (MAX_LINE_BYTES + 1),
    ],
)  # fmt: skip
def test_what_is_no_record_is_none(line: bytes) -> None:
    assert parse_record(line) is None


def test_the_plain_document_is_a_record() -> None:
    assert parse_record(document()) is not None


@given(st.binary(max_size=300))
def test_any_bytes_are_survived(data: bytes) -> None:
    parse_record(data)


NAMES = st.sampled_from(["v", "rank", "time", "lanes", "values", "tables", "host"])
LEAVES = st.none() | st.booleans() | st.floats() | st.text(max_size=5)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=12,
)


@given(JSON)
def test_any_json_is_survived(value: object) -> None:
    found = parse_record(
        json.dumps({"v": 1, "rank": 0, "time": 1, "values": value, "tables": value, "lanes": value}).encode()
    )
    if found is not None:
        assert parse_record(found.to_line()) is not None
