"""Runs with a mixer: same losses, same digests, on any ranks and through kills; audits recompute decisions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]

import shardkit
from shardkit.audit import audit_run, find_plans, load_run, uses_of
from shardkit.errors import ConfigurationError, PlanError, RunError, ShardkitError, StateError, UsageError
from shardkit.ledger import ledger_head
from shardkit.ledger.decisions import recorded_decisions
from shardkit.loader import mixing
from shardkit.loader.mixing import Mixing
from shardkit.plan import ADO, FunctionMixer, Mixer, Temperature
from tests.consumed_steps import batches_until
from tests.forged_ledger import forge_events

STEPS, EVERY = 70, 8
MIXER = ADO(every=EVERY, warmup=1, pace=0.7)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("mixed") / "data"
    with shardkit.create(
        root, schema={"x": "int32", "source": "str"}, stratify="source", format="arrow"
    ) as writer:
        for n in range(900):
            writer.add({"x": n, "source": ("web", "code", "books")[n % 10 // 4]})
    return str(root)


def losses_of(step: int, samples: np.ndarray, strata: np.ndarray) -> np.ndarray:
    """Return one loss per sample that depends on the step and the sample only."""
    pace = np.array([0.1, 0.5, 0.9])[strata]
    found: np.ndarray = (1 + (step + 2.0) ** -pace + 0.01 * np.sin(samples)).astype(np.float32)
    return found


def train(
    root: str,
    run: Path,
    *,
    world: int = 1,
    start: int = 0,
    stop: int = STEPS,
    mixer: Mixer = MIXER,
    by_cell: bool = False,
    ahead: int = 0,
    noted: Callable[[int], bool] = lambda step: True,
    turned: bool = False,
    store: Any = None,
    stops: Mapping[int, int] = MappingProxyType({}),
) -> list[list[int]]:
    """Take steps [start, stop) on ranks that are threads; return the samples of each step.

    `stops` has the ranks that stop earlier.
    """
    store = store or HashStore()
    found: list[list[list[int]]] = [[[] for _ in range(world)] for _ in range(stop)]
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            ds = shardkit.open(root)
            plan = ds.plan(global_batch=16, lanes=4, seed=3, weights={"*": 1})
            more: dict[str, Any] = {"store": store} if world > 1 else {}
            with ds.loader(
                plan,
                rank=rank,
                world=world,
                run=run,
                mixer=mixer,
                by_cell=by_cell,
                tensors=False,
                telemetry=None,
                **more,
            ) as loader:
                loader.seek(start)
                waiting: list[Any] = []
                for batch in batches_until(loader, stops.get(rank, stop)):
                    waiting.append(batch)
                    while len(waiting) > ahead or (waiting and first(batch).step == stop - 1):
                        one = waiting.pop(0)
                        parts = one if by_cell else [one]
                        samples = np.concatenate([part.samples for part in parts])
                        strata = loader.plan.grid.order.strata_of(samples)
                        found[first(one).step][rank] = samples.tolist()
                        if noted(first(one).step):
                            loader.note(
                                one, losses_of(first(one).step, samples, 2 - strata if turned else strata)
                            )
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return [[n for rank in step for n in rank] for step in found[start:]]


def first(batch: Any) -> Any:
    return batch[0] if isinstance(batch, list) else batch


def root_of(run: Path) -> str:
    return str(ledger_head(run)["steps"]["root"])


@pytest.fixture(scope="module")
def whole(root: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[int]], str]:
    run = tmp_path_factory.mktemp("whole") / "run"
    return train(root, run), root_of(run)


def test_a_second_loader_takes_no_losses_of_the_first_from_a_store(root: str, tmp_path: Path) -> None:
    store = HashStore()
    train(root, tmp_path / "first", world=2, store=store)
    train(root, tmp_path / "second", world=2, store=store, turned=True)
    code, found = audited(tmp_path / "second")
    assert code == 0, found


def test_the_mixture_follows_the_losses(root: str, whole: Any) -> None:
    ds = shardkit.open(root)
    strata = ds.plan(global_batch=16).grid.order.strata_of
    shares = [np.bincount(strata(np.array(step)), minlength=3) for step in whole[0]]
    early, late = np.sum(shares[: 2 * EVERY], axis=0), np.sum(shares[-2 * EVERY :], axis=0)
    assert np.ptp(early) <= 8  # a stage of 8 steps distributes units of 4 samples
    assert late.max() > 1.5 * late.min()


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, STEPS - 1), min_size=1, max_size=3), st.data())
def test_kills_and_resumes_change_nothing(
    root: str, whole: Any, tmp_path_factory: Any, stops: Sequence[int], data: Any
) -> None:
    """Each start goes back to any earlier step, as after a kill behind a checkpoint, on other ranks."""
    run = tmp_path_factory.mktemp("kills") / "run"
    begin = 0
    for stop in [*stops, STEPS]:
        stop = max(stop, begin + 1)
        world = data.draw(st.sampled_from([1, 2, 4]))
        assert (
            train(root, run, world=world, start=begin, stop=stop, by_cell=data.draw(st.booleans()))
            == whole[0][begin:stop]
        )
        begin = data.draw(st.integers(0, stop))
        begin = min(begin, STEPS - 1)
    assert root_of(run) == whole[1]


def test_reading_ahead_of_the_losses(root: str, whole: Any, tmp_path: Path) -> None:
    assert train(root, tmp_path / "run", ahead=EVERY // 2) == whole[0]
    with pytest.raises(UsageError, match="take at most 4 steps ahead"):
        train(root, tmp_path / "late", ahead=EVERY // 2 + 1)
    with pytest.raises(UsageError, match="step 5 has none"):
        train(root, tmp_path / "gap", noted=lambda step: step != 5)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_rank_is_named_after_the_timeout_of_the_store(root: str, tmp_path: Path, lost: int) -> None:
    waits: list[float] = []

    class Store(HashStore):
        def wait(self, keys: list[str], timeout: timedelta) -> None:  # type: ignore[override]
            if "mixing" in keys[0]:
                waits.append(timeout.total_seconds())
                timeout = timedelta(milliseconds=1)
            super().wait(keys, timeout)

    store = Store()
    store.set_timeout(timedelta(seconds=77))
    with pytest.raises(RunError, match=rf"rank {lost} of 2 has not come to step 12 after 77 s"):
        train(root, tmp_path / "run", world=2, store=store, stops={lost: 10})
    assert waits == [77.0]


def audited(run: Path, **more: Any) -> tuple[int, list[str]]:
    found = audit_run(run, level=None, **more)
    return found.exit_code, [f"{one.severity} {one.kind} {one.text}" for one in found.findings]


def test_an_audit_computes_the_decisions_again(root: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(root, run, world=2, stop=40)
    train(root, run, start=21)  # a start on one rank that goes back, as after a kill
    code, found = audited(run)
    assert code == 0, found
    assert any("8 decisions, each computed again" in text for text in found)
    table = shardkit.open(root).losses(run)
    record = load_run(run)
    plans = find_plans(record)
    assert table.num_rows == STEPS * 16
    assert table["sample"].to_pylist() == plans[0].plan.steps(0, STEPS).ravel().tolist()
    sample = int(plans[0].plan.step(50)[1, 2])
    assert any((use.step, use.lane, use.slot) == (50, 1, 2) for use in uses_of(record, plans, sample))


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, STEPS), st.lists(st.tuples(st.integers(0, STEPS), st.integers(1, 40)), min_size=1, max_size=4),
    st.data(),
)  # fmt: skip
def test_starts_that_go_back_with_other_losses_take_the_same_samples(
    root: str, tmp_path_factory: Any, reached: int, jumps: list[tuple[int, int]], data: Any
) -> None:
    """Each start notes other losses for the steps that it repeats; the recorded decisions stay."""
    run = tmp_path_factory.mktemp("jumps") / "run"
    taken = train(root, run, stop=reached)
    for start, count in jumps:
        start = min(start, len(taken))
        stop = min(start + count, STEPS)
        found = (
            train(root, run, start=start, stop=stop, turned=data.draw(st.booleans())) if start < stop else []
        )
        assert found[: len(taken) - start] == taken[start:stop]
        taken += found[len(taken) - start :]
    code, texts = audited(run)
    assert code == 0, texts
    assert not any("fork" in text or "conflict" in text for text in texts)


@pytest.mark.parametrize(
    ("world", "merged_at", "second"),
    [(1, (), (36, 39)), (2, (50,), (37, 52)), (2, (40, 45, 30), (36, 39))],
)
def test_a_loader_that_goes_back_takes_the_same_samples(
    root: str, tmp_path: Path, world: int, merged_at: tuple[int, ...], second: tuple[int, int]
) -> None:
    """The steps after the way back have other losses, and decisions that are new are made of them."""
    run, store, errors = tmp_path / "run", HashStore(), list[BaseException]()
    legs = ((0, 60, False), (*second, True), (20, STEPS, True))
    seen: dict[tuple[int, int], list[int]] = {}

    def work(rank: int) -> None:
        try:
            ds = shardkit.open(root)
            plan = ds.plan(global_batch=16, lanes=4, seed=3, weights={"*": 1})
            merges = list(merged_at) if rank else []
            more: dict[str, Any] = {"store": store} if world > 1 else {}
            with ds.loader(
                plan, rank=rank, world=world, run=run, mixer=MIXER, tensors=False, telemetry=None, **more
            ) as loader:
                for start, stop, turned in legs:
                    loader.seek(start)
                    for batch in batches_until(loader, stop):
                        samples = batch.samples.tolist()
                        assert seen.setdefault((rank, batch.step), samples) == samples
                        strata = loader.plan.grid.order.strata_of(batch.samples)
                        losses = losses_of(batch.step, batch.samples, 2 - strata if turned else strata)
                        loader.note(batch, losses)
                        if merges and batch.step == merges[0]:
                            ledger_head(run, merges.pop(0))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    code, found = audited(run)
    assert code == 0, found
    assert not any("fork" in text or "conflict" in text for text in found)


def test_a_rank_that_sees_an_older_journal_gets_the_decisions_of_the_leader(
    root: str, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over a network file system, whose files other machines see late."""
    run, local = tmp_path / "run", threading.local()
    train(root, run, stop=60)
    seek = Mixing.seek

    def seek_of_rank(self: Mixing, step: int) -> None:
        local.leads = self._leads
        seek(self, step)

    monkeypatch.setattr(Mixing, "seek", seek_of_rank)
    monkeypatch.setattr(
        mixing, "recorded_decisions", lambda *both: recorded_decisions(*both)[: None if local.leads else 1]
    )
    assert train(root, run, world=2, start=20, turned=True, stop=60) == whole[0][20:60]
    code, found = audited(run)
    assert code == 0, found


def test_incomplete_steps_are_accounted_for(root: str, tmp_path: Path) -> None:
    """One rank alone has recorded the last steps, which the next start does not reach."""
    run = tmp_path / "run"
    train(root, run, world=2, stop=59, stops={1: 57})
    train(root, run, world=2, start=20, stop=53, turned=True)
    code, found = audited(run)
    assert code == 0, found


def test_substitutes_are_of_the_stratum_that_was_planned(tmp_path: Path) -> None:
    """The mixer and the audit count the losses of substitutes alike, also in steps that the run repeats."""
    with shardkit.create(
        tmp_path / "data", schema={"text": "bytes", "source": "str"}, stratify="source", format="arrow"
    ) as writer:
        for n in range(900):
            writer.add({"text": b"" if n % 13 == 0 else b"%d" % n, "source": ("a", "b", "c")[n % 10 // 4]})
    ds = shardkit.open(tmp_path / "data")
    plan, run = ds.plan(global_batch=16, lanes=4, seed=3, weights={"*": 1}), tmp_path / "run"
    with ds.loader(
        plan, run=run, mixer=MIXER, tensors=False, telemetry=None, decode={"text": int}, on_error="substitute"
    ) as loader:
        for start, stop, turned in ((0, 60, False), (20, STEPS, True)):
            loader.seek(start)
            for batch in batches_until(loader, stop):
                strata = loader.plan.grid.order.strata_of(batch.samples)
                planned = loader.plan.step(batch.step).ravel()
                assert strata.tolist() == loader.plan.grid.order.strata_of(planned).tolist()
                loader.note(batch, losses_of(batch.step, batch.samples, 2 - strata if turned else strata))
    code, found = audited(run)
    assert code == 0, found
    assert any(text.startswith("explained substituted") for text in found)


Change = Callable[[dict[str, Any]], dict[str, Any] | None]


def forge(run: Path, change: Change) -> None:
    """Change the events of a ledger; all its checksums and roots fit again."""
    ledger_head(run)
    forge_events(run, lambda event, _: change(event))


def of_stage(stage: int, **changes: Callable[[list[int]], list[int]]) -> Change:
    def change(event: dict[str, Any]) -> dict[str, Any]:
        if event["kind"] == "decision" and event["stage"] == stage:
            return event | {name: function(event[name]) for name, function in changes.items()}
        return event

    return change


def made_at(step: int) -> Change:
    """Return a change of the step of a decision; an audit leaves out decisions after the last step."""

    def change(event: dict[str, Any]) -> dict[str, Any]:
        is_chosen = event["kind"] == "decision" and event["stage"] == 8
        return event | {"step": step} if is_chosen else event

    return change


def moved(values: list[int]) -> list[int]:
    return [values[0] + 1, values[1] - 1, *values[2:]]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (of_stage(8, weights=moved), "the mixer decides"),
        (of_stage(8, drawn=moved), "samples were drawn"),
        (of_stage(8, sums=moved), "other losses than those of steps 48 to 55"),
        (of_stage(8, counts=moved), "other losses than those of steps 48 to 55"),
        (of_stage(8, weights=lambda one: one[:1]), "not about 3 strata"),
        (of_stage(5, weights=lambda one: one[::-1]), "the run consumed other samples than planned"),
        (made_at(10**9), "made at step 1000000000, and the mixer decides this stage at step 60"),
        (made_at(59), "says that it was made at step 59"),
        (
            lambda event: event | {"stage": 4} if event.get("stage") == 5 else event,
            "is about stage 4, and stage 5 is the next one to be decided",
        ),
        (
            lambda event: None if event.get("stage") == 4 else event,
            "no decision of the mixer about steps from 32 on",
        ),
    ],
)
def test_a_tampered_decision_is_found(root: str, tmp_path: Path, change: Change, text: str) -> None:
    run = tmp_path / "run"
    train(root, run)
    assert audited(run)[0] == 0
    forge(run, change)
    code, found = audited(run)
    assert code == 4
    assert any(one.startswith("violated") and text in one for one in found), found


class Forged:
    """A mixer whose text names a shipped one with arguments that it does not take."""

    every, needs_losses, text = EVERY, False, 'temperature {"no_such": 1}'

    def __call__(self, losses: Any, weights: Any, step: int) -> list[float]:
        return [1.0, 1.0, 2.0]


def test_a_plan_of_a_mixer_that_cannot_exist_is_a_violation(root: str, tmp_path: Path) -> None:
    train(root, tmp_path / "run", mixer=Forged())
    for more in ({}, {"mixer": favour}):
        code, found = audited(tmp_path / "run", **more)
        assert code == 4
        assert any(one.startswith("violated decision") and "no_such" in one for one in found), found


def test_a_temperature_needs_no_losses(root: str, tmp_path: Path) -> None:
    mixer = Temperature(every=EVERY, start=5, end=1, steps=40)
    one = train(root, tmp_path / "one", mixer=mixer, noted=lambda step: False)
    assert train(root, tmp_path / "two", mixer=mixer, noted=lambda step: False, world=2) == one


calls: list[tuple[Any, ...]] = []


def favour(losses: Any, weights: Any, step: int) -> list[float]:
    calls.append((losses.shape, weights.shape, step))
    assert np.isnan(losses[2:, 0]).all()
    assert np.isfinite(losses[:, 1:]).all()
    assert weights.sum(axis=1) == pytest.approx(np.ones(len(weights)))
    return [0.0, 1.0, 3.0]


def test_a_function_of_the_user(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls.clear()
    samples = train(root, tmp_path / "run", mixer=FunctionMixer(function=favour, every=EVERY))
    assert calls[:2] == [((1, 3), (2, 3), 16), ((2, 3), (3, 3), 24)]
    strata = shardkit.open(root).plan(global_batch=16).grid.order.strata_of(np.array(samples[16:24]).ravel())
    assert np.bincount(strata, minlength=3).tolist() == [0, 32, 96]
    code, found = audited(tmp_path / "run")
    assert code == 3
    assert any(f"pass it with --mixer {__name__}:favour" in one for one in found)
    assert audited(tmp_path / "run", mixer=favour)[0] == 0

    def other(losses: Any, weights: Any, step: int) -> list[float]:
        return [0.0, 1.0, 2.0]

    def failing(losses: Any, weights: Any, step: int) -> list[float]:
        raise RuntimeError("no model at https://user:secret@host/x")

    other.__qualname__ = failing.__qualname__ = "favour"
    monkeypatch.setitem(globals(), "favour", other)
    assert audited(tmp_path / "run", mixer=other)[0] == 4

    def leaving(losses: Any, weights: Any, step: int) -> list[float]:
        raise SystemExit(7)

    leaving.__qualname__ = "favour"
    monkeypatch.setitem(globals(), "favour", leaving)
    code, found = audited(tmp_path / "run", mixer=leaving)
    assert code == 3
    assert any("the function failed (SystemExit: 7)" in one for one in found)
    monkeypatch.setitem(globals(), "favour", failing)
    code, found = audited(tmp_path / "run", mixer=failing)
    assert code == 3
    assert any("the function failed (RuntimeError: no model at" in one for one in found), found
    assert not any("secret" in one for one in found)
    forge(tmp_path / "run", of_stage(8, drawn=moved))
    assert any("samples were drawn" in one for one in audited(tmp_path / "run")[1])


def test_a_function_for_a_run_that_none_decided(root: str, tmp_path: Path) -> None:
    train(root, tmp_path / "run", stop=20)
    with pytest.raises(
        UsageError, match="no function of yours decided weights in this run; leave --mixer out"
    ):
        audited(tmp_path / "run", mixer=lambda losses, weights, step: [1.0, 1.0, 1.0])


def even_but_last(losses: Any, weights: Any, step: int) -> list[float]:
    return [1.0, 1.0, 3.0]


def test_a_function_without_losses_is_not_held_against_the_losses(root: str, tmp_path: Path) -> None:
    mixer = FunctionMixer(function=even_but_last, every=EVERY, needs_losses=False)
    train(root, tmp_path / "run", mixer=mixer)
    assert audited(tmp_path / "run")[0] == 3
    code, found = audited(tmp_path / "run", mixer=even_but_last)
    assert code == 0, found


returned: Any = None


def no_weights(losses: Any, weights: Any, step: int) -> Any:
    return returned


@pytest.mark.parametrize("value", [None, 0.5, ["a", "b", "c"], [10**400, 1, 1], [[1.0], [2.0], [3.0]]])
def test_a_function_that_returns_no_weights(
    root: str, tmp_path: Path, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "returned", value)
    mixer = FunctionMixer(function=no_weights, every=EVERY)
    with pytest.raises(PlanError, match=r"it returned .*, expected one number per stratum"):
        train(root, tmp_path / "run", mixer=mixer)


def test_what_is_refused(root: str, tmp_path: Path) -> None:
    ds = shardkit.open(root)
    plan = ds.plan(global_batch=16, lanes=4)
    refused: list[tuple[type[ShardkitError], str, dict[str, Any]]] = [
        (ConfigurationError, "pass run= with it", {}),
        (ConfigurationError, "leave out stride=", {"run": tmp_path / "a", "restart": True}),
        (ConfigurationError, "a Mixer, such as", {"run": tmp_path / "a", "mixer": 3}),
    ]
    for kind, message, more in refused:
        with pytest.raises((kind, AttributeError), match=message):
            ds.loader(plan, **{"mixer": MIXER, **more})
    train(root, tmp_path / "run", stop=30)
    with (
        ds.loader(plan, run=tmp_path / "run", mixer=MIXER) as loader,
        pytest.raises(ConfigurationError, match="resize: ranks exchange the losses"),
    ):
        loader.resize(rank=0, world=2)
    plan = ds.plan(global_batch=16, lanes=4, weights={"*": 1}, seed=3)
    with (
        ds.loader(plan, run=tmp_path / "run", mixer=MIXER) as loader,
        pytest.raises(StateError, match="has 3 decisions of the mixer before step 60, expected 6"),
    ):
        loader.seek(60)
