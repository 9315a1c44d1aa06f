"""What is compiled does what is written in Python: the same hashes, the same rows, and errors where they do not fit."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.loader import gather, plain_rows
from shardkit.loader.load_queue import ADDRESS, DIGEST, FILE, HASH, JOB, OFFSET, RAW_SIZE, SIZE, TOOK

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
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that holds BYTES."""
    path = tmp_path_factory.mktemp("file") / "bytes"
    path.write_bytes(BYTES.tobytes())
    return path


def _job(
    descriptor: int, offset: int, into: np.ndarray[Any, Any], expected: int, facts: Sequence[int] = (1,)
) -> np.ndarray[Any, Any]:
    job = np.zeros(JOB + len(facts), np.int64)
    job[[FILE, OFFSET, SIZE, ADDRESS]] = descriptor, offset, len(into), _address(into)
    job[HASH] = expected - (expected >> 63 << 64)
    job[JOB:] = facts
    return job


def _load_all(jobs: Sequence[np.ndarray[Any, Any]], *way: int) -> int:
    """How many blocks are loaded, whether they are in the page cache or not."""
    loaded, is_cold = 0, True
    while loaded < len(jobs) and is_cold:
        rows = np.array(jobs[loaded:])
        some, is_cold = block_rows.load_blocks(rows, (None,) * len(rows), *way)
        loaded += some
        assert (rows[:some, TOOK] > 0).all()
    return loaded


def _load(path: Path, spans: list[tuple[int, int]], hashes: list[int], *way: int) -> tuple[int, list[bytes]]:
    """(how many are loaded, what was read) of spans of a file."""
    into = [np.zeros(size, np.uint8) for _, size in spans]
    with path.open("rb") as file:
        jobs = [
            _job(file.fileno(), first, one, expected)
            for (first, _), one, expected in zip(spans, into, hashes, strict=True)
        ]
        return _load_all(jobs, *way), [one.tobytes() for one in into]


def _object_job(
    file: int, first: int, size: int, spans: list[tuple[int, int]]
) -> tuple[np.ndarray[Any, Any], Any]:
    """A job whose rows, at these places of the block, become objects; and what it needs meanwhile."""
    between = np.zeros(size - sum(b - a for a, b in spans), np.uint8)
    starts, ends = places = np.array(spans, np.int64).reshape(-1, 2).T.copy()
    (expected,) = _hashes([(first, size)])
    facts = [len(spans), _address(starts), _address(ends), 0, gather.OBJECTS]
    job = _job(file, first, between, expected, facts)
    job[SIZE] = size
    return job, (between, places)


@pytest.mark.skipif(not block_rows.hashes_sha256(), reason="this processor has no instructions for SHA-256")
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_blocks_are_known_by_sha256(file: Path, data: st.DataObject) -> None:
    """Digests equal those of hashlib for every length; loading ends at the first wrong one."""
    sizes = st.integers(241, 700) | st.integers(241, 40_000)
    blocks = data.draw(
        st.lists(st.tuples(st.integers(0, 5000), sizes, st.booleans()), min_size=1, max_size=9)
    )
    wrong = data.draw(st.none() | st.integers(0, len(blocks) - 1))
    digests, into, jobs = np.zeros((len(blocks), 32), np.uint8), [], []
    with file.open("rb") as opened:
        for number, (first, size, is_strong) in enumerate(blocks):
            into.append(np.zeros(size, np.uint8))
            block = BYTES[first : first + size].tobytes()
            digests[number] = np.frombuffer(hashlib.sha256(block).digest(), np.uint8)
            if number == wrong:
                digests[number, data.draw(st.integers(0, 31))] ^= 1 << data.draw(st.integers(0, 7))
            expected = xxhash.xxh3_64_intdigest(block) ^ (number == wrong)
            jobs.append(_job(opened.fileno(), first, into[-1], expected))
            jobs[-1][DIGEST] = _address(digests[number]) if is_strong else 0
        loaded = _load_all(jobs)
    assert loaded == (len(blocks) if wrong is None else wrong)
    for one, (first, size, _) in list(zip(into, blocks, strict=True))[:loaded]:
        assert one.tobytes() == BYTES[first : first + size].tobytes()


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_rows_are_read_into_objects_and_what_lies_between_them_is_not_lost(
    file: Path, data: st.DataObject
) -> None:
    size, first = data.draw(st.integers(241, 20_000)), data.draw(st.integers(0, 5000))
    rows = data.draw(st.integers(0, 24))
    cut = sorted(data.draw(st.lists(st.integers(0, size - 1), min_size=2 * rows, max_size=2 * rows)))
    pairs = [*zip(cut[::2], cut[1::2], strict=True)]
    for way in range(block_rows.ways()):
        with file.open("rb") as opened:
            job, (between, _places) = _object_job(opened.fileno(), first, size, pairs)
            objects = block_rows.make_objects(job)
            jobs = job[None].copy()
            assert block_rows.load_blocks(jobs, (objects,), way)[0] == 1
        facts, row = jobs[:, JOB:].copy(), np.arange(rows)
        block = BYTES[first : first + size].tobytes()
        found = block_rows.objects_of(facts, 0 * row, row, 0, False)
        assert found == [block[a:b] for a, b in pairs]
        assert all(one is other for one, other in zip(found, objects, strict=True)), "copied once"
        gone = np.ones(size, np.bool_)
        for a, b in pairs:
            gone[a:b] = False
        assert between.tobytes() == BYTES[first : first + size][gone].tobytes()


def test_objects_that_do_not_fit_the_rows_of_a_block_are_not_written_to(file: Path) -> None:
    with file.open("rb") as opened:
        right, held = _object_job(opened.fileno(), 0, 5000, [(10, 2000), (2100, 4000)])
        objects = block_rows.make_objects(right)
        other, _held = _object_job(opened.fileno(), 0, 5000, [(10, 2000)])
        overlap, _kept = _object_job(opened.fileno(), 0, 5000, [(10, 2000), (1999, 4000)])
        past, _past = _object_job(opened.fileno(), 0, 5000, [(10, 20), (2100, 5001)])
        for job, given in (
            (right, None),
            (right, ()),
            (right, objects[::-1]),
            (right, block_rows.make_objects(other)),
            (overlap, block_rows.make_objects(overlap)),
            (past, block_rows.make_objects(past)),
        ):
            before = None if given is None else [bytes(bytearray(one)) for one in given if one is not None]
            assert block_rows.load_blocks(job[None].copy(), (given,)) == (0, False)
            assert before == (None if given is None else [one for one in given if one is not None])
        two = np.concatenate([right, right[-4:]])
        assert block_rows.make_objects(two) is None, "two fields of objects"
        assert block_rows.load_blocks(right[None].copy(), (objects,))[0] == 1
    assert objects == (BYTES[10:2000].tobytes(), BYTES[2100:4000].tobytes())
    assert held


def _hashes(spans: list[tuple[int, int]]) -> list[int]:
    return [xxhash.xxh3_64_intdigest(BYTES[first : first + size].data) for first, size in spans]


@pytest.mark.parametrize("way", range(block_rows.ways()))
def test_every_way_gives_the_hashes_of_the_package(file: Path, way: int) -> None:
    spans = [(0, size) for size in [*range(241, 2400), 4096, 65_535, 65_536, 1 << 20]]
    loaded, found = _load(file, spans, _hashes(spans), way)
    assert loaded == len(spans)
    assert found == [BYTES[first : first + size].tobytes() for first, size in spans]


def test_loading_ends_at_a_block_that_is_wrong_or_cannot_be_read(file: Path) -> None:
    right = _hashes([(100, 500)] * 3)
    assert _load(file, [(100, 500)] * 3, right)[0] == 3
    for wrong in range(3):
        hashes = [one ^ (number == wrong) for number, one in enumerate(right)]
        assert _load(file, [(100, 500)] * 3, hashes)[0] == wrong
    assert _load(file, [(len(BYTES) - 499, 500)], right[:1])[0] == 0  # the file ends before


def test_blocks_that_no_page_holds_are_read_like_others(tmp_path: Path) -> None:
    path = tmp_path / "cold"
    path.write_bytes(BYTES.tobytes() * 64)
    spans = [(len(BYTES) * n, len(BYTES)) for n in range(64)]
    hashes = [xxhash.xxh3_64_intdigest(BYTES.data)] * 64
    with path.open("rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        loaded, found = _load(path, spans, hashes)
        assert loaded == 64
        assert set(found) == {BYTES.tobytes()}


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


def _rows(
    pieces: list[bytes],
) -> tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(what keeps them, facts, slots, rows) of pieces that lie in two blocks with gaps between them."""
    kept, facts = [], []
    for own in (pieces[::2], pieces[1::2]):
        data = np.frombuffer(b"".join(b"gap" + one for one in own) + b"end", np.uint8)
        ends = np.cumsum([3 + len(one) for one in own], dtype=np.int64)
        starts = ends - np.array([len(one) for one in own], np.int64)
        kept.append((data, starts, ends))
        facts.append([len(own), 0, 0, 0, 0, _address(starts), _address(ends), _address(data), 8])
    number = np.arange(len(pieces))
    return kept, np.array(facts), number % 2, number // 2


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(st.sampled_from(TEXTS) | st.text(max_size=40), max_size=12))
def test_texts_are_decoded_whatever_they_hold(texts: list[str]) -> None:
    raw = [one.encode() for one in texts]
    _kept, facts, which, row = _rows(raw)
    found = block_rows.objects_of(facts, which, row, 1, True)
    assert found == texts == plain_rows.objects_of(facts, which, row, 1, True)
    assert block_rows.objects_of(facts, which, row, 1, False) == raw
    assert plain_rows.objects_of(facts, which, row, 1, False) == raw
    for one, text in zip(
        found, texts, strict=True
    ):  # a str of its own kind, as the interpreter would make it
        assert hash(one) == hash(text)
        assert one.isascii() == text.isascii()
        assert one + "ü" == text + "ü"


def test_text_that_is_not_utf8_is_refused() -> None:
    _kept, facts, which, row = _rows([b"good", b"bad \xff"])
    with pytest.raises(UnicodeDecodeError):
        block_rows.objects_of(facts, which, row, 1, True)


@pytest.mark.parametrize("rows", [block_rows, plain_rows], ids=["compiled", "in Python"])
def test_rows_are_gathered_where_all_are_there_to_be_copied(rows: Any) -> None:
    numbers = np.arange(100, dtype=np.int32)
    start = _address(numbers.view(np.uint8))
    facts = np.array(
        [[10, start, 0, 0, 4], [5, start + 40, 0, 0, 12], [10, start, start, start, -8]], np.int64
    )

    facts = np.hstack([facts, facts[:, 1:]])  # two fields, of the same values

    def gather(which: list[int], row: list[int]) -> list[int] | None:
        target = np.full((2, len(which)), -1, np.int32)
        parts = [
            one[part] for one in target for part in (slice(len(which) // 2), slice(len(which) // 2, None))
        ]
        state = rows.gather_rows(parts, facts, np.array(which, np.int64), np.array(row, np.int64), (0, 1))
        if state != rows.COPIED:
            assert (target == -1).all()
            return None
        assert (target[0] == target[1]).all()
        found: list[int] = target[0].tolist()
        return found

    assert gather([0, 1, 1, 0], [9, 0, 4, 0]) == [9, 10, 22, 0]
    assert gather([], []) == []
    for which, row in ((0, 10), (0, -1), (1, 5), (2, 0)):  # past either end; decimal texts
        assert gather([1, which], [1, row]) is None


@pytest.mark.parametrize("rows", [block_rows, plain_rows], ids=["compiled", "in Python"])
def test_rows_of_several_sizes_are_gathered_into_several_targets(rows: Any) -> None:
    draw = np.random.default_rng(3)
    sizes = [200_001, 24_000, 8, 96]  # bytes of a row
    values = [draw.integers(0, 256, (12, size), dtype=np.uint8) for size in sizes]
    facts = np.array([[12, *(n for one in values for n in (_address(one), 0, 0, one.shape[1]))]], np.int64)
    for count in (1, 40, 7):
        row = draw.integers(0, 12, count)
        cut = int(draw.integers(0, count + 1))
        targets = [np.empty((len(part), size), np.uint8) for size in sizes for part in (row[:cut], row[cut:])]
        state = rows.gather_rows(targets, facts, np.zeros(count, np.int64), row, (0, 1, 2, 3))
        assert state == rows.COPIED
        for field, one in enumerate(values):
            assert np.array_equal(np.concatenate(targets[2 * field : 2 * field + 2]), one[row])


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
        (
            "gather_rows",
            ([np.zeros(9, np.uint8)], np.ones((1, 5), np.int64), *np.zeros((2, 2), np.int64), (0,)),
        ),
        (
            "gather_rows",
            ([np.zeros(8, np.uint8)], np.ones((1, 5), np.int64), *np.zeros((2, 1), np.int64), (1,)),
        ),
        (
            "gather_rows",
            ([np.zeros(8, np.uint8)], np.ones((1, 5), np.int64), *np.zeros((2, 1), np.int64), (-1,)),
        ),
        (
            "gather_rows",
            ([np.zeros(8, np.uint8)], np.ones((1, 5), np.int64), *np.zeros((2, 1), np.int64), ()),
        ),
        (
            "gather_rows",
            ([np.zeros(8, np.uint8)] * 3, np.ones((1, 9), np.int64), *np.zeros((2, 1), np.int64), (0, 1)),
        ),
        ("gather_rows", ([np.zeros(8, np.uint8)], np.ones(5, np.int64), *np.zeros((2, 1), np.int64), (0,))),
        (
            "gather_rows",
            ([np.zeros(8, np.uint8)], np.ones((1, 5), np.int32), *np.zeros((2, 1), np.int64), (0,)),
        ),
        (
            "gather_rows",
            (
                [np.zeros(12, np.uint8), np.zeros(4, np.uint8)],
                np.ones((1, 5), np.int64),
                *np.zeros((2, 2), np.int64),
                (0,),
            ),
        ),  # a row across two
        ("bytes_at", (np.zeros(1, np.int64), np.array([-1]))),
        ("bytes_at", (np.zeros(1, np.int64), np.array([1, 1]))),
        (
            "objects_of",
            (np.zeros((1, 5), np.int64), *np.zeros((2, 1), np.int64), 0, False),
        ),  # a row past the end
        ("objects_of", (np.ones((1, 5), np.int64), np.ones(1, np.int64), np.zeros(1, np.int64), 0, False)),
        ("objects_of", (np.ones((1, 5), np.int64), *np.zeros((2, 1), np.int64), 1, False)),
        ("objects_of", (np.ones((1, 5), np.int64), *np.zeros((2, 1), np.int64), -1, False)),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_anything_is_read(
    function: str, arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(ValueError, match=r"expected|target|size"):
        getattr(block_rows, function)(*arguments)


def test_loading_refuses_what_does_not_fit(file: Path) -> None:
    into = np.zeros(1000, np.uint8)
    with file.open("rb") as opened:
        right = _job(opened.fileno(), 0, into, 0)
        wrong = [
            (FILE, -1),
            (FILE, 1 << 40),
            (OFFSET, -1),
            (SIZE, 240),
            (SIZE, -1),
            (RAW_SIZE, -1),
            (RAW_SIZE, 1000),
        ]
        for column, value in [*wrong, (JOB, -1)]:
            job = right.copy()
            job[column] = value
            with pytest.raises(ValueError, match="expected"):
                block_rows.load_blocks(np.array([right, job]), (None, None))
        for arguments in (
            (right, (None,)),
            (right[None], ()),
            (right[None, :JOB].copy(), (None,)),
            (right[None].astype(np.int32), (None,)),
            (right[None], (None,), block_rows.ways()),
            (right[None], (None,), -1),
        ):
            with pytest.raises(ValueError, match="expected"):
                block_rows.load_blocks(*arguments)
    assert not into.any()
    addresses = np.array([_address(BYTES)])
    with pytest.raises((TypeError, BufferError)):
        block_rows.copy_rows(bytes(8), addresses, 8)  # cannot be written to


def test_it_is_in_use_where_it_is_compiled() -> None:
    assert gather.block_rows is block_rows
