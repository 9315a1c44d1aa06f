"""Loaders of several ranks, with meshes and without."""

from __future__ import annotations

import json
import multiprocessing
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit.errors import ConfigurationError, StateError
from shardkit.loader.agreement import check_agreement
from tests.integration import forked

# ---- Several ranks: what they agree on, gradients of unequal ranks, a device mesh


torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("data") / "numbers")
    rng = np.random.default_rng(0)
    with shardkit.create(
        path, schema={"x": "float64[6]", "y": "float64"}, format="arrow", block_size="2KiB"
    ) as writer:
        for _ in range(200):
            writer.add({"x": rng.normal(size=6), "y": float(rng.normal())})
    return path


def _start(rank: int, world: int, store: str) -> Any:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    return torch.distributed


def _rank(job: Any, rank: int, world: int, root: str, store: str, out: Any) -> None:
    distributed = _start(rank, world, store)
    try:
        out.put((rank, job(rank, world, root)))
    except Exception as error:
        out.put((rank, error))
    distributed.destroy_process_group()


def _on_ranks(job: Any, world: int, root: str, tmp_path: Path) -> list[Any]:
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(job, r, world, root, str(tmp_path / "store"), out))
        for r in range(world)
    ]
    for process in ranks:
        process.start()
    results = dict(out.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(60)
    return [results[rank] for rank in range(world)]


def _gradients(rank: int, world: int, root: str) -> list[Any]:
    """Raw gradients of DDP, which averages over ranks, from unequal lanes and a short step."""
    ds = shardkit.open(root)
    plan = ds.plan(global_batch=30, lanes=5, remainder="short")
    model = torch.nn.Linear(6, 1, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(model.weight, 0.5)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    seen = []
    for batch in ds.loader(plan, uneven=True, tensors=True):
        parallel.zero_grad()
        losses = (parallel(batch["x"]).squeeze(1) - batch["y"]) ** 2
        (losses.sum() / max(1, len(losses)) * batch.weight).backward()
        seen.append(model.weight.grad.clone().numpy())
    return seen


@pytest.mark.parametrize("world", [2, 3])
def test_weights_make_raw_ddp_gradients_those_of_one_process(root: str, tmp_path: Path, world: int) -> None:
    ds = shardkit.open(root)
    plan = ds.plan(global_batch=30, lanes=5, remainder="short")
    ranks = _on_ranks(_gradients, world, root, tmp_path)
    assert len(ranks[0]) == 7
    for step, got in enumerate(ranks[0]):
        samples = [n for n in plan.step(step).ravel().tolist() if n >= 0]
        x = np.array([ds[n]["x"] for n in samples])
        y = np.array([ds[n]["y"] for n in samples])
        expected = 2 * ((x @ np.full(6, 0.5) - y)[:, None] * x).mean(axis=0)
        for rank in ranks:
            np.testing.assert_allclose(rank[step][0], expected, rtol=1e-12)
        np.testing.assert_allclose(got[0], expected, rtol=1e-12)


def _another_seed(rank: int, world: int, root: str) -> None:
    ds = shardkit.open(root)
    ds.loader(ds.plan(global_batch=30, lanes=6, seed=rank))


def _same(rank: int, world: int, root: str) -> list[int]:
    ds = shardkit.open(root)
    loader = ds.loader(ds.plan(global_batch=30, lanes=6))
    return [n for batch in loader for n in batch.samples.tolist()]


def test_ranks_that_would_read_different_data_refuse_and_name_the_difference(
    root: str, tmp_path: Path
) -> None:
    errors = _on_ranks(_another_seed, 2, root, tmp_path)
    assert [type(error) for error in errors] == [StateError, StateError]
    assert "rank 1 is about to read other data than rank 0: plan is" in str(errors[1])


def test_ranks_that_agree_share_the_epoch(root: str, tmp_path: Path) -> None:
    shares = _on_ranks(_same, 2, root, tmp_path)
    assert sorted(shares[0] + shares[1]) == sorted(set(shares[0] + shares[1]))
    assert len(shares[0] + shares[1]) == 180


def test_lanes_that_are_held_twice_or_not_at_all_are_refused() -> None:
    def one(lanes: list[int]) -> dict[str, Any]:
        return {"plan": "p", "lanes": lanes}

    check_agreement([one([0, 1]), one([2])], lanes=3, shared=False)
    check_agreement([one([0, 1]), one([2]), one([0, 1])], lanes=3, shared=True)
    with pytest.raises(StateError, match="lane 1 is held by rank 0 and by rank 1"):
        check_agreement([one([0, 1]), one([1, 2])], lanes=3, shared=False)
    with pytest.raises(StateError, match="lane 0 is held by rank 0 and by rank 1"):
        check_agreement([one([0, 1]), one([0, 1])], lanes=2, shared=False)
    with pytest.raises(StateError, match="lane 2 is held by no rank"):
        check_agreement([one([0]), one([1])], lanes=3, shared=False)


def _mesh(rank: int, world: int, root: str) -> list[list[int]]:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    ds = shardkit.open(root)
    plan = ds.plan(global_batch=30, lanes=6)
    whole = ds.loader(plan, mesh=mesh)
    part = ds.loader(plan, mesh=mesh["dp_shard"])
    assert whole.lanes == part.lanes
    with pytest.raises(ConfigurationError, match="contradict"):
        ds.loader(plan, mesh=mesh["tp"], rank=0, world=1)
    return [batch.samples.tolist() for batch in whole]


def test_ranks_of_one_data_parallel_coordinate_read_the_same(root: str, tmp_path: Path) -> None:
    first, second, third, fourth = _on_ranks(_mesh, 4, root, tmp_path)
    assert first == second
    assert third == fourth
    plan = shardkit.open(root).plan(global_batch=30, lanes=6)
    assert [a + b for a, b in zip(first, third, strict=True)] == [
        plan.step(s).ravel().tolist() for s in range(6)
    ]


# ---- Loaders under a device mesh: tensor, pipeline and hybrid parallel examples on four ranks equal one process


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """1,024 points of two classes."""
    root = tmp_path_factory.mktemp("mesh") / "data"
    numbers = np.random.Generator(np.random.PCG64(4))
    with shardkit.create(
        str(root),
        schema={"x": "float32[8]", "y": "int64"},
        stratify="y",
        shard_size="16KiB",
        block_size="1KiB",
    ) as writer:
        for number in range(1024):
            x = numbers.standard_normal(8).astype(np.float32)
            writer.add({"x": x + number % 2, "y": number % 2})
    return str(root)


def ranks_of(work: str, folder: Path, *arguments: str) -> tuple[list[int | None], str]:
    """Exit codes of four ranks that do this, and all that they print."""
    environment = {**os.environ, forked.OUTPUT: str(folder / "said")}
    codes = forked.side_by_side(
        4, getattr(import_module("mesh_ranks"), work), list(arguments), environment=environment
    )
    return codes, "".join((folder / f"said.{kind}").read_text() for kind in ("out", "err"))


def test_mesh_examples_equal_one_process(tmp_path: Path, data: str) -> None:
    codes, said = ranks_of("become_rank", tmp_path, str(tmp_path / "result.json"), data)
    assert codes == [0] * 4, said
    found = json.loads((tmp_path / "result.json").read_text())
    assert set(found["errors"]) == {"tensor 2", "tensor 4", "pipeline 2", "hybrid 2"}
    assert max(found["errors"].values()) < 1e-6, found
    assert found["share"] == 0.5, "sharded over two ranks, replicated over the two pairs"
    assert found["moved"] > 0.05, "the parameters have moved"


def test_a_mesh_example_runs_as_it_says(tmp_path: Path, data: str) -> None:
    """Its ranks have the environment that torchrun gives them; its agent starts those of the trainer's tests."""
    program = str(ROOT / "examples" / "device_mesh.py")
    codes, said = ranks_of("become_program", tmp_path, program, "pipeline", data, "--steps", "3")
    assert codes == [0] * 4, said
    assert "trained 3 steps on 4 ranks" in said
