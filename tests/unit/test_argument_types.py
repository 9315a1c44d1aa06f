"""Values of another kind where the public functions expect paths, names, numbers, mappings or batches."""

from __future__ import annotations

import fractions
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

import shardkit
import shardkit.torch
from shardkit.errors import ConfigurationError, NotFoundError, RunError, ShardkitError, UsageError
from shardkit.plan import Plan
from shardkit.reading.cache.block_cache import BlockCache
from shardkit.repository.policy import LocationRecord
from shardkit.stores.local import check_vacant

VALUES: Final[list[Any]] = [
    True, -1, 2**70, 1.5, float("nan"), "x", "", "a\0b", "\udc80", b"x", [], [1], {}, (1, 2), {1}, object(), np.int8(3),
    np.array(3), np.arange(3), torch.tensor(3), torch.arange(3), fractions.Fraction(1, 3), int, Path("/x"), 1j,
    range(3),
]  # fmt: skip

Calls = dict[str, Callable[[Any], object]]


def _by_name(function: Callable[..., object], name: str, **others: Any) -> Callable[[Any], object]:
    return lambda value: function(**{**others, name: value})


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> shardkit.Dataset:
    root = str(tmp_path_factory.mktemp("kinds") / "data")
    with shardkit.create(root, {"x": "float32[4]", "i": "int64", "s": "str"}) as writer:
        for number in range(40):
            writer.add({"x": np.zeros(4, np.float32), "i": number, "s": "a"})
    return shardkit.open(root)


def _of_plans(ds: shardkit.Dataset, plan: Plan) -> Calls:
    settings: dict[str, Any] = {"global_batch": 8}
    names = (
        "lanes",
        "weights",
        "stages",
        "group_by",
        "remainder",
        "shuffle",
        "cost",
        "sequence",
        "epoch_steps",
    )
    changes = ("from_step", "manifest", "weights", "skip", "lanes")
    return {
        **{name: _by_name(ds.plan, name, **settings) for name in names},
        **{f"amend {name}": _by_name(plan.amend, name, from_step=2) for name in changes},
        "step": plan.step,
        "cell step": lambda value: plan.cell(value, 0),
        "cell lane": lambda value: plan.cell(0, value),
        "cell_digest": lambda value: plan.cell_digest(value, 0),
        "steps": lambda value: plan.steps(value, 3),
        "locate sample": plan.locate,
        "locate epoch": lambda value: plan.locate(1, value),
    }  # fmt: skip


def _of_datasets(ds: shardkit.Dataset, folder: Path) -> Calls:
    def created(**settings: Any) -> None:
        options = {"schema": {"i": "int64"}, **settings}
        with shardkit.create(folder / "new", replace=True, **options) as writer:
            writer.add({"i": 1})

    def added(sample: Any) -> None:
        with shardkit.create(folder / "added", {"i": "int64"}) as writer:
            writer.add(sample)

    names = ("format", "compression", "shard_size", "ref", "stratify", "lookup", "cost", "message")
    return {
        **{f"create {name}": _by_name(created, name) for name in names},
        "add": added,
        "open": shardkit.open,
        "item": lambda value: ds[value],
        "select where": lambda value: ds.select(where=value),
        "select rows": lambda value: ds.select(rows=value),
        "to_arrow": ds.to_arrow,
    }


def _of_loaders(ds: shardkit.Dataset, plan: Plan, run: Path) -> Calls:
    names = ("run", "cache", "fields", "lanes", "decode", "fill", "share", "device", "workers", "on_error", "stall_s",
             "stride", "offset", "assignment", "threads", "memory", "prefetch", "transform", "tensors")  # fmt: skip

    def loaded(**settings: Any) -> None:
        with ds.loader(plan, rank=0, world=1, **settings) as loader:
            loader.state_dict()

    loader = ds.loader(plan, rank=0, world=1, run=run)
    batch = next(iter(loader))
    data = shardkit.torch.dataset(ds, plan, rank=0, world=1)
    unusable: Any = shardkit.torch.dataset
    return {
        **{name: _by_name(loaded, name) for name in names},
        "plan": lambda value: ds.loader(value, rank=0, world=1),
        "after": lambda value: loader.state_dict(after=value),
        "watch": loader.watch,
        "note batch": lambda value: loader.note(value, np.zeros(8)),
        "note losses": lambda value: loader.note(batch, value),
        "mesh": lambda value: ds.loader(plan, mesh=value),
        "rebalance": lambda value: ds.loader(plan, rank=0, world=1, uneven=True, rebalance=value),
        "mixer": lambda value: ds.loader(plan, rank=0, world=1, run=run, mixer=value),
        "rank": lambda value: ds.loader(plan, rank=value, world=2),
        "world": lambda value: ds.loader(plan, rank=0, world=value),
        "resize": lambda value: loader.resize(rank=0, world=value),
        "set_epoch": data.set_epoch,
        "seek": loader.seek,
        "load_state_dict": loader.load_state_dict,
        "dataset": lambda value: unusable(value, plan),
        "dataset after": lambda value: data.state_dict(after=value),
        "dataset load_state_dict": data.load_state_dict,
    }


@pytest.mark.parametrize("face", ["plans", "datasets", "loaders"])
def test_values_of_another_kind_are_taken_or_refused_in_words(
    ds: shardkit.Dataset, tmp_path: Path, face: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = ds.plan(global_batch=8, lanes=4, seed=0)
    calls = {"plans": lambda: _of_plans(ds, plan), "datasets": lambda: _of_datasets(ds, tmp_path),
             "loaders": lambda: _of_loaders(ds, plan, tmp_path / "run")}[face]()  # fmt: skip
    wrong = []
    for name, call in calls.items():
        for value in VALUES:
            if name in ("run", "cache") and isinstance(value, str | Path) and "\0" not in str(value):
                continue  # a path
            try:
                call(value)
            except ShardkitError:
                continue
            except Exception as error:
                wrong.append(f"{name} of {value!r}: {type(error).__name__}: {error}")
    assert not wrong


def _plus_one(sample: dict[str, Any]) -> dict[str, Any]:
    return {"i": sample["i"] + 1}


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_a_transform_may_take_the_sample_alone(ds: shardkit.Dataset, workers: Any) -> None:
    plan = ds.plan(global_batch=8, lanes=4, seed=0)
    with (
        ds.loader(plan, rank=0, world=1, tensors=False) as plain,
        ds.loader(
            plan, rank=0, world=1, tensors=False, transform=_plus_one, workers=workers, threads=2
        ) as loader,
    ):
        assert next(iter(loader))["i"].tolist() == (next(iter(plain))["i"] + 1).tolist()
    for wrong in (lambda: 0, lambda a, b, c: a):
        with pytest.raises(ConfigurationError, match=r"it takes \(.*\); expected transform\(sample, rng\)"):
            ds.loader(plan, rank=0, world=1, transform=wrong)


def test_results_of_transforms_that_are_no_mappings_are_named(ds: shardkit.Dataset) -> None:
    plan = ds.plan(global_batch=8, lanes=4, seed=0)
    unusable: dict[str, Any] = {"transform": lambda *_: 1}
    for name, function in (*unusable.items(), ("batch_transform", unusable["transform"])):
        message = f"{name} returned 1: a mapping of field to value"
        with (
            ds.loader(plan, rank=0, world=1, **{name: function}) as loader,
            pytest.raises(ShardkitError, match=message),
        ):
            next(iter(loader))


def _none(*_: Any) -> Any:
    return None


def _generates(*_: Any) -> Any:
    yield 1


def _step(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"step": 1}


def _with_gradients(_: Any) -> dict[str, Any]:
    return {"f": torch.ones(2, requires_grad=True) * 2}


def _one_more(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | ({"more": 1} if sample["i"] % 2 else {})


def _breaks(*_: Any) -> Any:
    raise KeyError("nothing")


@pytest.mark.parametrize("workers", ["threads", "processes"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [({"transform": _none}, r"sample \d+.*returned None: a mapping of field to value"),
     ({"transform": _one_more}, r"s(, more)? for sample \d+.* and x, i, s(, more)? for sample \d+.*of the same batch"),
     ({"transform": _generates}, r"sample \d+.*returned <generator object .*: a mapping of field to value"),
     ({"transform": _step}, r"sample \d+.*returned a field 'step', which is reserved for batches; call it step_"),
     ({"transform": _with_gradients},
      "(returned tensors of field 'f' that numpy cannot hold|cannot be sent from its process): .*; return"),
     ({"transform": _breaks}, r"the transform failed on sample \d+.*: KeyError: 'nothing'"),
     ({"transform": _none, "batch_transform": _breaks}, "the transform failed on sample"),
     ({"transform": _plus_one, "batch_transform": _breaks},
      "the batch_transform failed on step 0: KeyError: 'nothing'")],
)  # fmt: skip
def test_functions_that_fail_are_named_with_their_sample_or_step(
    ds: shardkit.Dataset, workers: Any, settings: dict[str, Any], message: str
) -> None:
    plan = ds.plan(global_batch=8, lanes=4, seed=0)
    with ds.loader(plan, rank=0, world=1, workers=workers, threads=1, **settings) as loader:
        for _ in range(2):
            with pytest.raises(RunError, match=message):
                next(iter(loader))


@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize(
    ("odd", "even", "kind"),
    [(1, 2.5, "float64"), (np.float32(1), np.float64(2), "float64"), (torch.ones(2), np.ones(2, np.float32), "float32"),
     (1, "a", "list"), (1, [1, 2], "list"), (torch.ones(2), None, "list"), (2**70, 1, "list"),
     (np.str_("a"), np.str_("b"), "list"), (np.datetime64("2026-01-01"),) * 2 + ("datetime64",),
     (np.array([None, 1]),) * 2 + ("object",)],
)  # fmt: skip
def test_values_of_transforms_are_stacked_or_stay_as_they_are(
    ds: shardkit.Dataset, odd: Any, even: Any, kind: str, tensors: bool
) -> None:
    plan = ds.plan(global_batch=8, lanes=4, seed=0)
    with ds.loader(
        plan, rank=0, world=1, tensors=tensors, transform=lambda s: {"f": odd if s["i"] % 2 else even}
    ) as loader:
        batch = next(iter(loader))
    if kind == "list" or (tensors and not kind.startswith("float")):
        assert type(batch["f"]) is list
        for number, value in zip(batch["samples"].tolist(), batch["f"], strict=True):
            given = odd if ds[number]["i"] % 2 else even
            assert type(value) is type(given)
            np.testing.assert_array_equal(value, given)
    else:
        assert kind in str(batch["f"].dtype)
        assert len(batch["f"]) == 8


def test_a_transform_that_no_process_can_import_is_refused(ds: shardkit.Dataset) -> None:
    plan = ds.plan(global_batch=8, lanes=4, seed=0)
    with (
        ds.loader(plan, rank=0, world=1, transform=lambda sample: sample, workers="processes") as loader,
        pytest.raises(ConfigurationError, match=r'cannot be sent to another process.*workers="threads"'),
    ):
        next(iter(loader))


OPENERS: tuple[Callable[[str], object], ...] = (
    shardkit.open,
    lambda root: shardkit.create(root, {"i": "int64"}),
    lambda root: LocationRecord.parse(f"mirror={root}"),  # a shell does not expand it there
    lambda root: check_vacant(root, "run"),
)


def test_a_current_folder_that_was_removed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for call in OPENERS:
        with pytest.raises(NotFoundError, match="current folder no longer exists"):
            call("cats")
    with pytest.raises(NotFoundError, match="current folder no longer exists"):
        BlockCache("cats", limit=2**20)


def test_a_new_root_has_no_ref_in_its_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'.*cats@val' names the ref 'val' of .*cats; .*ref="):
        shardkit.create(tmp_path / "cats@val", {"i": "int64"})
    with shardkit.create(f"{tmp_path}/cats@home/", {"i": "int64"}) as writer:
        writer.add({"i": 1})
    assert len(shardkit.open(f"{tmp_path}/cats@home/")) == 1


def test_a_home_folder_that_no_shell_has_expanded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    for call in OPENERS:
        for root in ("~", "~/cats", "~/cats@val"):
            with pytest.raises(
                UsageError, match=r"'~.*only a shell expands ~; write the path, here /home/me"
            ):
                call(root)
    assert not list(tmp_path.iterdir())
    with shardkit.create("~cats", {"i": "int64"}) as writer:  # a name like any other
        writer.add({"i": 1})
    assert len(shardkit.open("~cats")) == 1


def test_a_batch_size_of_numpy_gets_the_advice_of_any(
    ds: shardkit.Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    size: Any = np.int64(20)
    assert ds.plan(global_batch=size).digest == ds.plan(global_batch=20).digest
    first, second = caplog.messages
    assert first == second
    assert "a batch of 16 (8 lanes) or 24 (8 lanes) allows more, or pass lanes=" in first
