"""Ranks die and are replaced under every strategy: the parameters are those of a run that nothing has happened to."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from importlib import import_module
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_state

from shardkit.audit import audit_run
from shardkit.telemetry.records import read_documents
from shardkit.torch import CheckpointReader, checkpoint_names, read_checkpoint_manifest
from shardkit_trainer import supervisor
from shardkit_trainer.configuration import load_configuration
from shardkit_trainer.run_directory import read_steps
from tests.drills import DRILLS, drill_cases

STEPS, BATCH, LANES = 16, 24, 8
KINDS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "hybrid": {"strategy": "zero3", "shard_ranks": 2},
    "exact ddp": {"strategy": "ddp", "exact": "int64"},
    "exact zero1": {"strategy": "zero1", "exact": "int64"},
    "exact zero2": {"strategy": "zero2", "exact": "int64"},
}
FAMILIES = ["ddp", "zero1", "zero2", "zero3", "hybrid"]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


@pytest.fixture
def take(numbers: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run under the supervisor, with forked ranks; returns what is in the last checkpoint."""
    modules = str(Path(__file__).parent)
    monkeypatch.syspath_prepend(modules)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([modules, *filter(None, [os.environ.get("PYTHONPATH")])])
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    trainer_regroups = import_module("trainer_regroups")
    monkeypatch.setattr(supervisor, "subprocess", SimpleNamespace(Popen=trainer_regroups.Scripted))

    def run(
        directory: Path, kind: str, ranks: int, script: dict[str, Any], restarts: int = 0, **more: Any
    ) -> dict[str, torch.Tensor]:
        settings = {
            "run.directory": directory, "run.steps": STEPS, "data.dataset": numbers, "data.global_batch": BATCH,
            "data.lanes": LANES, "model.kind": "trainer_regroups:make", "model.width": 7, "model.heads": 7,
            "optimizer.lr": 0.02,
            "optimizer.epsilon": 0.01, "optimizer.clip": 3.0, "checkpoint.every": 5, "log.telemetry_s": 0.0,
            "parallel.pass_samples": 6, "parallel.recovery": "in-process", "parallel.timeout_s": 60.0,
            "log.peak_flops": 1.0, **{f"parallel.{name}": value for name, value in KINDS[kind].items()}, **more,
        }  # fmt: skip
        overrides = [f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in settings.items()]
        config = load_configuration(None, overrides)
        monkeypatch.setenv(trainer_regroups.SCRIPT, json.dumps(script))
        code = supervisor.supervise(
            ["-m", "shardkit_trainer", *overrides], config, nproc=ranks, restarts=restarts
        )
        assert code == 0
        return saved(directory)

    return run


def saved(directory: Path) -> dict[str, torch.Tensor]:
    """Parameters and moments of the newest checkpoint."""
    tensors = read_checkpoint_manifest(directory)["tensors"]
    state: dict[str, Any] = {name: torch.full(one["shape"], torch.nan) for name, one in tensors.items()}
    load_state(state, storage_reader=CheckpointReader(directory))
    return state


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of any tensor."""
    assert found.keys() == expected.keys()
    norms = [float((found[n] - t).norm() / max(float(t.norm()), 1e-30)) for n, t in expected.items()]
    return max(norms)


def groups(directory: Path) -> list[int]:
    """Ranks of every group that has formed."""
    return [e["ranks"] for e in read_documents(directory / "events.jsonl") if e["event"] == "start"]


@pytest.fixture(scope="session")
def undisturbed() -> dict[bool, dict[str, torch.Tensor]]:
    """What a run of one rank comes to, exact or not; made when it is asked for first."""
    return {}


@pytest.fixture
def expected(take: Any, undisturbed: dict[bool, Any], tmp_path: Path) -> Any:
    def of(kind: str) -> dict[str, torch.Tensor]:
        exact = kind.startswith("exact")
        if exact not in undisturbed:
            kind = "exact ddp" if exact else "ddp"
            undisturbed[exact] = take(tmp_path / f"undisturbed {kind}", kind, 1, {})
        found: dict[str, torch.Tensor] = undisturbed[exact]
        return found

    return of


def check(run: Path, kind: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The state, and what the run says of itself."""
    far = distance(found, expected)
    assert far == 0.0 if kind.startswith("exact") else far < 1e-6, far
    steps = read_steps(run)
    assert [record["step"] for record in steps] == list(range(STEPS)), "each step counts once"
    record = audit_run(run, level=None)
    assert not [one for one in record.findings if one.severity != "note"], record.findings
    assert (record.steps, record.checked) == (STEPS, STEPS)


@pytest.mark.drill
@pytest.mark.parametrize(
    ("kind", "victim"),
    drill_cases([(kind, victim) for kind in KINDS for victim in range(3)], [0, 8, 11, 13, 20]),
)
def test_a_rank_of_three_dies_and_is_replaced(
    tmp_path: Path, take: Any, expected: Any, kind: str, victim: int
) -> None:
    """Two steps are taken without it; the hybrid of two copies has four ranks, of which three are one copy."""
    run, ranks = tmp_path / "run", 4 if kind == "hybrid" else 3
    script = {"die": [[victim, "compute", 7]], "late": [[ranks, 1, 9]], "wait": [[10, 2]]}
    found = take(run, kind, ranks, script, restarts=1, **{"checkpoint.asynchronous": False})
    check(run, kind, found, expected(kind))
    assert groups(run) == [ranks, ranks - 1, ranks]
    events = read_documents(run / "events.jsonl")
    # where a part of the state was on that rank alone, the steps since the checkpoint are taken again; it is said
    whole = kind.endswith("ddp") or kind == "hybrid"
    rewinds = [(e["step"], e["reached"]) for e in events if e["event"] == "rewind"]
    assert rewinds == ([] if whole else [(5, 7)])
    first, second, _ = audit_run(run, level=None).starts
    assert (first["repeats"], second["step"], second["ranks"]) == (0, 7 if whole else 5, ranks - 1)
    assert second["repeats"] >= (0 if whole else 2)


def test_a_state_that_is_laid_out_for_another_group_is_refused(tmp_path: Path, take: Any) -> None:
    """Torch takes meshes of equal names for one: it gives a rank that has moved the place that it had."""
    swap_places = import_module("trainer_regroups").swap_places
    for torch_cannot_tell in (False, True):
        folder = tmp_path / str(torch_cannot_tell)
        folder.mkdir()
        context = multiprocessing.get_context("forkserver")
        processes = [
            context.Process(target=swap_places, args=(rank, str(folder), torch_cannot_tell))
            for rank in (0, 1)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
            assert process.exitcode == 0
        found = {path.name: path.read_text() for path in folder.glob("?-?")}
        assert {found.pop("0-0"), found.pop("0-1")} == {""}
        for place in (0, 1):
            text = found[f"1-{place}"]
            assert ("the state of the 2 ranks does not fit their group" in text) is torch_cannot_tell, text
            assert ("Start the run again" in text) is torch_cannot_tell


@pytest.mark.drill
@pytest.mark.parametrize("kind", drill_cases(["ddp", "zero1"], [1]))
def test_the_record_of_a_step_outlives_the_rank_that_writes_it(
    tmp_path: Path, take: Any, expected: Any, kind: str
) -> None:
    """It dies between the checkpoint after a step and the step's record, with a part of zero1's state."""
    run = tmp_path / "run"
    found = take(run, kind, 2, {"die": [[0, "prune", 2]]}, **{"checkpoint.asynchronous": False})
    check(run, kind, found, expected(kind))
    assert [e["step"] for e in read_documents(run / "events.jsonl") if e["event"] == "start"] == [0, 10]


SHRINK_AND_GROW = {"die": [[1, "compute", 7]], "late": [[3, 1, 9]], "wait": [[10, 2]]}


@pytest.mark.drill
@pytest.mark.parametrize("kind", drill_cases(["exact ddp", "exact zero2"], [1]))
def test_stages_are_kept_when_ranks_die_and_join(tmp_path: Path, take: Any, kind: str) -> None:
    """A rank dies in the second stage; zero2 goes back into the first one for it."""
    staged = {"data.stages": "[{from_step = 6, global_batch = 48}]", "checkpoint.asynchronous": False}
    run = tmp_path / "run"
    expected = take(tmp_path / "undisturbed", "exact ddp", 1, {}, **staged)
    check(run, kind, take(run, kind, 3, SHRINK_AND_GROW, restarts=1, **staged), expected)
    assert groups(run) == [3, 2, 3]
    assert [record["samples"] for record in read_steps(run)] == [BATCH] * 6 + [2 * BATCH] * 10


@pytest.mark.drill
@pytest.mark.parametrize("kind", drill_cases(["exact ddp", "exact zero2"], [1]))
def test_lanes_move_in_every_group_and_leave_no_trace(
    tmp_path: Path, take: Any, expected: Any, kind: str
) -> None:
    """Process 0 is slow: its lanes move in the group of three, in that of two, and in the next one of three."""
    run = tmp_path / "run"
    moving = {"parallel.rebalance": True, "parallel.rebalance_every": 2, "checkpoint.asynchronous": False}
    script = {**SHRINK_AND_GROW, "cost": [[0, 40], *([process, 10] for process in (1, 2, 3))]}
    check(run, kind, take(run, kind, 3, script, restarts=1, **moving), expected(kind))
    assert groups(run) == [3, 2, 3]
    events = [e for e in read_documents(run / "events.jsonl") if e["event"] in {"start", "rebalance"}]
    assert [one for one, _ in groupby(e["event"] for e in events)] == ["start", "rebalance"] * 3, events


@pytest.mark.drill
@pytest.mark.parametrize("kind", drill_cases(["ddp", "zero3"], [1]))
def test_a_step_that_is_taken_again_leaves_no_trace_in_buffers(tmp_path: Path, take: Any, kind: str) -> None:
    """A model that counts its passes, one in each step, when a rank dies between the passes and the update."""
    counting = {"parallel.pass_samples": BATCH, "model.arguments": '{"counts" = true}', "checkpoint.every": 1}
    found = take(tmp_path / "run", kind, 3, {"die": [[1, "reduce", 7]]}, **counting)
    assert groups(tmp_path / "run") == [3, 2]
    assert found["model.passes"].tolist() == [STEPS]


def test_what_a_replica_has_learned_alone_is_not_passed_over(tmp_path: Path, take: Any) -> None:
    """Ranks that step alone meet every fourth step: what one has learned since is nowhere else."""
    run = tmp_path / "run"
    alone = {"parallel.sync_every": 4, "checkpoint.every": 3, "checkpoint.asynchronous": False}
    script = {"die": [[1, "compute", 5]], "late": [[3, 1, 7]], "wait": [[9, 2]]}
    take(run, "ddp", 3, script, restarts=1, **alone)
    assert groups(run) == [3, 2, 3]
    events = read_documents(run / "events.jsonl")
    assert [(e["step"], e["reached"]) for e in events if e["event"] == "rewind"] == [(3, 5)]
    assert [e["step"] for e in events if e["event"] == "start"] == [0, 3, 10]


@pytest.mark.drill
@pytest.mark.parametrize("ranks", drill_cases([2, 3], [1]))
def test_int8_resumes_with_equal_bits(tmp_path: Path, take: Any, ranks: int) -> None:
    """Several parameters in blocks of 256; the buckets of a process's first step are not those of the later ones."""
    compressed = {"parallel.reduction": "int8", "model.width": 98, "checkpoint.keep": 0}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    expected = take(whole, "ddp", ranks, {}, **compressed)
    assert expected["reduction.error"].norm() > 0
    shutil.copytree(whole, resumed)
    for name in checkpoint_names(resumed)[1:]:
        (resumed / "checkpoints" / f"{name}.json").unlink()
    found = take(resumed, "ddp", ranks, {}, **compressed)
    assert distance(found, expected) == 0.0


def test_a_step_that_is_skipped_leaves_no_trace_in_what_is_not_sent(tmp_path: Path, take: Any) -> None:
    """A gradient that is not finite would stay for ever in what int8 keeps for the next step."""
    compressed = {"parallel.reduction": "int8", "optimizer.skip_nonfinite": 1}
    found = take(tmp_path / "run", "ddp", 2, {"nan": [[3, 1]]}, **compressed)
    assert all(bool(tensor.isfinite().all()) for tensor in found.values())
    skipped = [
        e["step"] for e in read_documents(tmp_path / "run" / "events.jsonl") if e["event"] == "nonfinite"
    ]
    assert skipped == [3]


def sequence(seed: int) -> tuple[str, int, dict[str, Any], int]:
    """(kind, ranks, script, replacements): one or two deaths, together or one after the other."""
    random = np.random.Generator(np.random.PCG64(seed))
    kind = str(random.choice([one for one in KINDS if FAMILIES[seed % len(FAMILIES)] in one]))
    ranks = 4 if kind == "hybrid" else int(random.integers(2, 5))
    stages = [
        "data",
        "exchange",
        "compute",
        "compute",
        "reduce",
        "step",
        *(["gather"] if "zero1" in kind else []),
    ]
    victims = [int(one) for one in random.permutation(ranks)[: int(random.integers(1, 3))]]
    first, second = int(random.integers(0, 5)), int(random.integers(9, 12))
    die: list[list[Any]] = [[victims[0], str(random.choice(stages)), first]]
    script: dict[str, Any] = {"die": die}
    replacements = int(random.integers(0, 3))
    how = str(random.choice(["in turn", "in turn", "together", "saving"]))
    if how == "saving":
        # rank 0 alone publishes and prunes, the next one when it is gone; somebody has to be left
        die.clear()
        for place, one in enumerate(sorted(victims[: max(1, ranks + replacements - 2)])):
            stage = str(random.choice(["put", "finish", "prune"]))
            die.append([one if stage == "put" else place, stage, int(random.integers(1, 3))])
    elif how == "together" and ranks > 2:
        die += [[one, str(random.choice(stages)), first + int(random.integers(2))] for one in victims[1:]]
    elif replacements:
        script |= {"late": [[ranks, 1, first + int(random.integers(1, 3))]], "wait": [[first + 3, 2]]}
        if len(victims) == 2:
            last = int(random.choice([victims[1], ranks]))  # the replacement may be the next one to die
            die.append([last, str(random.choice(stages)), second])
            if replacements == 2:
                script["late"].append([ranks + 1, 3, second + 1])
                script["wait"].append([second + 2, 4])
    return kind, ranks, script, replacements


@pytest.mark.drill
def test_random_deaths_leave_no_trace(tmp_path: Path, take: Any, expected: Any) -> None:
    """SHARDKIT_SEQUENCES=17,41 repeats those; else from 0 on, a family of strategies after the other."""
    chosen = os.environ.get("SHARDKIT_SEQUENCES")
    seeds = [int(one) for one in chosen.split(",")] if chosen else range(200 if DRILLS else 5)
    for seed in seeds:
        kind, ranks, script, replacements = sequence(seed)
        run = tmp_path / f"run-{seed}"
        every = 2 + seed % 4
        print(
            f"sequence {seed}: {kind}, {ranks} ranks, {replacements} replacements, {json.dumps(script)}",
            flush=True,
        )
        found = take(run, kind, ranks, script, restarts=replacements,
                     **{"checkpoint.every": every, "checkpoint.asynchronous": seed % 3 > 0})  # fmt: skip
        check(run, kind, found, expected(kind))
        assert len(groups(run)) > 1, "nobody has died"
        shutil.rmtree(run)
