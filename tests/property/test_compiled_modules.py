"""What is compiled does what is written in Python: the same hashes, the same rows, and errors where they do not fit."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.formats import digest
from shardkit.loader import gather

span_hashes: Any = pytest.importorskip("shardkit.formats.span_hashes")
row_copies: Any = pytest.importorskip("shardkit.loader.row_copies")

BYTES = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
TEXTS = ["", "a", "ü", "plain text", "ein Stück 文字 🙂", "x" * 5000, "x" * 4999 + "é", "\0", "\x7f\x80"]


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.ctypes.data)


def _spans(pieces: list[bytes]) -> tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(what keeps them, addresses, sizes) of pieces that lie anywhere."""
    kept = [ctypes.create_string_buffer(one, max(1, len(one))) for one in pieces]
    addresses = np.array([ctypes.addressof(one) for one in kept], dtype=np.int64)
    return kept, addresses, np.array([len(one) for one in pieces], dtype=np.int64)


@settings(max_examples=300, deadline=None)
@given(spans=st.lists(st.tuples(st.integers(0, 900), st.integers(241, 9000)), max_size=6))
def test_hashes_are_those_of_the_package(spans: list[tuple[int, int]]) -> None:
    addresses = np.array([_address(BYTES) + first for first, _ in spans], dtype=np.int64)
    sizes = np.array([size for _, size in spans], dtype=np.int64)
    expected = [xxhash.xxh3_64_intdigest(BYTES[first : first + size].data) for first, size in spans]
    assert digest.xxh3_of_spans(addresses, sizes) == expected


@pytest.mark.parametrize("way", range(span_hashes.ways()))
def test_every_way_gives_the_hashes_of_the_package(way: int) -> None:
    sizes = np.array([*range(241, 2400), 4096, 65_535, 65_536, 1 << 20])
    hashes = np.zeros(len(sizes), dtype=np.uint64)
    span_hashes.xxh3_spans(hashes, np.full(len(sizes), _address(BYTES)), sizes, way)
    assert hashes.tolist() == [xxhash.xxh3_64_intdigest(BYTES[:size].data) for size in sizes.tolist()]


def test_short_spans_and_an_absent_module_are_left_to_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = np.array([_address(BYTES)]), np.array([_address(BYTES)] * 2)
    assert digest.xxh3_of_spans(two, np.array([1000, 240])) is None
    monkeypatch.setattr(digest, "span_hashes", None)
    assert digest.xxh3_of_spans(one, np.array([1000])) is None


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_are_copied_from_anywhere(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([0, 1, 3, 8, 100, 4096, 40_000]))
    starts = data.draw(st.lists(st.integers(0, len(BYTES) - size), max_size=20))
    target = np.zeros((len(starts), size), dtype=np.uint8)
    row_copies.copy_rows(target, np.array(starts, dtype=np.int64) + _address(BYTES), size)
    np.testing.assert_array_equal(
        target, np.array([BYTES[one : one + size] for one in starts], np.uint8).reshape(len(starts), size)
    )


@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.binary(max_size=50) | st.integers(1, 70_000).map(bytes), max_size=12))
def test_spans_are_copied_as_they_are(pieces: list[bytes]) -> None:
    _kept, addresses, sizes = _spans(pieces)
    assert row_copies.bytes_at(addresses, sizes) == pieces
    target = np.zeros(int(sizes.sum()), dtype=np.uint8)
    row_copies.copy_spans(target, addresses, sizes)
    assert target.tobytes() == b"".join(pieces)


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(st.sampled_from(TEXTS) | st.text(max_size=40), max_size=12))
def test_texts_are_decoded_whatever_they_hold(texts: list[str]) -> None:
    _kept, addresses, sizes = _spans([one.encode() for one in texts])
    found = row_copies.texts_at(addresses, sizes)
    assert found == texts
    for one, text in zip(
        found, texts, strict=True
    ):  # a str of its own kind, as the interpreter would make it
        assert hash(one) == hash(text)
        assert one.isascii() == text.isascii()
        assert one + "ü" == text + "ü"


def test_text_that_is_not_utf8_is_refused() -> None:
    _kept, addresses, sizes = _spans([b"good", b"bad \xff"])
    with pytest.raises(UnicodeDecodeError):
        row_copies.texts_at(addresses, sizes)


DECIMALS = st.integers(-(10**18) + 1, 10**18 - 1).map(lambda value: b"%d" % value)
NEARLY = st.sampled_from(
    [b"", b"-", b"-0", b"007", b"-07", b"+1", b" 1", b"1 ", b"1e3", b"10" + b"0" * 17, b"-1" + b"0" * 18]
)


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(DECIMALS, max_size=40), strange=st.none() | st.tuples(st.integers(0, 40), NEARLY))
def test_decimals_are_parsed_if_all_are_canonical_and_fit(
    texts: list[bytes], strange: tuple[int, bytes] | None
) -> None:
    if strange is not None:
        texts = [*texts[: strange[0]], strange[1], *texts[strange[0] :]]
    _kept, addresses, sizes = _spans(texts)
    target = np.zeros(len(texts), np.int64)
    assert row_copies.decimals_at(target, addresses, sizes) == (strange is None)
    if strange is None:
        assert target.tolist() == [int(text) for text in texts]


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("decimals_at", (np.zeros(2, np.int64), np.zeros(1, np.int64), np.array([1]))),
        ("decimals_at", (np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([1, 1]))),
        ("copy_rows", (np.zeros(9, np.uint8), np.zeros(1, np.int64), 8)),  # a target of another size
        ("copy_rows", (np.zeros(8, np.uint8), np.zeros(1, np.int64), -8)),
        ("copy_rows", (np.zeros(0, np.uint8), np.zeros(4, np.int64), 1 << 62)),  # whose product wraps around
        ("copy_rows", (np.zeros(8, np.uint8), np.zeros(9, np.uint8)[1:], 8)),  # not aligned
        ("copy_spans", (np.zeros(8, np.uint8), np.zeros(2, np.int64), np.array([9, -1]))),
        ("copy_spans", (np.zeros(8, np.uint8), np.zeros(2, np.int64), np.array([1, 1]))),
        ("copy_spans", (np.zeros(8, np.uint8), np.zeros(2, np.int64), np.array([8]))),
        ("bytes_at", (np.zeros(1, np.int64), np.array([-1]))),
        ("bytes_at", (np.zeros(1, np.int64), np.array([1, 1]))),
        ("texts_at", (np.zeros(1, np.int64), np.array([-1]))),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_anything_is_read(
    function: str, arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(ValueError, match=r"expected|target|size"):
        getattr(row_copies, function)(*arguments)


def test_hashing_refuses_what_does_not_fit() -> None:
    hashes, addresses = np.zeros(1, np.uint64), np.array([_address(BYTES)])
    for arguments in (
        (hashes, addresses, np.array([240])),
        (hashes, addresses, np.array([-1])),
        (hashes, addresses, np.array([300, 300])),
        (hashes[:0], addresses, np.array([300])),
        (hashes, addresses, np.array([300]), span_hashes.ways()),
        (hashes, addresses, np.array([300]), -1),
    ):
        with pytest.raises(ValueError, match="sizes above 240"):
            span_hashes.xxh3_spans(*arguments)
    with pytest.raises((TypeError, BufferError)):
        row_copies.copy_rows(bytes(8), addresses, 8)  # cannot be written to


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(st.binary(max_size=300) | st.integers(0, 9000).map(bytes), max_size=9))
def test_digests_together_are_those_of_hashlib(pieces: list[bytes]) -> None:
    expected = [hashlib.sha256(one).digest() for one in pieces]
    assert digest.sha256_each([memoryview(one) for one in pieces]) == expected
    if digest.span_digests is not None:
        assert digest.span_digests.sha256_each(pieces) == expected


def test_digests_of_every_length_beside_one_of_any_other() -> None:
    data = BYTES.tobytes()
    for other in (0, 63, 64, 1000):
        pieces = [part for size in range(200) for part in (data[:size], data[size : size + other])]
        assert digest.sha256_each(pieces) == [hashlib.sha256(one).digest() for one in pieces]


def test_digests_refuse_what_is_no_buffer() -> None:
    if digest.span_digests is None:
        pytest.skip("this processor has no instructions for SHA-256")
    for wrong in ([b"a", "text"], [b"a", None], 17):
        with pytest.raises(TypeError):
            digest.span_digests.sha256_each(wrong)


def test_both_are_in_use_where_they_are_compiled() -> None:
    assert gather.row_copies is row_copies
    assert digest.span_hashes is span_hashes
