"""One leaf per step whatever the ranks: kills, torn tails, restarts on other worlds, merges at any time."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardkit.errors import IntegrityError
from shardkit.ledger import Journal, Ledger, bindings, ledger_head, merge_journals, step_digest
from shardkit.ledger import journal as journal_module
from shardkit.ledger.ledger import Tree, leaf_hash
from tests.journal_cells import record_cells

MANIFEST = "sha256:" + "ab" * 32
PLAN, OTHER = "cd" * 32, "ef" * 32
LANES = 6


def cell(step: int, lane: int, salt: int = 0) -> np.ndarray:
    return np.arange(3, dtype=np.int64) + 1000 * step + 10 * lane + salt


def expected_root(steps: int, *, first: int = 0, salted_from: int = 1 << 60, plan: str = PLAN) -> str:
    """From the definition in SPEC.md, with nothing of the ledger's code but the tree."""
    leaves = []
    for step in range(first, steps):
        salt = 5 if step >= salted_from else 0
        cells = b"".join(
            hashlib.sha256(cell(step, lane, salt).astype("<i8").tobytes()).digest()[:16]
            for lane in range(LANES)
        )
        named = plan if step >= salted_from else PLAN
        body = bytes.fromhex("ab" * 32) + bytes.fromhex(named) + struct.pack("<Q", step) + cells
        leaves.append(leaf_hash(hashlib.sha256(body).digest()))
    return Tree(leaves).root().hex()


class Start:
    """One launch of a run on `world` ranks, driven step by step."""

    def __init__(self, run: Path, world: int, *, plan: str = PLAN, salt: int = 0) -> None:
        self.salt = salt
        self.noted: list[float] = []
        self.journals = [
            Journal(run / "journal", manifest=MANIFEST, plan=plan, rank=rank, world=world, lanes=LANES,
                    meta={"dataset": ["data"]})
            for rank in range(world)
        ]  # fmt: skip
        self.lanes = [list(range(r * LANES // world, (r + 1) * LANES // world)) for r in range(world)]

    def step(self, step: int, ranks: int | None = None) -> None:
        for journal, lanes in list(zip(self.journals, self.lanes, strict=True))[:ranks]:
            record_cells(journal, step, [(lane, cell(step, lane, self.salt)) for lane in lanes])

    def note(self, step: int, first: int, ranks: int) -> None:
        """Note one loss per lane on some ranks, each another number, from `first` on."""
        for journal, lanes in list(zip(self.journals, self.lanes, strict=True))[:ranks]:
            losses = np.arange(
                first + len(self.noted), first + len(self.noted) + len(lanes), dtype=np.float32
            )
            journal.record_losses(step, np.array(lanes), losses)
            self.noted += losses.tolist()

    def kill(self, tear: int = 0) -> None:
        for journal in self.journals:
            journal.close()
        if tear:
            os.truncate(self.journals[0].path, max(0, self.journals[0].path.stat().st_size - tear))


def run_of(run: Path, last: int, world: int = 1) -> Start:
    start = Start(run, world)
    for step in range(last):
        start.step(step)
    return start


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_tree_is_the_same_on_any_topology_through_kills(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "ROTATE_BYTES", data.draw(st.sampled_from([400, 1500, 1 << 20])))
    monkeypatch.setattr(bindings, "KEEP_BYTES", data.draw(st.sampled_from([0, 3000, 1 << 24])))
    run, saved = tmp_path_factory.mktemp("run"), 0
    noted: list[float] = []
    torn = 0
    for _ in range(data.draw(st.integers(1, 5))):
        start = Start(run, data.draw(st.integers(1, LANES)))
        reached = saved + data.draw(st.integers(0, 12))
        resumed = saved
        for step in range(resumed, reached):
            start.step(step)
            late = max(resumed, step - data.draw(st.integers(0, 2)))
            start.note(late, len(noted), data.draw(st.integers(0, len(start.journals))))
            if data.draw(st.integers(0, 3)) == 0:  # a checkpoint
                saved = step + 1
                head = ledger_head(run, saved)
                assert head["steps"] == {"first": 0, "size": saved, "root": expected_root(saved)}
        start.step(reached, ranks=data.draw(st.integers(0, len(start.journals))))
        tear = data.draw(st.integers(0, 30)) if reached > saved else 0
        start.kill(tear)
        noted, torn = noted + start.noted, torn + LANES * (tear > 0)
    last = Start(run, data.draw(st.integers(1, LANES)))
    for step in range(saved, saved + 3):
        last.step(step)
    last.kill()
    ledger, merge = merge_journals(run)
    size = ledger.next_step
    assert size >= saved + 3
    assert ledger.head()["steps"] == {"first": 0, "size": size, "root": expected_root(size)}
    assert not [event for event in ledger.event_documents() if event["kind"] in ("fork", "conflict")]
    assert [step for step in merge.pending_steps() if step < saved + 3] == []
    head = ledger.head()
    assert ledger_head(run)["steps"] == head["steps"]
    with Ledger(run) as again:
        assert again.head() == ledger_head(run)
        found = np.frombuffer(again.loss_values(0, len(noted)), "<f4").tolist()
    assert set(found) <= set(noted)
    assert len(noted) - torn <= len(found) == len(set(found)), "each loss that was journaled is merged once"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_ranks_that_go_back_in_one_start_leave_what_they_recorded_before(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each leg has other cells, as the decisions of a mixer may be; ranks write at their own pace."""
    monkeypatch.setattr(journal_module, "ROTATE_BYTES", data.draw(st.sampled_from([400, 1500, 1 << 20])))
    run, world, merges = (
        tmp_path_factory.mktemp("run"),
        data.draw(st.integers(1, 3)),
        data.draw(st.booleans()),
    )
    start, legs, reached = Start(run, world), [], 0
    for leg in range(data.draw(st.integers(2, 4))):
        begin = data.draw(st.integers(0, max(0, reached - 1)))
        reached = begin + data.draw(st.integers(1, 8))
        legs += [(step, leg) for step in range(begin, reached)]
    left = [list(legs) for _ in range(world)]
    while any(left):
        rank = data.draw(st.sampled_from([rank for rank in range(world) if left[rank]]))
        step, leg = left[rank].pop(0)
        cells = [(lane, cell(step, lane, leg)) for lane in start.lanes[rank]]
        record_cells(start.journals[rank], step, cells)
        if merges and data.draw(st.integers(0, 5)) == 0:
            ledger_head(run, data.draw(st.sampled_from([None, step + 1])))
    start.kill()
    ledger, merge = merge_journals(run)
    assert not merge.pending_steps()
    assert ledger.next_step == reached
    last = dict(legs)  # the newest leg of each step
    wanted = [
        step_digest(MANIFEST, PLAN, step, b"".join(_digest(step, lane, last[step]) for lane in range(LANES)))
        for step in range(reached)
    ]
    assert [bytes(one) for one in ledger.branch_records()["digest"]] == wanted
    assert not [event for event in ledger.event_documents() if event["kind"] == "conflict"]


def _digest(step: int, lane: int, salt: int) -> bytes:
    return hashlib.sha256(cell(step, lane, salt).astype("<i8").tobytes()).digest()[:16]


def test_starts_repeats_and_assignments_are_events(tmp_path: Path) -> None:
    first = run_of(tmp_path, 10, world=2)
    ledger_head(tmp_path, 6)
    first.kill()
    second = Start(tmp_path, 3)
    for step in range(6, 12):
        second.step(step)
    second.kill()
    ledger, merge = merge_journals(tmp_path)
    assert merge.repeated == 4
    events = ledger.event_documents()
    assert [event["kind"] for event in events] == ["plan", "start", "assignment", "start", "assignment"]
    assert events[1] | {"time": 0} == {
        "kind": "start", "start": 0, "step": 0, "ranks": 2, "workers": 1, "reached": 0, "repeats": 0, "time": 0,
    }  # fmt: skip
    assert events[3]["reached"] == 10
    assert events[3]["repeats"] == 4
    assert events[2]["lanes"] == [[0, 0, 3], [1, 3, 3]]
    assert events[4]["lanes"] == [[0, 0, 2], [1, 2, 2], [2, 4, 2]]
    assert ledger.head()["steps"]["root"] == expected_root(12)


def test_a_fork_is_recorded_and_the_branch_left_behind_stays(tmp_path: Path) -> None:
    run_of(tmp_path, 8).kill()
    old = ledger_head(tmp_path)
    other = Start(tmp_path, 2, plan=OTHER, salt=5)
    for step in range(5, 9):
        other.step(step)
    other.kill()
    new = ledger_head(tmp_path)
    assert old["steps"]["root"] == expected_root(8)
    assert new["steps"] == {"first": 0, "size": 9, "root": expected_root(9, salted_from=5, plan=OTHER)}
    with Ledger(tmp_path) as ledger:
        fork = next(event for event in ledger.event_documents() if event["kind"] == "fork")
        assert (fork["step"], fork["record"]) == (5, 8)
        assert fork["abandoned"] == old["steps"]
        assert ledger.records()["step"].tolist() == [*range(8), *range(5, 9)]
        assert ledger.branch_records()["step"].tolist() == list(range(9))
        assert ledger.branch_records()["plan"].tolist() == [0] * 5 + [1] * 4


def test_both_branches_are_found_in_one_merge(tmp_path: Path) -> None:
    run_of(tmp_path, 8).kill()
    other = Start(tmp_path, 1, plan=OTHER, salt=5)
    other.step(5)
    other.kill()
    ledger, _ = merge_journals(tmp_path)
    assert ledger.head()["steps"]["root"] == expected_root(6, salted_from=5, plan=OTHER)
    assert [event["kind"] for event in ledger.event_documents()].count("fork") == 1


def test_a_cell_with_two_digests_is_a_conflict(tmp_path: Path) -> None:
    start = run_of(tmp_path, 2, world=2)
    start.step(2, ranks=1)
    start.kill()
    again = Start(tmp_path, 1, salt=5)
    again.step(2)
    again.kill()
    events = merge_journals(tmp_path)[0].event_documents()
    conflicts = [event for event in events if event["kind"] == "conflict"]
    assert [(event["step"], event["lane"]) for event in conflicts] == [(2, 0), (2, 1), (2, 2)]
    assert conflicts[0]["before"] == hashlib.sha256(cell(2, 0).tobytes()).hexdigest()[:32]


def test_a_run_may_begin_at_any_step(tmp_path: Path) -> None:
    start = Start(tmp_path, 2)
    for step in range(100, 110):
        start.step(step)
    start.kill()
    assert ledger_head(tmp_path)["steps"] == {"first": 100, "size": 10, "root": expected_root(110, first=100)}


def test_steps_behind_a_gap_wait(tmp_path: Path) -> None:
    start = run_of(tmp_path, 4)
    start.step(6)
    start.kill()
    ledger, merge = merge_journals(tmp_path)
    assert ledger.next_step == 4
    assert merge.pending_steps() == [6]
    ledger_head(tmp_path)
    filler = Start(tmp_path, 1)
    start.journals[0].path.unlink()  # step 6 waits in state.json
    filler.step(4)
    filler.step(5)
    filler.kill()
    assert ledger_head(tmp_path)["steps"]["root"] == expected_root(7)


def test_merged_journals_are_removed_and_the_ledger_stays_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "ROTATE_BYTES", 4096)
    monkeypatch.setattr(bindings, "KEEP_BYTES", 10_000)
    start = Start(tmp_path, 2)
    for step in range(400):
        start.step(step)
        if step % 50 == 49:
            ledger_head(tmp_path, step + 1)
    start.kill()
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert size < 200 * 400
    assert len(list((tmp_path / "journal").iterdir())) <= 4
    assert ledger_head(tmp_path)["steps"]["root"] == expected_root(400)


@pytest.mark.parametrize("crash", ["steps", "events", "losses", "loss_values", "state.json"])
def test_a_commit_that_a_kill_interrupts_never_happened(tmp_path: Path, crash: str) -> None:
    """Every file may hold what the interrupted commit appended, the later ones nothing of it."""
    start = run_of(tmp_path, 5)
    start.note(4, 0, 1)
    ledger_head(tmp_path)
    before = tmp_path / "before"
    shutil.copytree(tmp_path / "ledger", before)
    for step in range(5, 9):
        start.step(step)
        start.note(step, 0, 1)
    start.journals[0].event(6, "repair", location="mirror", count=1, what="a shard")
    start.kill()
    complete = ledger_head(tmp_path)
    order = ["steps", "events", "losses", "loss_values", "state.json"]
    after = {name: (tmp_path / "ledger" / name).read_bytes() for name in order}
    for name in order[order.index(crash) + 1 :]:
        after[name] = (before / name).read_bytes()
    for torn in (0, 7):
        for name, data in after.items():
            (tmp_path / "ledger" / name).write_bytes(data)
        if torn and crash != "state.json":
            (tmp_path / "ledger" / crash).write_bytes(after[crash][:-torn])
        head = merge_journals(tmp_path)[0].head()
        assert head["steps"] == complete["steps"]
        assert ledger_head(tmp_path) == complete


@pytest.mark.parametrize("name", ["steps", "events"])
def test_a_ledger_that_was_cut_is_refused(tmp_path: Path, name: str) -> None:
    run_of(tmp_path, 5).kill()
    ledger_head(tmp_path)
    path = tmp_path / "ledger" / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match=f"{name} was cut"):
        ledger_head(tmp_path)
    path.unlink()
    with pytest.raises(IntegrityError, match=f"{name} was cut"):
        merge_journals(tmp_path)


def test_a_ledger_without_its_state_is_refused(tmp_path: Path) -> None:
    run_of(tmp_path, 5).kill()
    ledger_head(tmp_path)
    (tmp_path / "ledger" / "state.json").unlink()
    with pytest.raises(IntegrityError, match=r"no state\.json"):
        ledger_head(tmp_path)


def test_a_journal_that_does_not_say_how_its_plan_was_made_is_merged_too(tmp_path: Path) -> None:
    with closing(
        Journal(tmp_path / "journal", manifest=MANIFEST, plan=PLAN, rank=0, world=1, lanes=LANES)
    ) as journal:
        for step in range(3):
            record_cells(journal, step, [(lane, cell(step, lane)) for lane in range(LANES)])
    assert ledger_head(tmp_path)["steps"]["root"] == expected_root(3)
    with Ledger(tmp_path) as ledger:
        plan = next(event for event in ledger.event_documents() if event["kind"] == "plan")
    assert plan == {
            "kind": "plan", "step": 0, "number": 0, "manifest": MANIFEST, "plan": PLAN, "lanes": LANES,
        }  # fmt: skip
