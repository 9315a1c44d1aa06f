"""What the loader does when something fails: rows that do not decode, transforms, stalls."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit.errors import ConfigurationError, RunError
from shardkit.ledger import read_journal
from shardkit.reading.blocks import BlockReader
from shardkit.telemetry import TelemetrySettings, read_events, read_run, recorder

# ---- What the loader does when something fails: rows that do not decode, transforms, stalls, forks, signals


ROWS, BAD = 120, frozenset({7, 31, 64, 65})


def _png(number: int) -> bytes:
    image = pytest.importorskip("PIL.Image")
    sink = io.BytesIO()
    image.fromarray(np.full((3, 5, 3), number % 251, dtype=np.uint8)).save(sink, "PNG")
    return sink.getvalue()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> shardkit.Dataset:
    """PNGs of which four are verified bytes that are no image; stratified by label."""
    root = str(tmp_path_factory.mktemp("data") / "images")
    schema = {"image": "bytes", "label": "int64", "sizes": "int32[*]", "n": "int64"}
    with shardkit.create(root, schema=schema, stratify="label", block_size="4KiB", shuffle=False) as writer:
        for n in range(ROWS):
            writer.add(
                {
                    "image": b"no image" if n in BAD else _png(n),
                    "label": n % 3,
                    "sizes": [n] * (n % 4),
                    "n": n,
                }
            )
    return shardkit.open(root)


def _plan(ds: shardkit.Dataset) -> Any:
    return ds.plan(global_batch=12, lanes=4)


# ---- rows that do not decode


def test_by_default_a_row_that_does_not_decode_stops_the_run_and_is_named(images: shardkit.Dataset) -> None:
    with pytest.raises(
        RunError, match=r"sample \d+ \(key '\d+'\) does not decode: field 'image': FormatError: a picture"
    ) as caught:
        list(images.loader(_plan(images), decode={"image": "rgb8"}, tensors=False))
    sample = int(str(caught.value).split()[1])
    assert images[sample]["n"] in BAD


@pytest.mark.parametrize("transformed", [False, True])
def test_substitutes_are_of_the_same_stratum_and_the_same_in_every_world(
    images: shardkit.Dataset, tmp_path: Path, transformed: bool
) -> None:
    plan = _plan(images)

    def run(world: int, name: str) -> list[tuple[int, int, int, int]]:
        rows: list[tuple[int, int, int, int]] = []
        for rank in range(world):
            loader = images.loader(
                plan, rank=rank, world=world, decode={"image": "rgb8"}, on_error="substitute", tensors=False,
                run=tmp_path / name, transform=(lambda sample, rng: sample) if transformed else None,
            )  # fmt: skip
            with loader:
                for batch in loader:
                    assert len(batch["n"]) == len(batch.samples) == 12 // world
                    assert (batch["image"][:, 0, 0, 0] == batch["n"] % 251).all()
                    rows += zip([batch.step] * len(batch.slots), batch.slots.tolist(), batch.samples.tolist(),
                                batch["n"].tolist(), strict=True)  # fmt: skip
        return sorted(rows)

    alone = run(1, "one")
    assert run(2, "two") == alone
    planned = {
        (s, lane * 3 + i): int(plan.cell(s, lane)[i])
        for s in range(10)
        for lane in range(4)
        for i in range(3)
    }
    changed = [(step, slot, sample) for step, slot, sample, _ in alone if planned[step, slot] != sample]
    assert {images[planned[step, slot]]["n"] for step, slot, _ in changed} == BAD
    for step, slot, sample in changed:
        assert images[sample]["label"] == images[planned[step, slot]]["label"]
    assert all(images[sample]["n"] == n for _, _, sample, n in alone)
    events = [json.loads(line) for line in (tmp_path / "one" / "events.jsonl").read_text().splitlines()]
    assert [(e["event"], e["step"], e["lane"] * 3 + e["slot"], e["by"]) for e in events] == [
        ("substitution", *change) for change in changed
    ]
    (journal,) = (tmp_path / "one" / "journal").iterdir()
    records = {(r.step, r.lane): r.digest for r in read_journal(journal)}
    touched = {(step, slot // 3) for step, slot, _ in changed}
    assert {place for place, digest in records.items() if digest != plan.cell_digest(*place)} == touched


def test_masked_rows_keep_their_place_and_are_marked(images: shardkit.Dataset) -> None:
    plan = _plan(images)
    loader = images.loader(plan, decode={"image": "rgb8"}, on_error="mask", tensors=False)
    masked = set()
    for batch in loader:
        np.testing.assert_array_equal(batch.samples, plan.step(batch.step).ravel())
        assert batch["image"].shape == (12, 3, 5, 3)
        masked |= {images[int(s)]["n"] for s in batch.samples[~batch["valid"]]}
    assert masked == BAD
    assert loader.stats()["substitutions"] == len(BAD)


def test_decoders_by_name(tmp_path: Path) -> None:
    root = str(tmp_path / "d")
    schema = {"a": "bytes", "j": "bytes", "t": "bytes", "g": "bytes", "s": "str"}
    npy = io.BytesIO()
    np.save(npy, np.arange(6).reshape(2, 3))
    sample = {"a": npy.getvalue(), "j": b'{"x": [1]}', "t": "é".encode(), "g": _png(9), "s": "[2]"}
    with shardkit.create(root, schema=schema) as writer:
        writer.add(sample)
    ds = shardkit.open(root)
    plan = ds.plan(global_batch=1, lanes=1)
    decode = {"a": "numpy", "j": "json", "t": "text", "g": "gray8", "s": "json"}
    (batch,) = ds.loader(plan, decode=decode, tensors=False)
    np.testing.assert_array_equal(batch["a"], [[[0, 1, 2], [3, 4, 5]]])
    assert (batch["j"], batch["t"], batch["s"]) == ([{"x": [1]}], ["é"], [[2]])
    assert batch["g"].tolist() == [[[9] * 5] * 3]
    for wrong, names in (({"z": "json"}, "'z' is not in the schema"), ({"a": "jpeg"}, "known are rgb8")):
        with pytest.raises(ConfigurationError, match=names):
            ds.loader(plan, decode=wrong)


def test_an_object_array_is_not_unpickled(tmp_path: Path) -> None:
    sink = io.BytesIO()
    np.save(sink, np.array([{}], dtype=object), allow_pickle=True)
    with shardkit.create(str(tmp_path / "d"), schema={"a": "bytes"}) as writer:
        writer.add({"a": sink.getvalue()})
    ds = shardkit.open(str(tmp_path / "d"))
    with pytest.raises(RunError, match=r"sample 0 \(key '0+'\) does not decode"):
        list(ds.loader(ds.plan(global_batch=1, lanes=1), decode={"a": "numpy"}, tensors=False))


# ---- transforms in processes


def _noisy(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"n": sample["n"], "noise": int(rng.integers(1 << 60)), "worker": os.getpid()}


def _fails_at_50(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    if sample["n"] == 50:
        raise ValueError("no such thing")
    return sample


def _dies(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    os._exit(3)


def _alive(pids: set[int]) -> set[int]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        pids = {pid for pid in pids if Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in _status(pid)}
        if not pids:
            break
        time.sleep(0.05)
    return pids


def _status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""


def test_processes_give_what_threads_give_name_failures_and_leave_nothing(images: shardkit.Dataset) -> None:
    plan = _plan(images)
    with images.loader(plan, transform=_noisy, tensors=False, threads=3) as threads:
        expected = [(b["n"].tolist(), b["noise"].tolist()) for b in threads]
    with images.loader(plan, transform=_noisy, tensors=False, threads=1, workers="processes") as processes:
        batches = list(processes)
    assert [(b["n"].tolist(), b["noise"].tolist()) for b in batches] == expected
    pids = {int(pid) for b in batches for pid in b["worker"]}
    assert os.getpid() not in pids
    assert not _alive(pids)
    failing = images.loader(plan, transform=_fails_at_50, tensors=False, threads=1, workers="processes")
    with (
        pytest.raises(
            RunError, match=r"failed on sample \d+ \(key '\d+'\): ValueError: no such thing"
        ) as caught,
        failing,
    ):
        list(failing)
    assert images[int(str(caught.value).split("sample ")[1].split()[0])]["n"] == 50


def test_a_transform_process_that_dies_is_an_error(images: shardkit.Dataset) -> None:
    dying = images.loader(_plan(images), transform=_dies, tensors=False, threads=1, workers="processes")
    with pytest.raises(RunError, match="a transform process died while it worked on step 0"), dying:
        list(dying)


# ---- stalls


def test_the_watchdog_names_rank_lane_shard_and_stage(
    images: shardkit.Dataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[Any] = []
    spoken = threading.Event()
    read = BlockReader.read

    def hang(self: BlockReader, shard: int, block: int, verify: Any = None, **how: Any) -> Any:
        spoken.wait(30)
        return read(self, shard, block, verify, **how)

    def tell(facts: Any) -> None:
        if facts["stage"] == "load":  # on a busy machine, what is before it may stall as well
            told.append(facts)
            spoken.set()

    monkeypatch.setattr(BlockReader, "read", hang)
    plan = _plan(images)
    loader = images.loader(plan, rank=1, world=2, tensors=False, stall_s=0.05, on_stall=tell, run=tmp_path)
    batch = next(iter(loader))
    facts = told[0]
    assert (facts["rank"], facts["world"], facts["stage"], facts["step"]) == (1, 2, "load", 0)
    assert facts["lane"] in loader.lanes
    assert facts["shard"] == images.reader.shard_name(0)
    assert loader.stats()["stalls"] >= 1
    assert json.loads((tmp_path / "events.jsonl").read_text().splitlines()[0])["event"] == "stall"
    assert batch.step == 0
    loader.close()


def test_a_stall_in_a_transform_is_a_warning_that_names_the_sample(images: shardkit.Dataset) -> None:
    expected = r"rank 0 of 1 has waited .* stage transform \(step 0, sample \d+\)"
    ends = time.monotonic() + 60

    def is_told() -> bool:  # on a busy machine loading may stall, too
        return any(re.search(expected, str(one.message)) for one in told if one.category is RuntimeWarning)

    def hang(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        while not is_told() and time.monotonic() < ends:
            time.sleep(0.01)
        return sample

    with (
        warnings.catch_warnings(record=True) as told,
        images.loader(_plan(images), transform=hang, tensors=False, stall_s=0.1) as loader,
    ):
        warnings.simplefilter("always")
        next(iter(loader))
    assert is_told()


# ---- fork


def _child_reads(loader: Any, queue: Any) -> None:
    queue.put([b.samples.tolist() for b in loader])


def test_a_forked_child_goes_on_with_the_loader(images: shardkit.Dataset) -> None:
    loader = images.loader(_plan(images), tensors=False)
    expected = [b.samples.tolist() for b in loader]
    loader.seek(0)
    iterator = iter(loader)
    next(iterator)  # threads are running
    loader.seek(0)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_child_reads, args=(loader, queue))
    child.start()
    assert queue.get(timeout=60) == expected
    child.join(30)
    assert child.exitcode == 0
    assert [b.samples.tolist() for b in loader] == expected
    loader.close()


_REPLACED = """
import os, pathlib, sys, shardkit
from shardkit.errors import StoreError
root = pathlib.Path(sys.argv[1])
ds = shardkit.open(str(root))
loader = ds.loader(ds.plan(global_batch=8, lanes=4), tensors=False, memory="1MiB", rank=0, world=1)
try:
    for number, _ in enumerate(loader):
        if number == 1:
            for shard in (root / "objects").rglob("*." + sys.argv[2]):
                shard.unlink()
                os.mkfifo(shard) if sys.argv[3] == "pipe" else shard.mkdir()
except StoreError as error:
    print("refused" if "not a regular file" in str(error) else error)
"""


@pytest.mark.parametrize(("form", "kind"), [("arrow", "pipe"), ("tar", "folder")])
def test_a_shard_that_becomes_no_file_is_an_error_at_once(tmp_path: Path, form: Any, kind: str) -> None:
    root, row = tmp_path / "data", np.zeros(64, np.int64)
    with shardkit.create(str(root), schema={"x": "int64[64]"}, format=form, shard_size="16KiB",
                         block_size="2KiB") as writer:  # fmt: skip
        for _ in range(6000):  # three times what memory holds: most blocks are not loaded yet
            writer.add({"x": row})
    done = subprocess.run(
        [sys.executable, "-c", _REPLACED, str(root), form, kind],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("refused\n", 0), done.stderr[-2000:]


# ---- A loader that stalls says so by itself: an event, a counter, and what its threads were doing


def test_a_stall_leaves_the_stacks_that_explain_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_BETWEEN_STACKS_S", 0.0)  # on a busy machine loading may stall first
    root = str(tmp_path / "data")
    with shardkit.create(root, {"x": "int64[8]"}, shard_size="16KiB", block_size="2KiB") as writer:
        for number in range(64):
            writer.add({"x": np.full(8, number)})
    dataset = shardkit.open(root)
    released = threading.Event()

    def a_transform_that_hangs(sample: dict[str, Any], rng: Any) -> dict[str, Any]:
        assert released.wait(60)
        return sample

    reports: list[Any] = []
    run = tmp_path / "run"
    stacks = run / "telemetry" / "rank-00000.stacks.txt"

    def is_explained() -> bool:
        is_told = any(one["stage"] == "transform" for one in reports)
        return is_told and stacks.exists() and "a_transform_that_hangs" in stacks.read_text()

    with dataset.loader(
        dataset.plan(global_batch=8, lanes=2), run=run, tensors=False, transform=a_transform_that_hangs, stall_s=0.1,
        on_stall=reports.append, telemetry=TelemetrySettings(interval_s=0.05),
    ) as loader:  # fmt: skip
        steps = iter(loader)
        waiting = threading.Thread(target=next, args=(steps,))
        waiting.start()
        deadline = time.monotonic() + 60
        while not is_explained():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        released.set()
        waiting.join()
        assert sum(1 for _ in steps) == 7, "and the run goes on"
    assert "transform" in {event["stage"] for event in read_events(run) if event["event"] == "stall"}
    last = read_run(run).series[0, 0][-1]
    assert last.value("loader.stalls") >= 1
    assert last.value("loader.steps") == 8
    assert last.value("recorder.failures") == 0
