"""The rank's journal: torn tails are cut, damage is found."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from shardkit.errors import FormatError
from shardkit.ledger import Journal, read_journal
from shardkit.plan import cell_digest

MANIFEST = "sha256:" + "ab" * 32
PLAN = "cd" * 32


def _write(directory: Path, steps: int) -> Path:
    with Journal(directory, manifest=MANIFEST, plan=PLAN, rank=1, world=2) as journal:
        for step in range(steps):
            journal.record(step, [(lane, np.arange(lane, lane + 3)) for lane in (4, 5)])
    return journal.path


def test_records_come_back_in_order(tmp_path: Path) -> None:
    records = list(read_journal(_write(tmp_path, 3), manifest=MANIFEST, plan=PLAN))
    assert [(r.step, r.lane, r.rows) for r in records] == [(s, lane, 3) for s in range(3) for lane in (4, 5)]


def test_cell_digest_is_the_head_of_sha256_over_little_endian_int64() -> None:
    samples = np.array([5, 1 << 40, 7])
    expected = hashlib.sha256(b"".join(int(x).to_bytes(8, "little") for x in samples)).hexdigest()
    assert cell_digest(samples) == expected[:32]


def test_every_start_has_a_file_of_its_own(tmp_path: Path) -> None:
    first, second = _write(tmp_path, 1), _write(tmp_path, 2)
    assert first != second
    assert len(list(read_journal(first))) == 2


@pytest.mark.parametrize("cut", range(1, 41))
def test_a_torn_tail_is_left_out(tmp_path: Path, cut: int) -> None:
    path = _write(tmp_path, 2)
    path.write_bytes(path.read_bytes()[:-cut])
    assert len(list(read_journal(path))) == 3


def test_a_file_killed_while_being_made_holds_nothing(tmp_path: Path) -> None:
    path = _write(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:50])
    assert list(read_journal(path)) == []


def test_every_flipped_bit_before_the_last_record_is_found(tmp_path: Path) -> None:
    path = _write(tmp_path, 2)
    clean = path.read_bytes()
    for position in range(0, len(clean) - 40, 3):
        damaged = bytearray(clean)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        with pytest.raises(FormatError):
            list(read_journal(path))


def test_a_journal_of_another_plan_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path, 1)
    with pytest.raises(FormatError, match="plan"):
        list(read_journal(path, plan="ef" * 32))
