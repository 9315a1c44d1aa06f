"""What is compiled does what is written in Python: the same hashes, the same rows, and errors where they do not fit."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.loader import block_loading, gather, plain_rows

block_rows: Any = pytest.importorskip("shardkit.loader.block_rows")

BYTES = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
TEXTS = ["", "a", "ü", "plain text", "ein Stück 文字 🙂", "x" * 5000, "x" * 4999 + "é", "\0", "\x7f\x80"]


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.ctypes.data)


def _spans(pieces: list[bytes]) -> tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(what keeps them, addresses, sizes) of pieces that lie anywhere."""
    kept = [ctypes.create_string_buffer(one, max(1, len(one))) for one in pieces]
    addresses = np.array([ctypes.addressof(one) for one in kept], dtype=np.int64)
    return kept, addresses, np.array([len(one) for one in pieces], dtype=np.int64)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """An open file that holds BYTES."""
    path = tmp_path_factory.mktemp("file") / "bytes"
    path.write_bytes(BYTES.tobytes())
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def _load(file: int, spans: list[tuple[int, int]], *way: int) -> tuple[bytes, list[bytes]]:
    """(states, what was read) of spans of a file, each with the hash that it should have."""
    into = [np.zeros(max(1, size), np.uint8) for _, size in spans]
    hashes = [xxhash.xxh3_64_intdigest(BYTES[first : first + size].data) for first, size in spans]
    columns = [
        [file] * len(spans),
        [first for first, _ in spans],
        list(map(_address, into)),
        [s for _, s in spans],
    ]
    arrays = [np.array(column, np.int64) for column in columns]
    states = block_rows.load_blocks(*arrays, np.array(hashes, np.uint64), *way)
    return states, [one.tobytes() for one in into]


@settings(max_examples=200, deadline=None)
@given(spans=st.lists(st.tuples(st.integers(0, 900), st.integers(241, 9000)), max_size=6))
def test_blocks_are_read_and_hash_to_what_the_package_says(file: int, spans: list[tuple[int, int]]) -> None:
    states, found = _load(file, spans)
    assert states == bytes(len(spans))
    assert found == [BYTES[first : first + size].tobytes() for first, size in spans]


@pytest.mark.parametrize("way", range(block_rows.ways()))
def test_every_way_gives_the_hashes_of_the_package(file: int, way: int) -> None:
    spans = [(0, size) for size in [*range(241, 2400), 4096, 65_535, 65_536, 1 << 20]]
    assert _load(file, spans, way)[0] == bytes(len(spans))


def test_what_is_wrong_or_cannot_be_read_is_told_apart(file: int) -> None:
    into, hashes = np.zeros(500, np.uint8), np.array([1], np.uint64)
    one = [np.array([value], np.int64) for value in (file, 100, _address(into), 500)]
    assert block_rows.load_blocks(*one, hashes) == b"\1"
    assert into.tobytes() == BYTES[100:600].tobytes()
    one[1][0] = len(BYTES) - 499
    assert block_rows.load_blocks(*one, hashes) == b"\2"  # the file ends before
    closed = os.dup(file)
    os.close(closed)
    one[0][0], one[1][0] = closed, 0
    assert block_rows.load_blocks(*one, hashes) == b"\2"


def test_blocks_that_no_page_holds_are_read_like_others(tmp_path: Path) -> None:
    path = tmp_path / "cold"
    path.write_bytes(BYTES.tobytes() * 64)
    spans = [(len(BYTES) * n, len(BYTES)) for n in range(64)]
    into = [np.zeros(size, np.uint8) for _, size in spans]
    columns = [[first for first, _ in spans], list(map(_address, into)), [size for _, size in spans]]
    hashes = np.full(64, xxhash.xxh3_64_intdigest(BYTES.data), np.uint64)
    with path.open("rb") as file:
        arrays = [np.array(column, np.int64) for column in ([file.fileno()] * 64, *columns)]
        for rows in (block_rows, plain_rows):
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            for one in into:
                one[:] = 0
            assert rows.load_blocks(*arrays, hashes) == bytes(64)
            assert all((one == BYTES).all() for one in into)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_are_copied_from_anywhere(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([0, 1, 3, 8, 100, 4096, 40_000]))
    starts = data.draw(st.lists(st.integers(0, len(BYTES) - size), max_size=20))
    target = np.zeros((len(starts), size), dtype=np.uint8)
    block_rows.copy_rows(target, np.array(starts, dtype=np.int64) + _address(BYTES), size)
    np.testing.assert_array_equal(
        target, np.array([BYTES[one : one + size] for one in starts], np.uint8).reshape(len(starts), size)
    )


@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.binary(max_size=50) | st.integers(1, 70_000).map(bytes), max_size=12))
def test_spans_are_copied_as_they_are(pieces: list[bytes]) -> None:
    _kept, addresses, sizes = _spans(pieces)
    assert block_rows.bytes_at(addresses, sizes) == pieces
    target = np.zeros(int(sizes.sum()), dtype=np.uint8)
    block_rows.copy_rows(target, addresses, sizes)
    assert target.tobytes() == b"".join(pieces)


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(st.sampled_from(TEXTS) | st.text(max_size=40), max_size=12))
def test_texts_are_decoded_whatever_they_hold(texts: list[str]) -> None:
    _kept, addresses, sizes = _spans([one.encode() for one in texts])
    found = block_rows.texts_at(addresses, sizes)
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
        block_rows.texts_at(addresses, sizes)


@pytest.mark.parametrize("rows", [block_rows, plain_rows], ids=["compiled", "in Python"])
def test_rows_are_gathered_where_all_are_there_to_be_copied(rows: Any) -> None:
    numbers = np.arange(100, dtype=np.int32)
    start = _address(numbers.view(np.uint8))
    facts = np.array(
        [[10, start, 0, 0, 4], [5, start + 40, 0, 0, 12], [10, start, start, start, -8]], np.int64
    )

    def gather(which: list[int], row: list[int]) -> list[int] | None:
        target = np.full(len(which), -1, np.int32)
        halves = [target[: len(which) // 2], target[len(which) // 2 :]]
        state = rows.gather_rows(halves, facts, np.array(which, np.int64), np.array(row, np.int64), 0)
        if state != rows.COPIED:
            assert (target == -1).all()
            return None
        return target.tolist()

    assert gather([0, 1, 1, 0], [9, 0, 4, 0]) == [9, 10, 22, 0]
    assert gather([], []) == []
    for which, row in ((0, 10), (0, -1), (1, 5), (2, 0)):  # past either end; decimal texts
        assert gather([1, which], [1, row]) is None


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
    found = block_rows.decimals_at(addresses, sizes)
    assert (found is not None) == (strange is None)
    if strange is None:
        assert np.frombuffer(found, np.int64).tolist() == [int(text) for text in texts]


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("decimals_at", (np.zeros(1, np.int64), np.array([1, 1]))),
        ("decimals_at", (np.zeros(1, np.int64), np.array([-1]))),
        ("copy_rows", (np.zeros(9, np.uint8), np.zeros(1, np.int64), 8)),  # a target of another size
        ("copy_rows", (np.zeros(8, np.uint8), np.zeros(1, np.int64), -8)),
        ("copy_rows", (np.zeros(0, np.uint8), np.zeros(4, np.int64), 1 << 62)),  # whose product wraps around
        ("copy_rows", (np.zeros(8, np.uint8), np.zeros(2, np.int64), np.array([9, -1]))),
        ("copy_rows", (np.zeros(8, np.uint8), np.zeros(2, np.int64), np.array([1, 1]))),
        ("copy_rows", (np.zeros(8, np.uint8), np.zeros(2, np.int64), np.array([8]))),
        ("gather_rows", ([np.zeros(9, np.uint8)], np.ones((1, 5), np.int64), *np.zeros((2, 2), np.int64), 0)),
        ("gather_rows", ([np.zeros(8, np.uint8)], np.ones((1, 5), np.int64), *np.zeros((2, 1), np.int64), 1)),
        (
            "gather_rows",
            ([np.zeros(8, np.uint8)], np.ones((1, 5), np.int64), *np.zeros((2, 1), np.int64), -1),
        ),
        ("gather_rows", ([np.zeros(8, np.uint8)], np.ones(5, np.int64), *np.zeros((2, 1), np.int64), 0)),
        ("gather_rows", ([np.zeros(8, np.uint8)], np.ones((1, 5), np.int32), *np.zeros((2, 1), np.int64), 0)),
        (
            "gather_rows",
            (
                [np.zeros(12, np.uint8), np.zeros(4, np.uint8)],
                np.ones((1, 5), np.int64),
                *np.zeros((2, 2), np.int64),
                0,
            ),
        ),  # a row across two
        ("bytes_at", (np.zeros(1, np.int64), np.array([-1]))),
        ("bytes_at", (np.zeros(1, np.int64), np.array([1, 1]))),
        ("texts_at", (np.zeros(1, np.int64), np.array([-1]))),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_anything_is_read(
    function: str, arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(ValueError, match=r"expected|target|size"):
        getattr(block_rows, function)(*arguments)


def test_loading_refuses_what_does_not_fit(file: int) -> None:
    into = np.zeros(1000, np.uint8)

    def load(size: int = 300, offset: int = 0, number: int = file, more: int = 0, *way: int) -> None:
        one = [np.array([value], np.int64) for value in (number, offset, _address(into), size)]
        one[3] = np.resize(one[3], 1 + more)
        block_rows.load_blocks(*one, np.zeros(1, np.uint64), *way)

    load()
    for wrong in ((240,), (-1,), (300, -1), (300, 0, -1), (300, 0, 1 << 40), (300, 0, file, 1),
                  (300, 0, file, 0, block_rows.ways()), (300, 0, file, 0, -1)):  # fmt: skip
        with pytest.raises(ValueError, match="expected"):
            load(*wrong)
    addresses = np.array([_address(BYTES)])
    with pytest.raises((TypeError, BufferError)):
        block_rows.copy_rows(bytes(8), addresses, 8)  # cannot be written to


def test_it_is_in_use_where_it_is_compiled() -> None:
    for chosen_by in (gather, block_loading):
        assert vars(chosen_by)["block_rows"] is block_rows
