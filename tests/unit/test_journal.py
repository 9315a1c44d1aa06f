"""The rank's journal: torn tails are cut, damage is found."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from shardkit.errors import FormatError, RunError, UsageError
from shardkit.ledger import Journal, ledger_head, read_journal
from shardkit.ledger import journal as journal_module
from shardkit.ledger.bindings import MANY_PENDING
from shardkit.ledger.journal import JournalFile
from shardkit.plan import cell_digest
from tests.journal_cells import record_cells

MANIFEST = "sha256:" + "ab" * 32
PLAN = "cd" * 32


def _write(directory: Path, steps: int) -> Path:
    with closing(Journal(directory, manifest=MANIFEST, plan=PLAN, rank=1, world=2, lanes=4)) as journal:
        for step in range(steps):
            record_cells(journal, step, [(lane, np.arange(lane, lane + 3)) for lane in (4, 5)])
    return journal.path


def test_records_come_back_in_order(tmp_path: Path) -> None:
    records = list(read_journal(_write(tmp_path, 3)))
    assert [(r.step, r.lane, r.rows) for r in records] == [(s, lane, 3) for s in range(3) for lane in (4, 5)]


def test_cell_digest_is_the_head_of_sha256_over_little_endian_int64() -> None:
    samples = np.array([5, 1 << 40, 7])
    expected = hashlib.sha256(b"".join(int(x).to_bytes(8, "little") for x in samples)).hexdigest()
    assert cell_digest(samples) == expected[:32]


def test_every_start_has_a_file_of_its_own(tmp_path: Path) -> None:
    first, second = _write(tmp_path, 1), _write(tmp_path, 2)
    assert first != second
    assert len(list(read_journal(first))) == 2


def test_a_later_start_is_later_although_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = JournalFile(_write(tmp_path, 1)).header
    monkeypatch.setattr(journal_module, "time", SimpleNamespace(time_ns=lambda: 1))
    second = JournalFile(_write(tmp_path, 2)).header
    assert first is not None
    assert second is not None
    assert second.started == first.started + 1


def test_a_loader_whose_run_another_loader_of_the_process_took_over_stops(tmp_path: Path) -> None:
    """A validation loader with the run directory of the training would make its steps an abandoned branch."""

    def opened() -> closing[Journal]:
        return closing(Journal(tmp_path, manifest=MANIFEST, plan=PLAN, rank=1, world=2, lanes=4))

    with opened() as first, opened() as second:
        record_cells(first, 0, [(4, np.arange(3))])
        record_cells(second, 0, [(5, np.arange(3))])  # chosen lanes of two loaders
        record_cells(first, 1, [(4, np.arange(3))])
        record_cells(second, 1, [(4, np.arange(3))])
        with pytest.raises(UsageError, match="make loaders for validation without run="):
            record_cells(first, 2, [(4, np.arange(3))])


@pytest.mark.parametrize("cut", range(1, 81))
def test_a_torn_tail_is_left_out(tmp_path: Path, cut: int) -> None:
    one, path = _write(tmp_path / "one", 1), _write(tmp_path / "two", 2)
    data = path.read_bytes()
    assert len(data) - one.stat().st_size == 80  # 2 cells of 24 bytes, head and checksum of the step
    path.write_bytes(data[:-cut])
    assert [record.step for record in read_journal(path)] == [0, 0]
    file = JournalFile(path)
    assert len(list(file.entries())) == 1
    assert file.torn_bytes == 80 - cut


def test_zeros_after_a_power_cut_are_torn_too(tmp_path: Path) -> None:
    path = _write(tmp_path, 1)
    path.write_bytes(path.read_bytes() + bytes(300))
    assert len(list(read_journal(path))) == 2


def test_dropped_repeated_and_swapped_entries_are_found(tmp_path: Path) -> None:
    path = _write(tmp_path, 4)
    data = path.read_bytes()
    start = len(data) - 4 * 80
    head, steps = data[:start], [data[start + 80 * i : start + 80 * i + 80] for i in range(4)]
    for order in ([0, 2, 3], [0, 1, 1, 2, 3], [0, 2, 1, 3], [1, 2, 3]):
        path.write_bytes(head + b"".join(steps[i] for i in order))
        with pytest.raises(FormatError, match=r"00001-00000.cells: the entry at byte \d+"):
            list(read_journal(path))


def test_a_file_killed_while_being_made_holds_nothing(tmp_path: Path) -> None:
    path = _write(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:50])
    assert list(read_journal(path)) == []


def test_every_flipped_bit_before_the_last_record_is_found(tmp_path: Path) -> None:
    path = _write(tmp_path, 2)
    clean = path.read_bytes()
    for position in range(0, len(clean) - 81, 3):
        damaged = bytearray(clean)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        with pytest.raises(FormatError):
            list(read_journal(path))


def test_a_journal_names_manifest_and_plan(tmp_path: Path) -> None:
    header = JournalFile(_write(tmp_path, 1)).header
    assert header is not None
    assert (header.manifest, header.plan) == (MANIFEST, PLAN)


def test_a_second_process_of_the_same_rank_is_refused_while_the_first_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would count as a start that repeats the steps. A killed process is none, whatever children it left."""
    monkeypatch.setattr(journal_module, "_PATIENCE", 2)
    program = f"""
import os, pathlib, time
from shardkit.ledger import Journal
journal = Journal(pathlib.Path({str(tmp_path)!r}), manifest={MANIFEST!r}, plan={PLAN!r}, rank=1, world=2, lanes=4)
if os.fork():
    print("ready", flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True
    ) as first:
        assert first.stdout is not None
        try:
            assert first.stdout.readline() == b"ready\n"
            with pytest.raises(RunError, match=f"process {first.pid} records the steps of rank 1"):
                _write(tmp_path, 1)
            Journal(tmp_path, manifest=MANIFEST, plan=PLAN, rank=0, world=2, lanes=4).close()
            first.kill()
            first.wait()
            _write(tmp_path, 1)
        finally:
            os.killpg(first.pid, signal.SIGKILL)


def test_journals_of_ranks_that_do_not_arrive_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = tmp_path / "journal"
    with closing(Journal(journal, manifest=MANIFEST, plan=PLAN, rank=1, world=2, lanes=4)) as mine:
        for step, told in ((MANY_PENDING, ""), (MANY_PENDING + 1, "wait for cells of other ranks")):
            for one in range(step - 1 if told else 0, step):
                record_cells(mine, one, [(lane, np.arange(3)) for lane in (2, 3)])
            ledger_head(tmp_path)
            assert told in caplog.text
            assert bool(told) == bool(caplog.records)
