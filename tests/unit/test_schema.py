"""Schemas and the encoding of values: what is accepted, what is refused, and that messages name the place."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import FormatError, SampleError, SchemaError
from shardkit.formats import FieldType, Schema
from shardkit.formats.schema import DTYPES

TYPES = [
    "bytes",
    "str",
    "json",
    "bool",
    "int8",
    "uint64",
    "float16",
    "int32[2048]",
    "uint8[32,32,3]",
    "int32[*]",
    "bool[*]",
]


@pytest.mark.parametrize("text", TYPES)
def test_types_are_written_as_they_are_read(text: str) -> None:
    assert str(FieldType.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [("bytes", None), ("int32[*]", None), ("int64", 8), ("bool", 1), ("float16[2,3]", 12), ("bool[7]", 7)],
)
def test_item_bytes(text: str, size: int | None) -> None:
    assert FieldType.parse(text).item_bytes == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "int",
        "int128",
        "bytes[2]",
        "int32[]",
        "int32[0]",
        "int32[-1]",
        "int32[ 2]",
        "int32[02]",
        "Int32",
        "int32[2][3]",
        "complex64",
        "float32[70000,70000]",
        "int8[1,1,1,1,1,1,1,1,1]",
        "int32\n",
        7,
        None,
    ],
)
def test_unknown_types_are_refused(text: object) -> None:
    with pytest.raises(SchemaError):
        FieldType.parse(text)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"step": "str"},
        {"samples": "str"},
        {"__key__": "str"},
        *(
            {name: "str"}
            for name in (
                "a\nb",
                "a\0",
                "\x1b[31m",
                "\x85",
                "\u2028",
                "\u202e",
                "\ud800",
                "http://a",
                "a" * 201,
            )
        ),
        {"a": "what"},
        {"": "str"},
        {f"f{i}": "str" for i in range(257)},
    ],
)
def test_bad_schemas_are_refused(fields: dict[str, str]) -> None:
    with pytest.raises(SchemaError):
        Schema.parse(fields)


def test_schema_is_an_ordered_immutable_mapping() -> None:
    schema = Schema.parse({"b": "str", "a": "int64[*]"})
    assert list(schema) == ["b", "a"]
    assert schema.to_json() == [["b", "str"], ["a", "int64[*]"]]
    assert Schema.from_json(schema.to_json()) == schema == pickle.loads(pickle.dumps(schema))
    assert schema != Schema.parse({"a": "int64[*]", "b": "str"})
    assert len({schema, Schema.parse(dict(schema))}) == 1
    assert not hasattr(schema, "__setitem__")


@pytest.mark.parametrize(
    "value", [None, {}, [["a"]], [["a", 1]], [["a", "str"], ["a", "str"]], [["step", "str"]], [["a", "x"]]]
)
def test_hostile_schema_json_is_a_format_error(value: object) -> None:
    with pytest.raises(FormatError):
        Schema.from_json(value)


def stable_id(value: object) -> str:
    """The same in every worker: no address of an object."""
    return type(value).__name__ if " at 0x" in repr(value) else str(value)


ACCEPTED: list[tuple[str, Any, bytes]] = [
    ("bytes", bytearray(b"ab"), b"ab"),
    ("bytes", memoryview(b"abcd")[::2], b"ac"),
    ("str", "ä", b"\xc3\xa4"),
    ("json", {"b": 1, "a": [None, 1.5, "ü"]}, '{"b":1,"a":[null,1.5,"ü"]}'.encode()),  # keys keep their order
    ("json", (1, 2), b"[1,2]"),
    ("int8", -1, b"\xff"),
    ("int8", True, b"\x01"),
    ("int8", np.int64(5), b"\x05"),
    ("int8", 5.0, b"\x05"),
    ("uint64", 2**64 - 1, b"\xff" * 8),
    ("bool", 1, b"\x01"),
    ("bool", np.bool_(False), b"\x00"),
    ("float32", 1, b"\x00\x00\x80?"),
    ("float32", 0.1, np.float32(0.1).tobytes()),
    ("float16", float("inf"), b"\x00|"),
    ("float64", 2**53, np.float64(2**53).tobytes()),
    ("int16[2]", [1, 256], b"\x01\x00\x00\x01"),
    ("int16[2]", np.array([1, 256], ">i8"), b"\x01\x00\x00\x01"),
    ("int16[2]", np.array([1, 9, 256], np.int16)[::2], b"\x01\x00\x00\x01"),
    ("uint8[2,2]", np.asfortranarray([[1, 2], [3, 4]]), b"\x01\x02\x03\x04"),
    ("int32[*]", [], b""),
    ("uint64[*]", [2**63 + 1, 1], (2**63 + 1).to_bytes(8, "little") + (1).to_bytes(8, "little")),
    ("bool[*]", [True, False], b"\x01\x00"),
]


@pytest.mark.parametrize(("kind", "value", "payload"), ACCEPTED, ids=stable_id)
def test_values_have_one_payload(kind: str, value: object, payload: bytes) -> None:
    assert Schema.parse({"x": kind}).encode({"x": value}, where="here") == (payload,)


REFUSED: list[tuple[str, Any]] = [
    ("bytes", "text"),
    ("bytes", 3),
    ("str", b"bytes"),
    ("str", None),
    ("str", "\ud800"),
    ("json", float("nan")),
    ("json", {1: 2}),
    ("json", {"a": {True: 2}}),
    ("json", {"a": object()}),
    ("json", "\ud800"),
    ("json", [b"x"]),
    ("int8", 128),
    ("int8", -129),
    ("int8", 1.5),
    ("int8", float("nan")),
    ("int8", "7"),
    ("int8", None),
    ("int8", [1]),
    ("int64", 2**63),
    ("int64", 2.0**63),
    ("uint8", -1),
    ("uint64", 2**64),
    ("bool", 2),
    ("bool", 1.0),
    ("float16", 70000),
    ("float16", 1e6),
    ("float32", 1e300),
    ("float32", 2**24 + 1),
    ("int64[2]", np.ma.array([1, 2], mask=[False, True])),
    ("float64", 2**63 - 1),
    ("float64", 1j),
    ("float64", np.longdouble(1)),
    ("int16[2]", [1, 2, 3]),
    ("int16[2]", [[1, 2]]),
    ("int16[2]", [1, 70000]),
    ("int16[2]", [1, None]),
    ("int16[2]", [1, 0.5]),
    ("int32[*]", 5),
    ("int32[*]", [[1], [2]]),
    ("int32[*]", [[1], [2, 3]]),
    ("int64[*]", [2**63, -1]),
    ("uint64[*]", [2**63 + 1, -1]),
    ("uint64[*]", [2**63 + 1, 0.5]),
    ("uint64[*]", [2**63 + 1, float("inf")]),
    ("float64[*]", [2**63 + 1, 1]),
    ("int64", np.datetime64("2020-01-01")),
]


@pytest.mark.parametrize(("kind", "value"), REFUSED, ids=stable_id)
def test_lossy_values_are_refused_by_name(kind: str, value: object) -> None:
    with pytest.raises(SampleError, match=r"data\.jsonl row 17: field 'x'"):
        Schema.parse({"x": kind}).encode({"x": value}, where="data.jsonl row 17")


def test_missing_and_unknown_fields_are_named() -> None:
    schema = Schema.parse({"a": "int8", "b": "int8"})
    with pytest.raises(SampleError, match=r"row 3: fields missing b and unknown c, d; the schema has a, b"):
        schema.encode({"a": 1, "c": 2, "d": 3}, where="row 3")
    with pytest.raises(SampleError, match="unknown c"):
        schema.encode({"a": 1, "b": 2, "c": 2}, where="row 3")


def test_deep_json_is_refused_both_ways() -> None:
    schema = Schema.parse({"x": "json"})
    deep: Any = 1
    for _ in range(150):
        deep = {"a": deep}
    payloads = schema.encode({"x": deep}, where="here")
    assert schema.decode(payloads) == {"x": deep}
    for depth in (400, 100_000):
        deeper: Any = 1
        for _ in range(depth):
            deeper = [deeper]
        with pytest.raises(SampleError, match="deeper than 200"):
            schema.encode({"x": deeper}, where="here")
        # Deeper than the interpreter's stack on any Python: dismantled iteratively, for its destructor recurses.
        while isinstance(deeper, list):
            deeper = deeper.pop()
    for text in (b"[" * 200_000, b'{"a":' * 200_000):
        with pytest.raises(FormatError, match="'x'"):
            schema.decode([text])


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("str", b"\xff"),
        ("json", b"NaN"),
        ("json", b"{"),
        ("json", b"\xff"),
        ("json", b"1" * 5000),
        ("int8", b""),
        ("int8", b"12"),
        ("int32[*]", b"12345"),
        ("bool", b"\x02"),
        ("bool[2]", b"\x00\x09"),
        ("float32[2]", b"1234"),
    ],
)
def test_broken_payloads_are_format_errors(kind: str, payload: bytes) -> None:
    with pytest.raises(FormatError, match="'x'"):
        Schema.parse({"x": kind}).decode([payload])
    with pytest.raises(FormatError, match="2 payloads"):
        Schema.parse({"x": kind}).decode([payload, payload])


def test_decoded_types_are_plain_python() -> None:
    schema = Schema.parse({"a": "bool", "b": "int8", "c": "float16", "d": "uint8[2]", "e": "int64[*]"})
    found = schema.decode(schema.encode({"a": True, "b": 1, "c": 0.5, "d": [1, 2], "e": []}, where="x"))
    assert [type(found[name]) for name in "abc"] == [bool, int, float]
    array = found["d"]
    assert isinstance(array, np.ndarray)
    assert array.flags.writeable
    assert array.flags.owndata or array.base is None or array.base.flags.writeable
    assert np.asarray(found["e"]).dtype == np.int64


@given(
    dtype=st.sampled_from([name for name in DTYPES if "int" in name]),
    value=st.integers(-(2**66), 2**66) | st.integers(-300, 300) | st.sampled_from([2**63, 2**64, -(2**63)]),
)
def test_whole_numbers_that_fit_have_the_bytes_of_numpys(dtype: str, value: int) -> None:
    kind, limits = FieldType.parse(dtype), np.iinfo(dtype)
    if limits.min <= value <= limits.max:
        assert kind.numpy_dtype.type(value).tobytes() == Schema({"n": kind}).encode({"n": value}, where="")[0]
    else:
        with pytest.raises(SampleError, match="cannot take int"):
            Schema({"n": kind}).encode({"n": value}, where="")


@given(value=st.floats())
def test_floats_have_the_bytes_of_numpys(value: float) -> None:
    assert Schema.parse({"x": "float64"}).encode({"x": value}, where="") == (np.float64(value).tobytes(),)
