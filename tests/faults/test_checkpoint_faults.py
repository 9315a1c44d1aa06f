"""Checkpoints under damage: whatever happens to the bytes or to the writer, a load gives what was saved or an error."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from shardkit.errors import ConfigurationError, IntegrityError, NotFoundError, ShardkitError
from shardkit.stores.file_operations import substituted
from shardkit.stores.local import LocalStore
from shardkit.torch import (
    CheckpointReader,
    CheckpointWriter,
    checkpoint_names,
    checkpointing,
    prune_checkpoints,
    read_checkpoint_manifest,
)
from tests.drills import drill_count
from tests.faults.crash_states import RecordingOperations, crash_states, write_state
from tests.faults.faulty_operations import FaultyOperations

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a few kilobytes then take the ways of tensors of gigabytes."""
    monkeypatch.setattr(checkpointing, "PIECE_BYTES", 2048)
    monkeypatch.setattr(checkpointing, "PACK_BYTES", 512)
    monkeypatch.setattr(checkpointing, "PACK_TARGET_BYTES", 1024)


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    model = {
        "frozen": torch.arange(1500, dtype=torch.float32).reshape(30, 50),
        "large": torch.randn(40, 33, generator=generator),
        "half": torch.randn(300, generator=generator).to(torch.bfloat16),
        "scalar": torch.tensor(step, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        **{f"small{i}": torch.full((20,), float(step + i)) for i in range(8)},
    }
    return {
        "model": model,
        "rate": 0.1 * step,
        "steps": [step, None, (True, "x")],
        "deep": {"a": {"b": float("inf")}},
    }


def blank() -> dict[str, Any]:
    zeros = {name: torch.full_like(tensor, 77) for name, tensor in state(0)["model"].items()}
    return {"model": zeros, "rate": 0.0, "steps": [0, 0, (0, 0)], "deep": {"a": {"b": 0.0}}}


def save(root: Path, step: int) -> None:
    writer = CheckpointWriter(root, f"step-{step:04d}", {"step": step}, threads=1)
    save_state(state(step), storage_writer=writer)


def load(root: Path, name: str | None = None) -> int:
    """Load, check against what was saved, and return the step.

    Raises:
        ShardkitError: what the reader raised, without DCP's wrapping.
    """
    loaded, reader = blank(), CheckpointReader(root, name)
    try:
        load_state(loaded, storage_reader=reader)
    except CheckpointException as error:
        raise (reader.failure or error.failures[0][0]) from None
    expected = state(reader.meta["step"])
    for key, tensor in expected["model"].items():
        assert torch.equal(loaded["model"][key], tensor), key
    assert {k: v for k, v in loaded.items() if k != "model"} == {
        k: v for k, v in expected.items() if k != "model"
    }
    step: int = reader.meta["step"]
    return step


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def test_what_is_saved_is_loaded_and_unchanged_tensors_are_shared(tmp_path: Path) -> None:
    save(tmp_path, 1)
    first = {path.name: path.stat().st_size for path in files(tmp_path)}
    save(tmp_path, 2)
    assert (load(tmp_path), load(tmp_path, "step-0001")) == (2, 1)
    assert checkpoint_names(tmp_path) == ["step-0001", "step-0002"]
    extents = [
        {piece[0] for _, _, pieces in read_checkpoint_manifest(tmp_path, name)["tensors"]["model.frozen"]["chunks"]
         for piece in pieces}
        for name in ("step-0001", "step-0002")
    ]  # fmt: skip
    assert len(extents[0]) == 3
    assert extents[0] == extents[1]
    assert first.keys() <= {path.name for path in files(tmp_path)}


def test_no_file_holds_a_pickle(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for path in files(tmp_path):
        data = path.read_bytes()
        assert not data.startswith((b"PK", b"\x80")), path
        assert b"torch._utils" not in data


def test_objects_that_need_a_pickle_are_refused(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, "a")
    with pytest.raises(CheckpointException, match=r"odd.*only tensors and plain data"):
        save_state({"odd": Path("x")}, storage_writer=writer)
    assert checkpoint_names(tmp_path) == []


def test_a_flipped_bit_anywhere_is_found_or_without_effect(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    random = np.random.Generator(np.random.PCG64(20))
    everything = files(tmp_path)
    sizes = np.array([path.stat().st_size for path in everything])
    found = 0
    for _ in range(drill_count(1000)):
        path = everything[random.choice(len(everything), p=sizes / sizes.sum())]
        good = path.read_bytes()
        at = int(random.integers(len(good) * 8))
        path.write_bytes(good[: at // 8] + bytes([good[at // 8] ^ 1 << at % 8]) + good[at // 8 + 1 :])
        for name in ("step-0001", "step-0002"):
            try:
                load(tmp_path, name)
            except IntegrityError:
                found += 1
        path.write_bytes(good)
    assert found >= drill_count(1000)
    assert load(tmp_path) == 2


@pytest.mark.parametrize("damage", ["truncate", "extend", "remove", "empty", "swap"])
def test_files_that_are_cut_extended_removed_or_swapped(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    shutil.copytree(tmp_path, tmp_path.parent / "good", dirs_exist_ok=True)
    everything = files(tmp_path)
    for number, path in enumerate(everything):
        good = path.read_bytes()
        if damage == "remove":
            path.unlink()
        elif damage == "swap":
            path.write_bytes(everything[number - 1].read_bytes())
        else:
            path.write_bytes({"truncate": good[:-1], "extend": good + b"\0", "empty": b""}[damage])
        errors = 0
        for name in ("step-0001", "step-0002"):
            try:
                assert load(tmp_path, name) == int(name[-1])
            except (IntegrityError, NotFoundError):
                errors += 1
        assert errors >= 1, path
        path.write_bytes(good)


def test_a_process_that_dies_at_any_file_operation_loses_nothing(tmp_path: Path) -> None:
    """Every later operation fails, as for a killed process; then all of them one by one with a full disk."""
    save(tmp_path / "good", 1)
    count = FaultyOperations(errno.EIO)
    shutil.copytree(tmp_path / "good", tmp_path / "count")
    with substituted(count):
        save(tmp_path / "count", 2)
    every = max(1, count.num_calls // drill_count(200))
    outcomes = set()
    for at in range(0, count.num_calls, every):
        for error, forever in ((errno.EIO, True), (errno.ENOSPC, False)):
            root = tmp_path / f"{at}-{error}"
            shutil.copytree(tmp_path / "good", root)
            with substituted(FaultyOperations(error, at, forever=forever, torn=forever)):
                try:
                    save(root, 2)
                    outcomes.add("saved")
                except CheckpointException as failure:
                    outcomes.add(type(failure.failures[0][0]).__name__)
            newest = load(root)
            assert newest in {1, 2}
            assert load(root, "step-0001") == 1
            save(root, 3)  # and it goes on
            assert load(root) == 3
            shutil.rmtree(root)
    assert outcomes - {"saved"} <= {"StoreError", "StoreFullError"}
    assert len(outcomes) >= 2


def test_a_power_cut_at_any_moment_of_saving_and_pruning_loses_nothing_acknowledged(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    recorder = RecordingOperations(root)
    with substituted(recorder):
        for step in (1, 2, 3):
            save(root, step)
            recorder.acknowledge(step)
            prune_checkpoints(LocalStore(root), keep=1)
    checked = 0
    for number, crash in enumerate(crash_states(recorder.operations)):
        if number % (1 if drill_count(20) == 20 else 3):
            continue
        place = tmp_path / f"state{number}"
        write_state(crash, place)
        acknowledged = max(int(str(promise)) for promise in (0, *crash.promises))
        names = checkpoint_names(LocalStore(place, read_only=True)) if place.exists() else []
        loaded = [load(place, name) for name in names]
        assert max([0, *loaded]) >= acknowledged
        checked += 1
        shutil.rmtree(place, ignore_errors=True)
    assert checked > 20


def test_pruning_keeps_shared_objects_and_clears_what_dead_writers_left(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    garbage = LocalStore(tmp_path)
    from shardkit.documents import sha256_digest
    from shardkit.stores.store import object_name

    orphan = object_name(sha256_digest(b"orphan"), "tensor")
    garbage.put_new(orphan, b"orphan")
    prune_checkpoints(garbage, keep=2)
    assert checkpoint_names(tmp_path) == ["step-0003", "step-0004"]
    assert [load(tmp_path, name) for name in checkpoint_names(tmp_path)] == [3, 4]
    assert garbage.head(orphan) is None
    before = files(tmp_path)
    prune_checkpoints(garbage, keep=2)
    assert files(tmp_path) == before
    # with a damaged checkpoint among those kept, objects stay: it may be repaired
    (tmp_path / "checkpoints" / "step-0003.json").write_bytes(b"{}")
    garbage.put_new(orphan, b"orphan")
    prune_checkpoints(garbage, keep=2)
    assert garbage.head(orphan) is not None
    with pytest.raises(ConfigurationError, match="keep = 0"):
        prune_checkpoints(garbage, keep=0)


def test_names_cannot_leave_the_folder(tmp_path: Path) -> None:
    for name in ("../x", "a/b", "", ".hidden", "x" * 200, "UPPER"):
        with pytest.raises((ShardkitError, CheckpointException)):
            save_state({"a": torch.zeros(1)}, storage_writer=CheckpointWriter(tmp_path, name))
    assert not list(tmp_path.rglob("x*"))


def test_a_name_is_not_written_twice(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 1)  # the same bytes: fine
    with pytest.raises(CheckpointException, match=r"exists in .* with other content"):
        save_state(state(2), storage_writer=CheckpointWriter(tmp_path, "step-0001", {"step": 2}))
    assert load(tmp_path) == 1
