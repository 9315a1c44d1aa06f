"""Settings of a run: defaults, TOML, overrides, and what is refused."""

import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import ConfigurationError
from shardkit_trainer.configuration import OptimizerConfig, ScheduleConfig, load_configuration

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
    from shardkit_trainer.strategy import learning_rate

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


def test_configuration_does_not_import_torch() -> None:
    code = (
        "import sys; import shardkit_trainer; from shardkit_tools.commands.train import train;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_torch_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from shardkit.errors import MissingDependency
    from shardkit_trainer import launch

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="pip install 'torch>="):
        launch(None, NEEDED, nproc=1)
