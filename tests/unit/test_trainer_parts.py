"""Pieces of the trainer: settings, launches, reading, reports, norms and its size."""

from __future__ import annotations

import math
import os
import signal
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from shardkit.errors import ConfigurationError
from shardkit.exit_codes import ExitCode
from shardkit_trainer import launch, load_configuration
from shardkit_trainer.agent import Agent, own_place
from shardkit_trainer.configuration import LogConfig, OptimizerConfig, ScheduleConfig
from shardkit_trainer.distributed import LAUNCHER, RESTART, StopRequest
from shardkit_trainer.reporting import StageMeter
from shardkit_trainer.tasks import synchronise_norms

# ---- Settings of a run: defaults, TOML, overrides, and what is refused


NEEDED = ["run.directory=runs/a", "data.dataset=data/a"]


def test_file_then_overrides(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[run]\ndirectory = "runs/a"\nseed = 3\n[data]\ndataset = "data/a@val"\n[optimizer]\nlr = 1\n'
    )
    config = load_configuration(
        path, ["run.seed=4", "model.kind=my.models:make", "data.weights={'web/*' = 3}"]
    )
    assert (config.run.seed, config.optimizer.lr, config.model.kind) == (4, 1.0, "my.models:make")
    assert config.data.dataset == "data/a@val"
    assert config.data.weights == {"web/*": 3}
    assert config.to_json()["run"]["directory"] == "runs/a"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimiser.lr=1", ["optimiser", "optimizer"]),
        ("optimizer.learning=1", ["optimizer.learning", "nearest known key"]),
        ("lr=1", ["unknown key lr", "optimizer.lr"]),
        ("parallel.strategy=zero4", ["zero4", "zero1, zero2, zero3", "did you mean zero"]),
        ("data.lanes=many", ["data.lanes", "'many'", "expected a whole number from 0", "got str"]),
        ("checkpoint.asynchronous=1", ["checkpoint.asynchronous", "expected bool"]),
        ("run.steps=true", ["run.steps", "expected a whole number", "got bool"]),
        ("run.epochs=0", ["run.epochs = 0", "from 1 to 1,000,000"]),
        ("model.dropout=1.0", ["model.dropout = 1.0", "from 0 and below 1"]),
        ("model.heads=3", ["model.width = 128", "model.heads = 3"]),
        ("data.parts={a = 'x'}", ["data.dataset or data.parts", "exactly one"]),
        ("run=5", ["run = 5", "section [run]"]),
        ("run.directory=", ["run.directory", "empty"]),
        ("noequals", ["noequals", "section.key=value"]),
        ("optimizer.scaling=linear", ["optimizer.scaling", "reference_batch"]),
        ("data.stages=[{from_step = 3}]", ["nothing changes at step 3"]),
        ("data.stages=[{from_step = 3, batch = 4}]", ["unknown key data.stages[0].batch"]),
        ("data.stages=[{from_step = 3, global_batch = 4}]", ["data.stages", "run.steps > 0"]),
        ("data.stages=3", ["data.stages = 3", "expected a list"]),
        ("checkpoint.replicas=[1]", ["checkpoint.replicas[0] = 1", "expected str"]),
        ("parallel.shard_ranks=2", ["parallel.shard_ranks", "zero2 or zero3"]),
        ("model.norm=layer", ["layer", "group, batch"]),
    ],
)
def test_refusals_name_the_key_and_what_is_expected(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_configuration(None, [*NEEDED, override])
    for word in words:
        assert word in str(caught.value)


def test_strategies_that_cannot_be_combined() -> None:
    for together in (
        ["parallel.exact=int64", "parallel.strategy=zero3"],
        ["parallel.exact=int64", "parallel.reduction=bf16"],
        ["parallel.reduction=int8", "parallel.strategy=zero2"],
        ["parallel.sync_every=4", "parallel.strategy=zero1"],
        ["parallel.rebalance=true", "parallel.strategy=zero3", "parallel.shard_ranks=2"],
        ["parallel.shard_ranks=2", "parallel.strategy=zero2", "parallel.exact=int64"],
    ):
        with pytest.raises(ConfigurationError, match="parallel"):
            load_configuration(None, [*NEEDED, *together])


def test_broken_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[run\n")
    with pytest.raises(ConfigurationError, match=r"bad\.toml"):
        load_configuration(tmp_path / "bad.toml")
    with pytest.raises(ConfigurationError, match="no such file"):
        load_configuration(tmp_path / "none.toml")


def rates(steps: int, batch: int = 32, **settings: Any) -> list[float]:
    from shardkit_trainer.optimizer import learning_rate

    names = {"lr", "scaling", "reference_batch"}
    optimizer = OptimizerConfig(**{k: v for k, v in settings.items() if k in names})
    schedule = ScheduleConfig(**{k: v for k, v in settings.items() if k not in names})
    return [learning_rate(optimizer, schedule, step=s, steps=steps, global_batch=batch) for s in range(steps)]


def test_warmup_rises_to_the_peak_and_decays_end_at_the_final_rate() -> None:
    linear = rates(11, lr=1.0, kind="linear", warmup=0, final=0.0)
    assert linear == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0])
    for kind in ("linear", "cosine", "wsd"):
        curve = rates(100, lr=2.0, kind=kind, warmup=10, decay=20, final=0.25)
        assert curve[:3] == pytest.approx([2 / 11, 4 / 11, 6 / 11])
        assert max(curve) == pytest.approx(2.0)
        assert curve[-1] == pytest.approx(0.5)
        assert all(a >= b for a, b in pairwise(curve[10:]))
    assert rates(100, lr=2.0, kind="wsd", warmup=10, decay=20)[10:80] == [2.0] * 70
    assert rates(5, lr=2.0, kind="constant") == [2.0] * 5
    halfway = rates(101, lr=1.0, kind="cosine", final=0.0)[50]
    assert halfway == pytest.approx(0.5)


def test_rate_follows_the_batch() -> None:
    assert rates(1, batch=128, lr=1.0, kind="constant", scaling="linear", reference_batch=32) == [4.0]
    assert rates(1, batch=128, lr=1.0, kind="constant", scaling="sqrt", reference_batch=32) == [2.0]
    assert math.isclose(rates(1, batch=128, lr=1.0, kind="constant")[0], 1.0)


def test_without_torch_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from shardkit.errors import MissingDependency
    from shardkit_trainer import launch

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="pip install 'torch>="):
        launch(None, NEEDED, nproc=1)


# ---- Machines of a run: what the command line may say, and what the exit codes of ranks mean


SETTINGS = ["run.directory=unused", "data.dataset=unused"]


@pytest.mark.parametrize(
    ("nnodes", "rendezvous", "words"),
    [
        ("3:2", "a:1", "--nnodes 3:2: expected N or MIN:MAX"), ("0:2", "a:1", "--nnodes 0:2"),
        ("x", "a:1", "--nnodes x"), ("1:", "a:1", "--nnodes 1:"), ("1:4", "", "expected --rendezvous HOST:PORT"),
        ("2", "host", "--rendezvous host: expected HOST:PORT"), ("2", ":1", "--rendezvous :1"),
        ("2", "host:99999", "--rendezvous host:99999"), ("2", "host:0", "--rendezvous host:0"),
    ],
)  # fmt: skip
def test_machines_that_cannot_be_meant_are_refused(nnodes: str, rendezvous: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        launch(None, SETTINGS, nnodes=nnodes, rendezvous=rendezvous)
    assert words in str(caught.value)


CODES = st.sampled_from([0, RESTART, int(ExitCode.INTERRUPTED), -signal.SIGTERM, -signal.SIGKILL, 1, 2])


@given(st.dictionaries(st.integers(0, 7), CODES), st.integers(0, 3))
def test_only_failures_use_up_a_restart(codes: dict[int, int], restarts: int) -> None:
    """A change of machines is free, a rank that somebody stopped ends the run, everything else counts."""
    failures = {rank: SimpleNamespace(exitcode=code, pid=1) for rank, code in codes.items() if code}
    agent: Any = object.__new__(Agent)
    agent._remaining_restarts = restarts
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalElasticAgent, "_monitor_workers", lambda *_: SimpleNamespace(failures=failures))
        agent._monitor_workers(None)
    found = {one.exitcode for one in failures.values()}
    real = found - {RESTART, int(ExitCode.INTERRUPTED), -signal.SIGTERM}
    left = agent._remaining_restarts - 1 if failures else agent._remaining_restarts
    if real or not found:
        assert agent._remaining_restarts == restarts
    elif ExitCode.INTERRUPTED in found or RESTART not in found:
        assert agent._remaining_restarts == 0
    else:
        assert left == restarts, "torchrun takes one away, which was added before"


def test_a_rank_stops_when_its_command_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not StopRequest().is_set()
    monkeypatch.setenv(LAUNCHER, str(os.getppid()))
    request = StopRequest()
    assert not request.is_set()
    with monkeypatch.context() as patched:
        patched.setattr(os, "getppid", lambda: 1)
        assert request.is_set()
        assert not StopRequest().is_set(), "another command's variable says nothing"
    request.ask()
    assert request.is_set()
    with pytest.raises(KeyboardInterrupt):
        request.ask(signal.SIGINT)


def test_the_interface_is_the_one_that_leads_to_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert own_place("127.0.0.1") == ("lo", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth9")
    assert own_place("203.0.113.1") == ("lo", "127.0.0.1")


# ---- What the trainer reports of its steps


def test_waiting_inside_of_the_computation_is_not_own_work() -> None:
    """DDP's last backward waits for the buckets of others: computed_s tells what was this rank's."""
    world: Any = SimpleNamespace(stage="compute")
    meter = StageMeter(10, world)
    for loss, moved_bytes in ((2.5, 7.0), (math.nan, 9.0)):
        meter.seconds |= {"prepare": 0.1, "compute": 1.0, "reduce": 0.2}
        meter.step(computed_s=0.4, cells=3, loss=loss, moved_bytes=moved_bytes)
    numbers = meter.numbers()
    assert numbers["compute_s"] == pytest.approx(0.6)
    assert numbers["reduce_s"] == pytest.approx(1.8)
    assert (numbers["steps"], numbers["cells"], numbers["moved_bytes"], numbers["steps_in_all"]) == (
        2,
        6,
        9,
        10,
    )
    assert numbers["loss"] == 0.0, "a number that JSON can hold"


def test_an_evaluation_counts_while_it_goes_on() -> None:
    world: Any = SimpleNamespace(stage="step")
    meter = StageMeter(10, world)
    with meter.between_steps("evaluation"):
        time.sleep(0.01)
        assert meter.table() == [["evaluation"]]
        assert meter.numbers()["evaluation_s"] >= 0.01
    assert meter.table() == [["step"]]


def test_settings_of_the_trainer() -> None:
    settings = LogConfig(telemetry_s=0.5, listen="127.0.0.1:9400").telemetry()
    assert settings is not None
    assert (settings.interval_s, settings.listen) == (0.5, "127.0.0.1:9400")
    assert LogConfig(telemetry_s=0.0).telemetry() is None
    for wrong in ({"listen": "9400"}, {"telemetry_s": 0.001}):
        with pytest.raises(ConfigurationError):
            LogConfig(**wrong)


# ---- Batch statistics: over all ranks where torch can, else refused with the reason


def synchronised(ranks: int, device: str, cells: int = 6, norm: str = "batch", *settings: str) -> nn.Module:
    from shardkit_trainer.tasks import ResidualNetwork

    needed = ["run.directory=x", "data.dataset=x", "model.kind=classifier", "model.width=8", "model.stages=1"]
    config = load_configuration(None, [*needed, f"model.norm={norm}", *settings])
    task: Any = SimpleNamespace(model=ResidualNetwork(config.model, 1, 10))
    world: Any = SimpleNamespace(size=ranks, device=torch.device(device))
    synchronise_norms(task, config, world, cells)
    model: nn.Module = task.model
    return model


def kinds(model: nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules()} & {
        "BatchNorm2d",
        "SyncBatchNorm",
        "GroupNorm",
    }


def test_ranks_on_gpus_share_their_statistics() -> None:
    assert kinds(synchronised(2, "cuda")) == {"SyncBatchNorm"}
    assert kinds(synchronised(1, "cuda")) == {"BatchNorm2d"}
    assert kinds(synchronised(1, "cpu")) == {"BatchNorm2d"}


@pytest.mark.parametrize(
    ("ranks", "device", "cells", "settings", "words"),
    [
        (2, "cpu", 6, [], "does not work on the CPU, and there are 2 ranks"),
        (4, "cuda", 6, [], "4 ranks share 6 lanes"),
        (2, "cuda", 6, ["parallel.rebalance=true"], "samples that do not depend on their neighbours"),
        (1, "cpu", 6, ["parallel.exact=int64"], "samples that do not depend on their neighbours"),
    ],
)
def test_what_cannot_be_had_is_refused(
    ranks: int, device: str, cells: int, settings: list[str], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        synchronised(ranks, device, cells, "batch", *settings)
    assert kinds(synchronised(ranks, device, cells, "group", *settings)) == {"GroupNorm"}


def test_ranks_have_the_same_time_to_end_whoever_stops_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a failure, of which torch's own context takes notice: parallel.shutdown_s."""
    given: list[tuple[object, ...]] = []
    context = SimpleNamespace(close=lambda *how: given.append(how))
    agent: Any = object.__new__(Agent)
    agent._pcontext, agent._shutdown_timeout = context, 600
    agent._worker_watchdog = agent._health_check_server = None
    monkeypatch.setattr(LocalElasticAgent, "_start_workers", lambda *_: {})
    agent._start_workers(None)
    context.close()
    agent._stop_workers(None)
    agent._shutdown(signal.SIGINT, timeout=5)
    assert given == [(signal.SIGTERM, 600)] * 3
