"""Ranks and their lanes: defaults, agreement at the start, and moves while a run goes on."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import ConfigurationError, PlanError, RunError, StateError
from shardkit.loader import LoaderConfig, agreement, find_topology
from shardkit.loader.agreement import Exchange, agree
from shardkit.loader.lanes import LaneShares, Rebalancer, make_rebalancer
from shardkit.loader.settings import Rebalancing
from shardkit.plan import Population, assign, make_plan
from shardkit.plan.assignment import (
    Assignment,
    Decision,
    RankTelemetry,
    Rules,
    in_force,
    rebalance,
)

# ---- Rank and world are found, never guessed


@pytest.mark.parametrize(
    ("arguments", "environ", "found"),
    [
        ((2, 4), {"RANK": "0", "WORLD_SIZE": "8"}, (2, 4)),
        ((None, None), {"RANK": "3", "WORLD_SIZE": "5"}, (3, 5)),  # as torchrun sets them
        ((None, None), {}, (0, 1)),
        ((None, None), {"SLURM_NTASKS": "1"}, (0, 1)),
    ],
)
def test_arguments_win_over_the_environment_and_a_lone_process_is_rank_0_of_1(
    arguments: tuple[int | None, int | None], environ: dict[str, str], found: tuple[int, int]
) -> None:
    assert find_topology(*arguments, environ)[:2] == found


@pytest.mark.parametrize(
    ("rank", "world", "environ", "names"),
    [
        (1, None, {}, "world=None"),
        (4, 4, {}, "rank 4 of 4"),
        (-1, 4, {}, "rank = -1"),
        (None, None, {"RANK": "1"}, "WORLD_SIZE=None"),
        (None, None, {"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one'"),
        (None, None, {"SLURM_NTASKS": "8"}, "SLURM_NTASKS is 8"),
        (None, None, {"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is 2"),
    ],
)
def test_contradictions_are_refused(
    rank: int | None, world: int | None, environ: dict[str, str], names: str
) -> None:
    with pytest.raises(ConfigurationError, match=names):
        find_topology(rank, world, environ)


# ---- Lanes that nobody chose: most world sizes share them, and a dataset of few blocks has few


LARGE = Population.of("large", ["a"], [(shard, 0, 4096) for shard in range(4)], 2)
SMALL = Population.of("small", ["a"], [(0, 0, 4096)], 32)
COMMON = (96, 192, 256, 384, 480, 512, 768, 1000, 1024, 1536, 2048, 4096)


def lanes_of(batch: int, population: Population = LARGE) -> int:
    return make_plan(population, global_batch=batch).lanes


def worlds(number: int) -> set[int]:
    return {world for world in range(1, 65) if number % world == 0}


@pytest.mark.parametrize("batch", COMMON)
def test_nearly_all_worlds_that_divide_a_common_batch_work(batch: int) -> None:
    assert worlds(batch) - worlds(lanes_of(batch)) <= ({32} if batch == 480 else set())
    assert lanes_of(batch) <= 256


@given(st.integers(1, 4096))
def test_lanes_are_many_where_the_batch_allows_it(batch: int) -> None:
    lanes = lanes_of(batch)
    assert batch % lanes == 0
    if any(batch % d == 0 for d in range(32, 257)):
        assert 32 <= lanes <= 512
    assert (lanes % 2 == 0) == (batch % 2 == 0), "two ranks share what they could share"
    if batch >= 8:
        assert lanes_of(batch, SMALL) <= 32, "a dataset of few blocks has few lanes"


# ---- Ranks that begin together: whoever is late is named, and mistakes say what was meant


distributed = pytest.importorskip("torch.distributed")


def _tcp(tmp_path: Path) -> Any:
    return distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _file(tmp_path: Path) -> Any:
    return distributed.FileStore(str(tmp_path / "store"), 2)


def _hash(tmp_path: Path) -> Any:
    return distributed.HashStore()


@pytest.mark.parametrize("make", [_tcp, _file, _hash])
def test_a_rank_that_is_late_is_named_and_waited_for(
    make: Callable[[Path], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(agreement, "_QUIET_S", 0.05)
    store = make(tmp_path)
    store.set_timeout(timedelta(seconds=60))
    other = store.clone() if hasattr(store, "clone") else store

    def come_late() -> None:
        ends = time.monotonic() + 30
        while not caplog.records and time.monotonic() < ends:
            time.sleep(0.01)
        agree(Exchange(other, 1, 2), {"lanes": [1]}, lanes=2, shared=False)

    thread = threading.Thread(target=come_late)
    thread.start()
    found = agree(Exchange(store, 0, 2), {"lanes": [0]}, lanes=2, shared=False)
    thread.join(30)
    assert [one["lanes"] for one in found] == [[0], [1]]
    first = caplog.records[0].getMessage()
    assert "rank 0 has waited 0 s for a loader on rank 1 of 2" in first
    assert "rank=0, world=1" in first


def test_a_rank_that_never_comes_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(agreement, "_QUIET_S", 0.02)
    exchange = Exchange(_hash(tmp_path), 0, 2, patience_s=0.05)
    with pytest.raises(RunError, match="rank 1 of 2 has made no loader"):
        agree(exchange, {"lanes": [0]}, lanes=2, shared=False)


def test_other_loaders_are_asked_for_where_ranks_differ(tmp_path: Path) -> None:
    store = _hash(tmp_path)
    Exchange(store, 1, 2).put("1", b'{"lanes":[1],"plan":"b"}')
    with pytest.raises(StateError, match="Was a loader made on some ranks only"):
        agree(Exchange(store, 0, 2), {"lanes": [0], "plan": "a"}, lanes=2, shared=False)


def _hold_store(pipe: Any) -> None:
    store = _tcp(Path())
    pipe.send(store.port)
    pipe.recv()


def _use(exchange: Exchange, *, is_reading: bool) -> None:
    """Read a message, or write until the connection is known to be lost."""
    if is_reading:
        exchange.get("0", 0)
    for _ in range(100):
        exchange.put("1", b"{}")


@pytest.mark.parametrize("is_reading", [True, False])
def test_a_store_whose_process_has_ended_is_named(is_reading: bool) -> None:
    context = multiprocessing.get_context("fork")
    pipe, end = context.Pipe()
    holder = context.Process(target=_hold_store, args=(end,))
    holder.start()
    store = distributed.TCPStore("127.0.0.1", pipe.recv(), is_master=False)
    exchange = Exchange(store, 1, 2, patience_s=600)
    exchange.put("1", b"{}")
    holder.kill()
    holder.join()
    with pytest.raises(RunError, match="lost the connection to the store of the process group"):
        _use(exchange, is_reading=is_reading)


# ---- Rebalancing on simulated clusters: half-speed ranks, stalling storage, noise, and a move that made it worse


Cost = Callable[[int, int, int], float]  # seconds per cell of (rank, lanes it has, step)


def simulate(cost: Cost, *, steps: int = 2000, noise: float = 0.05, lanes: int = 64, ranks: int = 8,
             seed: int = 0) -> tuple[list[float], list[Decision], Assignment]:  # fmt: skip
    """Step times and journal of a run whose leader looks every 16 steps at the last 16."""
    rng = np.random.default_rng(seed)
    start = assign(lanes, ranks)
    journal: list[Decision] = []
    seen: list[list[float]] = [[] for _ in range(ranks)]
    times = []
    for step in range(steps):
        owners = in_force(start, journal, step)
        slowest = 0.0
        for rank in range(ranks):
            have = len(owners.lanes_of(rank))
            each = cost(rank, have, step) * float(rng.lognormal(0, noise))
            seen[rank].append(each)
            slowest = max(slowest, have * each)
        times.append(slowest)
        if step % 16 == 15:
            decision = rebalance(step, [RankTelemetry(tuple(s[-16:])) for s in seen], start, journal)
            if decision is not None:
                journal.append(decision)
    return times, journal, start


def half_speed(rank: int, have: int, step: int) -> float:
    return 2.0 if rank == 3 else 1.0


def test_a_rank_at_half_speed_costs_nine_cells_instead_of_sixteen():  # type: ignore[no-untyped-def]
    times, journal, start = simulate(half_speed, noise=0.0)
    assert times[0] == 16
    assert times[-1] == 9  # the ideal of 64 / 7.5 = 8.53 lanes, in whole lanes
    assert len(journal) == 1
    moved = sum(a != b for a, b in zip(start.owner, journal[0].assignment.owner, strict=True))
    assert moved == 4  # and no lane more than the slow rank must give
    assert journal[0].assignment.from_step > journal[0].decided_at


@pytest.mark.parametrize("seed", range(5))
def test_noisy_telemetry_does_not_make_lanes_oscillate(seed):  # type: ignore[no-untyped-def]
    times, journal, _ = simulate(half_speed, noise=0.15, seed=seed)
    assert 1 <= len(journal) <= 2
    assert np.mean(times[-500:]) < 0.8 * np.mean(times[:16])
    _, quiet, _ = simulate(lambda rank, have, step: 1.0, noise=0.15, seed=seed)
    assert quiet == []


def test_storage_that_stalls_and_recovers():  # type: ignore[no-untyped-def]
    def stalls(rank: int, have: int, step: int) -> float:
        return 4.0 if rank == 5 and 200 <= step < 1200 else 1.0

    times, journal, _ = simulate(stalls, noise=0.02)
    assert np.mean(times[100:190]) < 8.6
    assert np.mean(times[400:1100]) < 10  # 32 with a static assignment, 64 / 7.25 = 8.83 at best
    assert np.mean(times[-300:]) < 9.5  # and the lanes come back, up to the hysteresis
    assert len(journal) <= 4


def test_a_move_that_made_it_worse_is_undone_and_not_repeated_soon():  # type: ignore[no-untyped-def]
    def crowded(rank: int, have: int, step: int) -> float:
        # ranks that get more than 8 lanes run out of memory and slow down threefold: telemetry could not know
        return (2.0 if rank == 3 else 1.0) * (3.0 if have > 8 else 1.0)

    times, journal, start = simulate(crowded, noise=0.0, steps=400)
    assert [d.undoes for d in journal] == [0, 1]
    assert journal[1].assignment.owner == start.owner
    assert times[-1] == times[0] == 16
    longer, journal, _ = simulate(crowded, noise=0.0, steps=3000)
    assert len(journal) <= 6  # waits twice as long after each failure
    assert np.mean(longer) < 18


def test_replay_of_a_journal_and_wrong_rules():  # type: ignore[no-untyped-def]
    _, journal, start = simulate(half_speed)
    first = journal[0]
    assert in_force(start, journal, first.assignment.from_step - 1) == start
    assert in_force(start, journal, first.assignment.from_step) == first.assignment
    assert rebalance(first.decided_at + 1, [RankTelemetry((1.0,))] * 8, start, journal[:1]) is None
    # telemetry from before a change must not lead to the next one
    slow = [RankTelemetry((5.0 if rank == 6 else 1.0,)) for rank in range(8)]
    effect = first.assignment.from_step
    assert rebalance(effect + Rules().settle - 1, slow, start, journal[:1]) is None
    assert rebalance(effect + Rules().settle, slow, start, journal[:1]) is not None
    with pytest.raises(PlanError, match=r"rebalancing: .*expected a"):
        Rules(gain=0)


# ---- Rebalancers that talk through a store: every rank applies the same moves at the same step, whoever is ahead


dist = pytest.importorskip("torch.distributed")

RULES = Rules(lead=3, settle=8, backoff=64)


class Group:
    """Ranks of one process that take the same steps; `seconds(rank, lanes, step)` is what a cell costs there."""

    def __init__(self, ranks: int, lanes: int, rules: Rules = RULES) -> None:
        self.records: list[dict[str, Any]] = []
        self.seeks = 0
        store = dist.HashStore()
        settings = Rebalancing(every=4, rules=rules)

        def record(step: int, **details: Any) -> None:
            assert not store.check([f"{self.seeks}/decision/{step}"]), "journaled before it is published"
            self.records.append({"step": step, **details})

        self.ranks = [
            Rebalancer(
                settings,
                Exchange(store, r, ranks, patience_s=0.05),
                rank=r,
                dealt=LaneShares(assign(lanes, ranks)),
                record=record,
            )
            for r in range(ranks)
        ]

    def step(self, number: int, seconds: Any) -> list[list[int]]:
        owned = []
        for rank, one in enumerate(self.ranks):
            lanes = one.lanes_at(number)
            one.finished(len(lanes), len(lanes) * seconds(rank, len(lanes), number), 0.0)
            owned.append(lanes)
        assert sorted(chain.from_iterable(owned)) == list(range(sum(map(len, owned)))), (
            "every lane is worked once"
        )
        return owned


def third_at_half_speed(rank: int, _lanes: int, _step: int) -> float:
    return 2.0 if rank == 2 else 1.0


def test_a_seek_deals_evenly_again_and_going_on_does_not() -> None:
    group = Group(4, 16)
    for number in range(20):
        before = group.step(number, third_at_half_speed)
    for one in group.ranks:
        one.seek(20)
    assert group.step(20, third_at_half_speed) == before
    for one in group.ranks:
        one.seek(12)
    group.seeks += 1
    assert [len(lanes) for lanes in group.step(12, third_at_half_speed)] == [4, 4, 4, 4]
    owned = [group.step(number, third_at_half_speed) for number in range(13, 30)]
    assert len(owned[-1][2]) < 4


def test_a_rank_that_runs_ahead_of_the_leader_is_stopped_not_guessing() -> None:
    group = Group(2, 4)
    ahead = group.ranks[1]
    for number in range(RULES.lead):
        ahead.lanes_at(number)
    with pytest.raises(RunError, match="rank 0 of 2 has not come to step 0"):
        ahead.lanes_at(RULES.lead)


def test_a_loop_that_says_nothing_is_told() -> None:
    group = Group(2, 4)

    def silent(steps: range) -> None:
        for number in steps:
            for one in group.ranks:
                one.finished(len(one.lanes_at(number)), -1.0, 0.0)

    with pytest.warns(RuntimeWarning, match=r"loader\.watch\(model\)"):
        silent(range(4))
    silent(range(4, 12))  # and once is enough
    assert group.records == []


def test_impossible_settings() -> None:
    with pytest.raises(ConfigurationError, match="every = 0: expected a whole number from 1"):
        Rebalancing(every=0)
    with pytest.raises(ConfigurationError, match=r"needs torch\.distributed to be initialised"):
        make_rebalancer(Rebalancing(), rank=0, dealt=LaneShares(assign(4, 2)), record=lambda *_a, **_k: None)
    assert (
        make_rebalancer(Rebalancing(), rank=0, dealt=LaneShares(assign(4, 1)), record=lambda *_a, **_k: None)
        is None
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "uneven=True and multiply the loss by batch.weight"),
        ({"uneven": True, "lanes": [0]}, "leave out lanes="),
        ({"uneven": True, "stride": 2}, "leave out lanes= and stride="),
    ],
)
def test_what_does_not_go_with_it_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        LoaderConfig(rebalance=Rebalancing(), **settings)
