"""A loader has one loop at a time: what supersedes it says so, and looking at the next batch moves nothing."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.errors import (
    ConfigurationError,
    IntegrityError,
    RunError,
    StateError,
    UsageError,
)
from shardkit.ledger import read_journal
from tests.flips import flip

STEPS, BATCH = 10, 12


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> shardkit.Dataset:
    return _create(tmp_path_factory.mktemp("data") / "numbers")


def _create(root: Path) -> shardkit.Dataset:
    schema = {"x": "int64[8]", "blob": "bytes"}
    with shardkit.create(str(root), schema=schema, block_size="1KiB", shard_size="4KiB") as writer:
        for n in range(STEPS * BATCH):
            writer.add({"x": np.arange(n, n + 8), "blob": n.to_bytes(2, "little") * (n % 9)})
    return shardkit.open(str(root))


def _plan(ds: shardkit.Dataset) -> Any:
    return ds.plan(global_batch=BATCH, lanes=4)


def _facts(batch: Any) -> tuple[Any, ...]:
    return batch.step, batch.samples.tolist(), batch["x"].tolist(), batch["blob"]


# a loop inside of a loop


@pytest.mark.parametrize("prefetch", [None, 0, 3])
def test_a_loop_that_is_superseded_says_so_and_loses_no_step(
    ds: shardkit.Dataset, prefetch: int | None
) -> None:
    with ds.loader(_plan(ds), tensors=False, prefetch=prefetch) as loader:
        outer = iter(loader)
        seen = [next(outer).step for _ in range(5)]
        inner = iter(loader)
        assert next(inner).step == 5
        for _ in range(3):  # however often it is asked
            with pytest.raises(UsageError, match=r"before step 5: another loop .* call loader\.peek\(\)"):
                next(outer)
        assert seen == list(range(5))
        assert loader.state_dict()["step"] == 6  # where the loop that counts is
        assert [batch.step for batch in inner] == list(range(6, 10))
        assert [batch.step for batch in loader] == list(range(10, 20))


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("moved to step 7", lambda loader: loader.seek(7)),
        ("moved to step 5", lambda loader: loader.load_state_dict(loader.state_dict())),
        ("closed", lambda loader: loader.close()),
    ],
)
def test_a_loader_that_is_moved_or_closed_ends_its_loop_with_an_error(
    ds: shardkit.Dataset, name: str, act: Callable[[Any], None]
) -> None:
    loader = ds.loader(_plan(ds), tensors=False)
    loop = iter(loader)
    assert [next(loop).step for _ in range(5)] == list(range(5))
    act(loader)
    with pytest.raises(UsageError, match=f"before step 5: the loader was {name}"):
        list(loop)
    assert next(iter(loader)).step == {"moved to step 7": 7}.get(name, 5)
    loader.close()


def test_a_loop_that_is_closed_late_takes_nothing_from_the_next(ds: shardkit.Dataset) -> None:
    expected = [_facts(batch) for batch in ds.loader(_plan(ds), tensors=False)]
    with ds.loader(_plan(ds), tensors=False, threads=1) as loader:
        for _ in range(20):
            late = iter(loader)
            next(late)
            loader.seek(0)
            current = iter(loader)
            late.close()
            assert [_facts(batch) for batch in current] == expected
            loader.seek(0)


def test_a_loop_ends_with_an_error_when_another_thread_closes_the_loader(ds: shardkit.Dataset) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hold(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        entered.set()
        go_on.wait(30)
        return sample

    loader = ds.loader(_plan(ds), tensors=False, transform=hold, threads=1)

    def close() -> None:
        entered.wait(30)
        loader.close()

    closing = threading.Thread(target=close)
    closing.start()
    release = threading.Timer(0.3, go_on.set)
    release.start()
    with pytest.raises(UsageError, match="closed"):
        list(loader)
    closing.join(30)
    release.join(30)


def test_a_loop_that_failed_does_not_end_as_if_it_were_complete(ds: shardkit.Dataset) -> None:
    def fail(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        if int(sample["x"][0]) == bad:
            raise ZeroDivisionError
        return sample

    plan = _plan(ds)
    bad = int(ds[int(plan.step(3)[2, 1])]["x"][0])
    with ds.loader(plan, tensors=False, transform=fail, prefetch=1) as loader:
        loop = iter(loader)
        assert [next(loop).step for _ in range(3)] == [0, 1, 2]
        for _ in range(2):
            with pytest.raises(RunError, match="the transform failed on sample"):
                loader.peek()
            with pytest.raises(RunError, match="the transform failed on sample"):
                next(loop)
        assert loader.state_dict()["step"] == 3


def test_a_second_thread_is_refused_and_the_loop_goes_on_in_the_first(ds: shardkit.Dataset) -> None:
    entered, resume = threading.Event(), threading.Event()

    def hold(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        entered.set()
        resume.wait(30)
        return sample

    with ds.loader(_plan(ds), tensors=False, transform=hold) as loader:
        loop = iter(loader)
        steps: list[int] = []
        first = threading.Thread(target=lambda: steps.extend(batch.step for batch in loop))
        first.start()
        assert entered.wait(30)
        asks: list[Callable[[], Any]] = [lambda: next(loop), loader.peek]
        for ask in asks:
            with pytest.raises(UsageError, match="another thread is taking step 0"):
                ask()
        resume.set()
        first.join(30)
        assert steps == list(range(STEPS))
        assert loader.state_dict()["step"] == STEPS


# loops that are left early


def _same(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return sample


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_loop_that_is_left_early_continues_in_the_next(ds: shardkit.Dataset, data: st.DataObject) -> None:
    """Whatever is left where, on whichever rank: the stream is that of loops that end, and ranks stay in step."""
    world = data.draw(st.sampled_from([1, 2, 4]))
    length = data.draw(st.none() | st.integers(1, STEPS + 5))
    options: dict[str, Any] = {
        "prefetch": data.draw(st.sampled_from([None, 0, 2])),
        "by_cell": data.draw(st.booleans()),
        "transform": data.draw(st.sampled_from([None, _same])),
        "tensors": False,
        "world": world,
    }
    plan = ds.plan(global_batch=BATCH, lanes=4, epoch_steps=length)
    leaves = data.draw(st.lists(st.integers(0, STEPS + 2), min_size=1, max_size=8))
    loaders = [ds.loader(plan, rank=rank, **options) for rank in range(world)]
    expected = 0
    for most in leaves:
        epoch, end = plan.epoch_of(expected), plan.epoch_bounds(expected)[1]
        assert {loader.epoch for loader in loaders} == {epoch}
        loops = [itertools.islice(loader, most) for loader in loaders]
        for _ in range(min(most, end - expected)):
            found = [next(loop) for loop in loops]
            cells: list[Any] = [cell for one in found for cell in (one if options["by_cell"] else [one])]
            assert {cell.step for cell in cells} == {expected}
            rows = [int(row) for cell in cells for row in cell.samples]
            # no block that was being loaded when a loop was left is half known
            assert [int(x) for cell in cells for x in cell["x"][:, 0]] == [
                int(ds[row]["x"][0]) for row in rows
            ]
            assert sorted(rows) == sorted(plan.step(expected).ravel().tolist())
            expected += 1
        assert [next(loop, None) for loop in loops] == [None] * world
    states = [loader.state_dict() for loader in loaders]
    assert states == states[:1] * world
    assert states[0]["step"] == expected
    for loader in loaders:
        loader.close()


def test_a_loop_that_an_amendment_ends_says_so(
    ds: shardkit.Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    plan = _plan(ds)
    for change, ends_at in (({"weights": {"*": 1}}, 3), ({"skip": (3, 5)}, STEPS - 2), ({"lanes": 2}, STEPS)):
        caplog.clear()
        child = plan.amend(**{"from_step": 3, **change})
        with ds.loader(child, tensors=False) as loader:
            loader.seek(0 if child.lanes == 4 else 3)
            assert [batch.step for batch in loader][-1] == ends_at - 1
            said = [one.message for one in caplog.records if one.name == "shardkit.loader"]
            assert [str(ends_at) in one for one in said] == ([True] if ends_at == 3 else [])
            assert next(iter(loader)).step == ends_at


def test_a_validation_loop_restarts(ds: shardkit.Dataset) -> None:
    plan = _plan(ds)
    with ds.loader(plan, tensors=False, restart=True) as loader:
        for most in (3, 1, 5):
            assert loader.peek().step == 0
            assert [batch.step for batch in itertools.islice(loader, most)] == list(range(most))
        assert loader.epoch == 0
        assert [batch.step for batch in loader] == list(range(STEPS))
        assert loader.epoch == 1
        assert next(iter(loader)).step == STEPS
        loader.seek(STEPS - 1)
        assert next(iter(loader)).step == 0


def test_a_loader_that_shares_steps_continues_with_its_own(ds: shardkit.Dataset) -> None:
    for offset in range(3):
        with ds.loader(_plan(ds), tensors=False, stride=3, offset=offset) as loader:
            found = [batch.step for _ in range(4) for batch in itertools.islice(loader, 2)]
        expected = range(offset, STEPS, 3)
        assert found[: len(expected)] == list(expected)
        assert found[len(expected)] == STEPS + offset


# what is passed


@pytest.mark.parametrize(
    "options",
    [{"rank": 0.5, "world": 2}, {"rank": True, "world": 2}, {"rank": 0, "world": 2**70}, {"fields": "x"},
     {"lanes": [0.5]}, {"lanes": 3}, {"lanes": [1, 1]}, {"by_cell": 1}, {"tensors": "yes"}, {"batch_transform": "x"},
     {"transform": 5}, {"store": 5, "rank": 0, "world": 1}, {"rebalance": 5, "uneven": True}, {"restart": 1},
     {"stride": 2, "offset": 2}, {"on_error": "ignore"}, {"workers": ["threads"]}],
)  # fmt: skip
def test_arguments_of_another_kind_are_refused_in_words(
    ds: shardkit.Dataset, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match=r"expected"):
        ds.loader(_plan(ds), **options)


@pytest.mark.parametrize("step", [-1, 1.5, True, "1", None, 10**30])
def test_steps_that_do_not_exist_are_refused_in_words(ds: shardkit.Dataset, step: Any) -> None:
    with ds.loader(_plan(ds), tensors=False) as loader:
        with pytest.raises(StateError, match="expected a whole number"):
            loader.seek(step)
        with pytest.raises(StateError, match="expected a whole number"):
            loader.load_state_dict(loader.state_dict() | {"step": step})


# from one epoch to the next


def _large(root: Path) -> shardkit.Dataset:
    """125 blocks, of which a loader's windows hold some 16."""
    with shardkit.create(str(root), schema={"x": "int64[1024]"}, block_size="64KiB") as writer:
        for n in range(1000):
            writer.add({"x": np.arange(n, n + 1024)})
    return shardkit.open(str(root))


def _until(is_so: Callable[[], bool]) -> bool:
    ends = time.monotonic() + 30
    while not is_so() and time.monotonic() < ends:
        time.sleep(0.01)
    return is_so()


def test_the_next_epoch_is_read_before_it_is_asked_for(tmp_path: Path) -> None:
    ds = _large(tmp_path / "large")
    plan = ds.plan(global_batch=20, lanes=1, window_blocks=4)

    def rows(loader: Any) -> list[int]:
        return [int(row) for batch in loader for row in batch["x"][:, 0]]

    with ds.loader(plan, tensors=False) as loader:
        first, blocks = rows(loader), ds.rows.blocks
        assert loader.memory_needed < blocks * 2**16 // 4  # most have to be loaded again
        assert _until(lambda: loader.stats()["block_loads"] > blocks)
        elapsed = loader.stats()["elapsed_s"]
        assert loader.stats()["elapsed_s"] == elapsed  # that of the epoch
        assert loader.stats()["steps"] == len(loader)
        second = rows(loader)
        assert sorted(first) == sorted(second) == list(range(1000))
        assert loader.stats()["steps"] == len(loader)
        assert loader.stats()["block_reloads"] == 0  # once in each epoch, and not again in the same
        loader.seek(0)
        assert [rows(loader), rows(loader)] == [first, second]


_EPOCH = """
import shardkit, sys
ds = shardkit.open(sys.argv[1])
loader = ds.loader(ds.plan(global_batch=20, lanes=1, window_blocks=4), tensors=False)
print(sum(len(batch.samples) for batch in loader))
"""


def test_a_program_ends_that_leaves_its_loader_open(tmp_path: Path) -> None:
    _large(tmp_path / "large")
    done = subprocess.run(
        [sys.executable, "-c", _EPOCH, str(tmp_path / "large")],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("1000\n", "")


# looking at the next batch


@settings(max_examples=25, deadline=None)
@given(peeks=st.lists(st.integers(0, 2 * STEPS), max_size=12), data=st.data())
def test_looking_changes_nothing(ds: shardkit.Dataset, peeks: list[int], data: st.DataObject) -> None:
    """Whatever is read and left between: the looks are the batches that come next, and state and stream the same."""
    prefetch = data.draw(st.sampled_from([None, 0, 2]))
    by_cell = data.draw(st.booleans())
    start = data.draw(st.integers(0, STEPS + 3))
    left_at = data.draw(st.integers(1, STEPS))  # the first loop is left after so many batches

    def run(look: bool) -> tuple[list[Any], list[Any]]:
        stream: list[Any] = []
        watched: list[Any] = []
        with ds.loader(_plan(ds), tensors=False, prefetch=prefetch, by_cell=by_cell) as loader:
            loader.seek(start)

            def look_maybe() -> Any:
                before = (loader.state_dict(), _still(loader.stats()), loader.lanes)
                ahead = loader.peek() if look and len(stream) in peeks else None
                assert (loader.state_dict(), _still(loader.stats()), loader.lanes) == before
                return ahead

            for most in (left_at, STEPS):
                ahead = look_maybe()
                for taken, batch in enumerate(loader, 1):
                    cells = batch if by_cell else [batch]
                    if ahead is not None:
                        seen = ahead if by_cell else [ahead]
                        assert [_facts(cell) for cell in seen] == [_facts(cell) for cell in cells]
                    stream.append([_facts(cell) for cell in cells])
                    watched.append((loader.state_dict(), loader.stats()["steps"], loader.stats()["samples"]))
                    if taken == most:
                        break
                    ahead = look_maybe()
        return stream, watched

    assert run(look=True) == run(look=False)


def _still(stats: dict[str, float]) -> dict[str, float]:
    """What is no figure of how far the reading is ahead."""
    names = ("step", "steps", "samples", "lanes", "last_wait_s", "consumer_wait_s", "computed_s")
    return {name: stats[name] for name in names}


def test_the_journal_knows_nothing_of_a_look(ds: shardkit.Dataset, tmp_path: Path) -> None:
    for name in ("quiet", "looked"):
        with ds.loader(_plan(ds), tensors=False, run=tmp_path / name) as loader:
            for number, batch in enumerate(loader):
                if name == "looked":
                    assert loader.peek().step == batch.step + 1
                if number == 6:
                    break
            if name == "looked":
                assert loader.peek().step == 7
    quiet, looked = (
        [(one.step, one.lane, one.digest) for path in (tmp_path / name / "journal").iterdir()
         for one in read_journal(path)]
        for name in ("quiet", "looked")
    )  # fmt: skip
    assert quiet == looked
    assert len(quiet) == 7 * 4


def test_a_damaged_block_that_a_look_meets_is_met_by_the_loop_too(tmp_path: Path) -> None:
    ds = _create(tmp_path / "damaged")
    for shard in (tmp_path / "damaged").rglob("*.tar"):
        flip(shard)
    with shardkit.open(str(tmp_path / "damaged")).loader(_plan(ds), tensors=False) as loader:
        with pytest.raises(IntegrityError):
            loader.peek()
        with pytest.raises(IntegrityError):
            list(loader)


def test_a_fork_looks_for_itself(ds: shardkit.Dataset) -> None:
    import multiprocessing

    with ds.loader(_plan(ds), tensors=False, threads=1) as loader:
        expected = _facts(loader.peek())
        context: Any = multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=lambda: queue.put([_facts(loader.peek()), _facts(next(iter(loader)))]))
        child.start()
        assert queue.get(timeout=60) == [expected, expected]
        child.join(30)
        assert _facts(next(iter(loader))) == expected


# several ranks


def test_ranks_of_which_one_looks_stay_in_step_while_lanes_move(ds: shardkit.Dataset) -> None:
    torch = pytest.importorskip("torch")
    from shardkit.loader import Rebalancing
    from shardkit.plan.assignment import Rules

    store = torch.distributed.HashStore()
    store.set_timeout(timedelta(seconds=30))
    rebalance = Rebalancing(every=4, rules=Rules(lead=2), store=store, timeout_s=30)
    loaders = [
        ds.loader(_plan(ds), rank=rank, world=2, tensors=False, rebalance=rebalance, uneven=True)
        for rank in range(2)
    ]
    shares = set()
    for _ in range(4):
        loops = [iter(loader) for loader in loaders]
        for _ in range(STEPS):
            before = list(loaders[0].lanes)
            ahead = loaders[0].peek()
            assert loaders[0].lanes == before
            batches = [next(loop) for loop in loops]
            assert _facts(ahead) == _facts(batches[0])
            assert batches[0].step == batches[1].step
            assert sorted(loaders[0].lanes + loaders[1].lanes) == [0, 1, 2, 3]
            shares.add(len(loaders[0].lanes))
            for loader, seconds in zip(loaders, (0.3, 0.1), strict=True):
                loader.computed(seconds)
    assert shares == {2, 1}  # lanes did move away from the slow rank
    for loader in loaders:
        loader.close()
