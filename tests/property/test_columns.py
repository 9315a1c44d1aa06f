"""The column container: round trips, and mutated containers that must be refused or read as what they then say."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shardkit.documents import encode
from shardkit.errors import FormatError, UsageError
from shardkit.formats import pack_columns, unpack_columns

DTYPES = st.sampled_from(["u1", "<u2", "<u4", "<u8", "i1", "<i2", "<i4", "<i8"]).map(np.dtype)
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=40))
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
META = st.dictionaries(
    st.text(max_size=6), st.integers(-(2**62), 2**62) | st.text(max_size=8) | st.booleans(), max_size=4
)


@settings(max_examples=100, deadline=None)
@given(
    meta=META,
    columns=st.dictionaries(NAMES, ARRAYS, max_size=5),
    compress=st.booleans(),
    shift=st.integers(0, 7),
)
def test_round_trip(meta: dict[str, Any], columns: dict[str, Any], compress: bool, shift: int) -> None:
    packed = pack_columns("page", meta, columns, compress=compress)
    assert packed == pack_columns("page", meta, columns, compress=compress)
    found = unpack_columns(memoryview(bytes(shift) + packed)[shift:], "page")
    assert found.meta == meta
    assert list(found.arrays) == list(columns)
    for name, array in columns.items():
        assert found.arrays[name].dtype == array.dtype
        assert np.array_equal(found.arrays[name], array)
        assert not found.arrays[name].flags.writeable


def container() -> bytes:
    rng = np.random.default_rng(7)
    columns: dict[str, Any] = {
        "offset": np.arange(500, dtype=np.uint64) * 512,
        "noise": rng.integers(0, 256, (40, 32), dtype=np.uint8),
        "few": np.array([1, 2, 3], np.int32),
    }
    return pack_columns("index", {"rows": 500, "name": "x"}, columns)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_mutants_are_refused_or_read_within_bounds(data: st.DataObject) -> None:
    """No digest stands in front here: the parser is alone with hostile bytes."""
    packed = bytearray(container())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(len(packed) - 1, 600)))
        action = data.draw(st.sampled_from(["flip", "digit", "cut", "insert", "zero"]))
        if action == "flip":
            packed[place] ^= 1 << data.draw(st.integers(0, 7))
        elif action == "digit":
            packed[place] = data.draw(st.sampled_from(list(b'0123456789-[]{},:"')))
        elif action == "cut":
            del packed[place : place + data.draw(st.integers(1, 64))]
        elif action == "insert":
            packed[place:place] = data.draw(st.binary(min_size=1, max_size=9))
        else:
            packed[place : place + 8] = bytes(8)
    try:
        found = unpack_columns(bytes(packed), "index")
    except FormatError:
        return
    assert sum(array.nbytes for array in found.arrays.values()) <= 256 * len(packed) + (1 << 20)


def rebuilt(change: dict[str, Any], raw: bytes = b"") -> bytes:
    """A container of one column whose header says what `change` says."""
    entry = {
        "codec": "none",
        "dtype": "|u1",
        "name": "a",
        "offset": 0,
        "raw": len(raw),
        "shape": [len(raw)],
        "size": len(raw),
    }
    header = encode({"columns": [entry | change], "kind": "index", "meta": {}, "version": 1})
    prefix = b"SHRDCOL1" + len(header).to_bytes(8, "little") + header
    return prefix + bytes(-len(prefix) % 64) + raw


HOSTILE = [
    {"raw": 2**40, "shape": [2**40], "codec": "zstd"},
    {"raw": 2**62, "shape": [2**62], "size": 2**62},
    {"raw": 0, "shape": [0, 2**62], "size": 0},
    {"shape": [2**32, 2**32]},
    {"shape": [-1]},
    {"shape": [True]},
    {"offset": 64},
    {"size": 15},
    {"dtype": "|O"},
    {"dtype": "<f8"},
    {"codec": "zstd"},
    {"codec": "lz4"},
    {"name": "A"},
    {"name": "a" * 80},
    {"extra": 1},
]


@pytest.mark.parametrize("change", HOSTILE, ids=str)
def test_hostile_headers_are_refused_without_allocating(change: dict[str, Any]) -> None:
    hostile = rebuilt(change, bytes(range(16)))
    assert unpack_columns(rebuilt({}, bytes(range(16))), "index").arrays["a"].tolist() == list(range(16))
    tracemalloc.start()
    with pytest.raises(FormatError):
        unpack_columns(hostile, "index")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_trailing_padding_and_wrong_kinds_are_refused() -> None:
    packed = container()
    cases = [packed + b"\x00", packed[:-1], b"", b"SHRDCOL2" + packed[8:], packed[:100]]
    for broken in cases:
        with pytest.raises(FormatError):
            unpack_columns(broken, "index")
    with pytest.raises(FormatError, match="expected page"):
        unpack_columns(packed, "page")
    header = int.from_bytes(packed[8:16], "little")
    dirty = bytearray(packed)
    dirty[16 + header] = 1  # padding before the first column
    with pytest.raises(FormatError, match="padding"):
        unpack_columns(bytes(dirty), "index")


def test_caps_hold_and_the_writer_stays_inside_them() -> None:
    zeros = {"z": np.zeros(40_000_000, np.uint8)}
    packed = pack_columns("page", {}, zeros)
    assert len(packed) >= 40_000_000 // 256  # rather stored plain than beyond the ratio that readers accept
    assert not unpack_columns(packed, "page").arrays["z"].any()
    with pytest.raises(FormatError, match="at most 1000"):
        unpack_columns(packed, "page", max_raw_bytes=1000)
    with pytest.raises(UsageError, match="dtype"):
        pack_columns("page", {}, {"x": np.zeros(3)})
