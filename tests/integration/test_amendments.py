"""`shardkit amend`: the next start applies a change, the ledger says who and why, and audits account for it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.audit import audit_run
from shardkit.errors import IntegrityError, StateError
from shardkit.ledger import Ledger
from shardkit.ledger.bindings import active_amendments, read_events
from shardkit.plan import Temperature
from tests.command_line import call, output_of
from tests.consumed_steps import batches_until
from tests.numbered_rows import write_rows

BATCH, LANES, ROWS = 16, 4, 400
STEPS = ROWS // BATCH


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> shardkit.Dataset:
    return write_rows(tmp_path_factory.mktemp("data"), ROWS)


def consume(
    ds: shardkit.Dataset, run: Path, last: int, *, state: Any = None, world: int = 1
) -> tuple[dict[int, list[str]], Any]:
    """Start the run as a program does that knows nothing of amendments; return keys by step, and the last state."""
    found: dict[int, list[str]] = {}
    plan = ds.plan(global_batch=BATCH, lanes=LANES, seed=2)
    for rank in range(world):
        with ds.loader(plan, rank=rank, world=world, run=run, tensors=False) as loader:
            if state is not None:
                loader.load_state_dict(state)
            for batch in batches_until(loader, last):
                keys = [f"k{n:03d}" for n in batch["x"].tolist()]
                found[batch.step] = found.get(batch.step, []) + keys
            after = loader.state_dict()
    return found, after


def amend(run: Path, *arguments: object) -> dict[str, Any]:
    told = output_of("amend", run, *arguments, "--json")
    document: dict[str, Any] = json.loads(told)
    return document


@pytest.mark.parametrize("world", [1, 2])
def test_steps_are_skipped_by_the_next_start(ds: shardkit.Dataset, tmp_path: Path, world: int) -> None:
    run = tmp_path / "run"
    first, state = consume(ds, run, 6, world=world)
    planned = ds.plan(global_batch=BATCH, lanes=LANES, seed=2)
    made = amend(run, "--skip", "8:11", "--message", "the crawl was broken", "--author", "ada")
    assert (made["change"], made["author"]) == ("skip 8:11 from step 8", "ada")
    then, later = consume(ds, run, 15, state=state, world=world)
    assert list(then) == list(range(6, 15))
    for step, keys in then.items():
        rows = planned.step(step if step < 8 else step + 3).ravel()
        assert Counter(keys) == Counter(ds.key(n) for n in rows.tolist())
    more, _ = consume(ds, run, STEPS - 3, state=later, world=world)
    skipped = {ds.key(n) for step in (8, 9, 10) for n in planned.step(step).ravel().tolist()}
    assert sorted(key for part in (first, then, more) for keys in part.values() for key in keys) == sorted(
        {ds.key(n) for n in range(ROWS)} - skipped
    )
    result = audit_run(run)
    assert result.exit_code == 0, result.findings
    (told,) = [one for one in result.findings if one.kind == "amendment"]
    assert (told.severity, told.text) == ("explained", "skip 8:11 from step 8, by ada: the crawl was broken")
    assert "applied" in call("amend", run, "--undo")[1]


def test_listed_samples_and_weights(ds: shardkit.Dataset, tmp_path: Path) -> None:
    """Two amendments after each other, each applied by a start, and a state of any step after them."""
    run, listed = tmp_path / "run", tmp_path / "list.txt"
    first, state = consume(ds, run, 6)
    bad = [f"k{n:03d}" for n in range(0, ROWS, 7)]
    listed.write_text("\n".join(bad) + "\n")
    amend(run, "--exclude", listed, "--message", "poisoned")
    then, state = consume(ds, run, 12, state=state)
    assert not {key for keys in then.values() for key in keys} & set(bad)
    seen = [key for part in (first, then) for keys in part.values() for key in keys]
    assert len(seen) == len(set(seen))
    amend(run, "--weights", "s1=3", "--weights", "s[023]=1/2", "--from-step", 14)
    third, _ = consume(ds, run, 40, state=state)
    assert not {key for keys in third.values() for key in keys} & set(bad)
    drawn = Counter(int(key[1:]) % 4 for step in range(16, 40) for key in third[step])
    assert drawn[1] / sum(drawn.values()) == pytest.approx(3 / 4.5, abs=0.02)
    result = audit_run(run)
    assert result.exit_code == 0, result.findings
    assert [one.severity for one in result.findings if one.kind == "amendment"] == ["explained"] * 2
    assert [one["change"].split()[0] for one in amend(run, "--list")["amendments"]] == ["exclude", "weight"]
    output_of("audit", "trace", run, "--exclude", listed, code=5)  # steps before used some


def test_an_amendment_is_undone_before_a_start_has_applied_it(ds: shardkit.Dataset, tmp_path: Path) -> None:
    run = tmp_path / "run"
    _, state = consume(ds, run, 6)
    amend(run, "--skip", "8:11")
    assert audit_run(run).exit_code == 0
    assert amend(run, "--skip", "8:11")["amendment"] == 0, "the same again changes nothing"
    undone = amend(run, "--undo", "--message", "a mistake")
    assert undone["undone"]["amendment"] == 0
    assert amend(run, "--list") == {"amendments": []}
    then, _ = consume(ds, run, 12, state=state)
    planned = ds.plan(global_batch=BATCH, lanes=LANES, seed=2)
    assert Counter(then[9]) == Counter(ds.key(n) for n in planned.step(9).ravel().tolist())
    result = audit_run(run)
    assert result.exit_code == 0, result.findings
    assert any(one.kind == "undo" and one.text.endswith(": a mistake") for one in result.findings)
    told = output_of("amend", run, "--undo", code=1)
    assert "no amendment is in force" in told


def test_a_later_state_and_another_plan_are_refused(ds: shardkit.Dataset, tmp_path: Path) -> None:
    run = tmp_path / "run"
    consume(ds, run, 6)
    _, late = consume(ds, run, 12, state={**consume(ds, tmp_path / "other", 6)[1]})
    amend(run, "--skip", "8:11")
    with pytest.raises(StateError, match="of step 12, and the plan differs from step 8 on"):
        consume(ds, run, 14, state=late)
    with pytest.raises(StateError, match=r"amendment 0 .*make the plan with the settings of the run"):
        ds.loader(ds.plan(global_batch=BATCH, lanes=LANES, seed=3), run=run)


def test_an_earlier_amendment_ends_the_later_ones(ds: shardkit.Dataset, tmp_path: Path) -> None:
    """Back to a state before the first amendment: the run forks, and the record of both branches is sound."""
    run = tmp_path / "run"
    _, early = consume(ds, run, 4)
    _, state = consume(ds, run, 8, state=early)
    amend(run, "--skip", "8:11")
    consume(ds, run, 14, state=state)
    amend(run, "--skip", "5:6", "--message", "found an earlier one")
    assert [one.number for one in active_amendments(read_events(run))] == [1]
    then, _ = consume(ds, run, 12, state=early)
    planned = ds.plan(global_batch=BATCH, lanes=LANES, seed=2)
    assert Counter(then[8]) == Counter(ds.key(n) for n in planned.step(9).ravel().tolist())
    result = audit_run(run)
    assert result.exit_code == 0, result.findings
    assert any(one.kind == "fork" for one in result.findings)


def test_a_changed_amendment_is_a_violation(ds: shardkit.Dataset, tmp_path: Path) -> None:
    """Bytes of the event, and an event that somebody wrote with all checksums in order."""
    run = tmp_path / "run"
    _, state = consume(ds, run, 6)
    amend(run, "--skip", "8:11", "--author", "ada")
    events = run / "ledger" / "events"
    whole = events.read_bytes()
    events.write_bytes(whole.replace(b'"skip":11', b'"skip":12'))
    assert call("audit", run)[0] == 4
    assert call("amend", run, "--list")[0] == 4
    events.write_bytes(whole)
    assert call("audit", run)[0] == 0
    (one,) = active_amendments(read_events(run))
    with Ledger(run, writing=True) as ledger:
        ledger.add_event({
            "kind": "amendment", "step": 6, "number": 1, "from_step": 8, "resume_from": 8, "parent": one.plan,
            "plan": "ab" * 32, "manifest": one.manifest, "skip": 20, "weights": None, "excluded": None,
            "author": "eve", "message": "", "time": 0,
        })  # fmt: skip
        ledger.commit()
    told = output_of("audit", run, code=4)
    assert "amendment 1 (skip 8:20 from step 8) makes the plan" in told
    with pytest.raises(IntegrityError, match="it was changed"):
        consume(ds, run, 8, state=state)


def test_mistakes_are_named(ds: shardkit.Dataset, tmp_path: Path) -> None:
    run, listed = tmp_path / "run", tmp_path / "list.txt"
    consume(ds, run, 4)
    listed.write_text("k001\nnothing\n")
    for code, words, arguments in (
        (2, "amend takes --skip", ()),
        (2, "expected A:B with A < B", ("--skip", "11:8")),
        (2, "expected A:B with A < B", ("--skip", "8")),
        (2, "expected PATTERN=WEIGHT", ("--weights", "s1=-2")),
        (2, "amend takes --skip", ("--list", "--undo")),
        (2, "leave out --from-step", ("--skip", "8:11", "--from-step", 9)),
        (5, "nothing", ("--exclude", listed)),
        (1, "matches no stratum", ("--weights", "web*=2")),
    ):
        found, told = call("amend", run, *arguments)
        assert (found, words in told) == (code, True), (arguments, found, told)
    assert read_events(run) == [] or not active_amendments(read_events(run))
    code, told = call("amend", tmp_path / "absent", "--skip", "8:11")
    assert code == 1
    assert "is no run directory" in told


@pytest.mark.parametrize(
    "kind",
    [
        {"mixer": Temperature(every=LANES)},
        {"group_by": {"*": 64}},
        {"sequence": 8, "row_tokens": 4},
        {"cost": "bytes(source)"},
    ],
    ids=lambda kind: next(iter(kind)),
)
def test_a_refused_exclusion_commits_no_version(tmp_path: Path, kind: dict[str, Any]) -> None:
    """Plans with a mixer, groups, sequences or costs do not change their manifest."""
    ds, run, listed = write_rows(tmp_path / "data", ROWS), tmp_path / "run", tmp_path / "list.txt"
    mixer = {name: kind.pop(name) for name in ("mixer",) if name in kind}
    plan = ds.plan(global_batch=BATCH, lanes=LANES, seed=2, **kind)
    with ds.loader(plan, run=run, tensors=False, **mixer) as loader:
        next(iter(loader))
    listed.write_text("k001\n")
    before = ds.repository.log()
    told = output_of("amend", run, "--exclude", listed, code=1)
    assert "plan: a plan with" in told
    assert shardkit.open(ds.repository.url).repository.log() == before
    assert active_amendments(read_events(run)) == []
