"""What is compiled does what is written in Python: the same hashes, the same rows, and errors where they do not fit."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.loader import gather, plain_rows
from shardkit.loader.block_loading import DIGEST, JOB

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


def _loads(rows: Any, slots: int, **options: Any) -> Any:
    """Loads into a table of one column."""
    loads = rows.Loads(1, **options)
    loads.set_table(np.zeros((slots, 1), np.int64))
    return loads


def _job(file: int, offset: int, into: np.ndarray[Any, Any], expected: int, slot: int = 0) -> list[int]:
    signed = expected - (expected >> 63 << 64)
    return [file, offset, len(into), _address(into), signed, 0, slot, 0, 0, 0, 0, 1]


def _load(
    path: Path,
    spans: list[tuple[int, int]],
    hashes: list[int],
    size: int = len(BYTES),
    **options: Any,
) -> tuple[list[bool], list[bytes]]:
    """(which are intact, what was read) of spans of a file, loaded by this thread."""
    loads = _loads(block_rows, len(spans) + 1, **options)
    into = [np.zeros(size, np.uint8) for _, size in spans]
    loads.add_file(str(path), size)
    jobs = [
        _job(0, first, one, expected, n)
        for n, ((first, _), one, expected) in enumerate(zip(spans, into, hashes, strict=True))
    ]
    jobs.append(_job(-1, 0, np.zeros(1, np.uint8), 0, len(spans)))
    assert loads.add(np.array(jobs)) == 0
    intact = [True] * len(spans)
    while (job := loads.work())[0] < len(spans):
        intact[job[1]] = False
        loads.finish(job[0], job[1], None)
    loads.finish(*job[:2], None)
    assert loads.wait(len(jobs), 1) == len(jobs)
    loads.close()
    return intact, [one.tobytes() for one in into]


def _object_job(
    first: int, size: int, spans: list[tuple[int, int]], slot: int = 0, after: int = 0
) -> tuple[list[int], Any]:
    """A job whose rows, at these places of the block, become objects; and what it needs meanwhile."""
    between = np.zeros(size - sum(b - a for a, b in spans), np.uint8)
    starts, ends = places = np.array(spans, np.int64).reshape(-1, 2).T.copy()
    (expected,) = _hashes([(first, size)])
    job = _job(0, first, between, expected, slot)
    job[2], job[5], job[JOB] = size, after, len(spans)
    job += [_address(starts), _address(ends), 0, gather.OBJECTS]
    return job, (between, places)


@pytest.mark.skipif(not block_rows.hashes_sha256(), reason="this processor has no instructions for SHA-256")
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_blocks_are_known_by_sha256(file: Path, data: st.DataObject) -> None:
    """Digests equal those of hashlib for every length; each job with a wrong one is returned once."""
    sizes = st.integers(241, 700) | st.integers(241, 40_000)
    blocks = data.draw(
        st.lists(st.tuples(st.integers(0, 5000), sizes, st.booleans(), st.booleans()), min_size=1, max_size=9)
    )
    loads, into, jobs = _loads(block_rows, len(blocks) + 1), [], []
    loads.add_file(str(file), len(BYTES))
    digests = np.zeros((len(blocks), 32), np.uint8)
    for slot, (first, size, is_strong, is_right) in enumerate(blocks):
        into.append(np.zeros(size, np.uint8))
        block = BYTES[first : first + size].tobytes()
        digests[slot] = np.frombuffer(hashlib.sha256(block).digest(), np.uint8)
        if not is_right:
            digests[slot, data.draw(st.integers(0, 31))] ^= 1 << data.draw(st.integers(0, 7))
        job = _job(0, first, into[-1], xxhash.xxh3_64_intdigest(block) ^ (not is_right), slot)
        job[DIGEST] = _address(digests[slot]) if is_strong else 0
        jobs.append(job)
    jobs.append(_job(-1, 0, np.zeros(1, np.uint8), 0, len(blocks)))
    loads.add(np.array(jobs))
    left: list[int] = []
    while len(left) < 1 + sum(not is_right for *_, is_right in blocks):
        number, slot, _ = loads.work()
        left.append(slot)
        loads.finish(number, slot, None)
    assert sorted(left) == [slot for slot, (*_, is_right) in enumerate(blocks) if not is_right] + [
        len(blocks)
    ]
    assert loads.wait(len(jobs), 1) == len(jobs)
    loads.close()
    for one, (first, size, *_) in zip(into, blocks, strict=True):
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
    job, (between, _places) = _object_job(first, size, pairs)
    for way in range(block_rows.ways()):
        loads, facts = block_rows.Loads(5, way=way), np.zeros((2, 5), np.int64)
        loads.set_table(facts)
        loads.add_file(str(file), len(BYTES))
        loads.add(np.array([job, [-1, *[0] * 5, 1, *[0] * (len(job) - 7)]]))
        assert loads.wait(0, 0) == 0  # who works the steps makes the objects
        assert loads.work()[:2] == (1, 1)
        block = BYTES[first : first + size].tobytes()
        row = np.arange(rows)
        found = block_rows.objects_of(facts, 0 * row, row, 0, False)
        assert found == [block[a:b] for a, b in pairs]
        again = block_rows.objects_of(facts, 0 * row, row, 0, False)
        assert all(one is other for one, other in zip(found, again, strict=True)), "copied once"
        gone = np.ones(size, np.bool_)
        for a, b in pairs:
            gone[a:b] = False
        assert between.tobytes() == BYTES[first : first + size][gone].tobytes()
        loads.close()


def test_rows_of_one_field_only_are_read_into_objects(file: Path) -> None:
    job, _held = _object_job(0, 5000, [(10, 2000)])
    loads = block_rows.Loads(9)
    loads.set_table(np.zeros((1, 9), np.int64))
    loads.add_file(str(file), len(BYTES))
    with pytest.raises(ValueError, match="expected jobs"):
        loads.add(np.array([job + job[-4:]]))


def test_objects_are_held_until_their_slot_is_taken_or_released(file: Path) -> None:
    jobs = [
        _object_job(100 * n, 5000, [(10, 2000), (2100, 4000)], slot=n % 2, after=n - n % 2) for n in range(4)
    ]
    broken = _object_job(0, 5000, [(10, 2000), (1999, 4000)], after=4)  # rows that overlap: nothing is read
    wrong = _object_job(0, 5000, [(10, 2000)], after=4, slot=1)
    wrong[0][4] ^= 1
    loads, facts = block_rows.Loads(5), np.zeros((2, 5), np.int64)
    loads.set_table(facts)
    loads.add_file(str(file), len(BYTES))
    loads.add(np.array([*(job for job, _ in jobs), broken[0], wrong[0]]))
    thread = threading.Thread(target=loads.work)
    thread.start()
    which, row = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    held = []
    for step in (0, 2):
        loads.advance(step)
        assert loads.wait(step + 2, 60) == step + 2
        held.append(block_rows.objects_of(facts, which, row, 0, False))
        assert held[-1] == [
            BYTES[100 * (step + n) :][a:b].tobytes() for n in (0, 1) for a, b in ((10, 2000), (2100, 4000))
        ]

    def references(some: list[bytes]) -> set[int]:
        return {sys.getrefcount(one) for one in some}

    (own,) = references([bytes(1000)])
    assert references(held[0]) == {own}
    assert references(held[1]) == {own + 1}
    loads.release(1, 1)  # another job has its slot
    assert references(held[1]) == {own + 1}
    loads.release(3, 1)
    assert references(held[1]) == {own, own + 1}
    loads.advance(4)
    thread.join()  # with the one that overlaps
    number, slot, _ = loads.work()
    assert (number, slot) == (5, 1)
    for one in (4, 5):
        loads.finish(one, one - 4, np.zeros(5, np.int64).tobytes())
    assert loads.wait(6, 1) == 6
    assert references(held[1]) == {own}
    loads.close()
    loads.leave()


def _hashes(spans: list[tuple[int, int]]) -> list[int]:
    return [xxhash.xxh3_64_intdigest(BYTES[first : first + size].data) for first, size in spans]


@settings(max_examples=200, deadline=None)
@given(spans=st.lists(st.tuples(st.integers(0, 900), st.integers(241, 9000)), max_size=6))
def test_blocks_are_read_and_hash_to_what_the_package_says(file: Path, spans: list[tuple[int, int]]) -> None:
    states, found = _load(file, spans, _hashes(spans))
    assert all(states)
    assert found == [BYTES[first : first + size].tobytes() for first, size in spans]


@pytest.mark.parametrize("way", range(block_rows.ways()))
def test_every_way_gives_the_hashes_of_the_package(file: Path, way: int) -> None:
    spans = [(0, size) for size in [*range(241, 2400), 4096, 65_535, 65_536, 1 << 20]]
    assert all(_load(file, spans, _hashes(spans), way=way)[0])


def test_what_is_wrong_or_cannot_be_read_is_the_callers(file: Path, tmp_path: Path) -> None:
    (right,) = _hashes([(100, 500)])
    assert _load(file, [(100, 500)], [right])[0] == [True]
    assert _load(file, [(100, 500)], [right ^ 1])[0] == [False]
    assert _load(file, [(len(BYTES) - 499, 500)], [right])[0] == [False]  # the file ends before
    assert _load(file, [(100, 500)], [right], size=len(BYTES) - 1)[0] == [False]  # another file
    assert _load(tmp_path / "gone", [(100, 500)], [right])[0] == [False]
    (tmp_path / "link").symlink_to(file)
    assert _load(tmp_path / "link", [(100, 500)], [right])[0] == [False]


def test_blocks_that_no_page_holds_are_read_like_others(tmp_path: Path) -> None:
    path = tmp_path / "cold"
    path.write_bytes(BYTES.tobytes() * 64)
    spans = [(len(BYTES) * n, len(BYTES)) for n in range(64)]
    hashes = [xxhash.xxh3_64_intdigest(BYTES.data)] * 64
    with path.open("rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        states, found = _load(path, spans, hashes, size=64 * len(BYTES))
        assert all(states)
        assert {one[: len(BYTES)] for one in found} == {BYTES.tobytes()}


@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_are_loaded_in_order_each_once_its_memory_is_free(file: Path, threads: int) -> None:
    """Many jobs over few slots: a slot keeps what a step needs until that is over. Others ask meanwhile."""
    slots, steps, size = 4, 300, 1000
    loads = _loads(block_rows, slots, timed=True)
    memory = [np.zeros(size, np.uint8) for _ in range(slots)]
    loads.add_file(str(file), len(BYTES))
    spans = [(17 * n, size) for n in range(steps)]
    jobs = [_job(0, first, memory[n % slots], expected, n % slots)
            for n, ((first, _), expected) in enumerate(zip(spans, _hashes(spans), strict=True))]  # fmt: skip
    for n, job in enumerate(jobs):
        job[5] = max(0, n - slots + 1)  # its slot was that of step n - slots
    times: list[bytes] = []
    ended = threading.Event()

    def ask() -> None:
        while not ended.wait(0.001):
            assert loads.counts()[0] <= steps
            assert loads.running() == []
            loads.longest()
            times.append(loads.take_times())

    working = [threading.Thread(target=loads.work) for _ in range(threads)]
    working += [threading.Thread(target=ask) for _ in range(2)]
    for thread in working:
        thread.start()
    for first in range(0, steps, 70):
        loads.add(np.array(jobs[first : first + 70]))
    for n, (first, _) in enumerate(spans):
        assert loads.wait(n + 1, 60) > n
        assert memory[n % slots].tobytes() == BYTES[first : first + size].tobytes()
        loads.advance(n + 1)
    ended.set()
    loads.close()
    for thread in working:
        thread.join()
    assert len(b"".join(times) + loads.take_times()) == 16 * steps
    assert loads.wait(0, 0) == -2
    assert loads.counts()[:3] == (steps, steps, steps * size)


@pytest.mark.parametrize("rows", [block_rows, plain_rows], ids=["compiled", "in Python"])
def test_jobs_that_are_dropped_are_nobodys(rows: Any) -> None:
    loads = _loads(rows, 8)
    jobs = np.array([[-1, 0, 0, 0, 0, 0, slot, 10 + slot, 0, 0, 0, 7] for slot in range(5)])
    assert loads.add(jobs) == 0
    begun = [loads.work(), loads.work()]
    assert [one[:3] for one in begun] == [(0, 0, 10), (1, 1, 11)]
    assert loads.longest()[0] == 10
    assert loads.wait(1, 0.01) == -1
    assert loads.drop() == (2, [0, 1])  # both as of one moment: who ends between them has written no facts
    assert sorted(loads.running()) == [0, 1]
    assert loads.add(jobs[3:]) == 5
    loads.finish(0, 0, None)
    assert loads.running() == [1]
    assert loads.work()[:3] == (5, 3, 13)
    assert loads.wait(5, 0.01) == 5  # those before are nobody's
    loads.finish(5, 3, np.array([42]).tobytes())
    assert loads.wait(6, 1) == 6
    loads.finish(1, 1, np.array([42]).tobytes())
    assert loads.running() == []
    waiting = threading.Timer(0.1, loads.drop)
    waiting.start()
    assert loads.wait(7, 60) == -2  # who waits is told
    waiting.join()
    loads.close()
    assert loads.work() is None


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
@pytest.mark.parametrize("threads", [0, 3])
def test_threads_without_a_job_help_to_copy(rows: Any, threads: int) -> None:
    """Rows of a megabyte and more, and of less, of fields of several sizes: each lands where it belongs, once."""
    draw = np.random.default_rng(threads)
    sizes = [200_001, 24_000, 8, 96]  # bytes of a row: longer than a piece, and not
    values = [draw.integers(0, 256, (12, size), dtype=np.uint8) for size in sizes]
    facts = np.array([[12, *(n for one in values for n in (_address(one), 0, 0, one.shape[1]))]], np.int64)
    loads = rows.Loads(facts.shape[1])
    helping = [threading.Thread(target=loads.work) for _ in range(threads)]
    for thread in helping:
        thread.start()
    for count in (1, 40, 7, 120) * 3:
        row = draw.integers(0, 12, count)
        cut = int(draw.integers(0, count + 1))
        targets = [np.empty((len(part), size), np.uint8) for size in sizes for part in (row[:cut], row[cut:])]
        state = loads.gather_rows(targets, facts, np.zeros(count, np.int64), row, (0, 1, 2, 3))
        assert state == rows.COPIED
        for field, one in enumerate(values):
            assert np.array_equal(np.concatenate(targets[2 * field : 2 * field + 2]), one[row])
    loads.close()
    for thread in helping:
        thread.join(30)
        assert not thread.is_alive()


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
    into, loads = np.zeros(1000, np.uint8), _loads(block_rows, 2)
    loads.add_file(str(file), len(BYTES))
    right = _job(0, 0, into, 0)
    assert loads.add(np.array([right])) == 0
    for column, wrong in ((0, 1), (1, -1), (2, 240), (2, -1), (6, 2), (6, -1), (9, -1), (9, 1000)):
        job = [*right]
        job[column] = wrong
        with pytest.raises(ValueError, match="expected"):
            loads.add(np.array([job]))
    calls: list[Callable[[], Any]] = [
        lambda: loads.add(np.zeros(12, np.int64)),
        lambda: loads.set_table(np.zeros((1, 1), np.int64)),
        lambda: loads.set_table(np.zeros((2, 2), np.int64)),
        lambda: loads.finish(0, 0, None),
        lambda: block_rows.Loads(0),
        lambda: block_rows.Loads(1, way=block_rows.ways()),
        lambda: block_rows.Loads(1, way=-1),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="expected"):
            call()
    assert loads.work()[:2] == (0, 0)
    for wrong_facts in ((0, 2, None), (0, 0, bytes(9)), (1, 0, None)):
        with pytest.raises(ValueError, match="expected"):
            loads.finish(*wrong_facts)
    loads.close()
    addresses = np.array([_address(BYTES)])
    with pytest.raises((TypeError, BufferError)):
        block_rows.copy_rows(bytes(8), addresses, 8)  # cannot be written to


def test_it_is_in_use_where_it_is_compiled() -> None:
    assert gather.block_rows is block_rows
