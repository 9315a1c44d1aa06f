"""Whatever ends a loop, and however processes begin: no thread, process, lock, open file or file is left behind."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit.errors import RunError, UsageError
from shardkit.loader.settings import Workers

ROWS = 240


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> shardkit.Dataset:
    root = str(tmp_path_factory.mktemp("data") / "numbers")
    schema = {"n": "int64", "x": "uint8[64]", "blob": "bytes"}
    with shardkit.create(root, schema=schema, block_size="2KiB", shard_size="8KiB") as writer:
        for n in range(ROWS):
            writer.add({"n": n, "x": np.full(64, n % 256, dtype=np.uint8), "blob": b"b" * n})
    return shardkit.open(root)


def _plan(ds: shardkit.Dataset) -> Any:
    return ds.plan(global_batch=12, lanes=4)


def _noisy(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"n": sample["n"], "noise": int(rng.integers(1 << 60)), "worker": os.getpid()}


def _own_threads() -> set[threading.Thread]:
    gc.collect()
    return {thread for thread in threading.enumerate() if thread.name.startswith("shardkit")}


def _until_ended(before: set[threading.Thread], pids: set[int] = frozenset()) -> None:  # type: ignore[assignment]
    deadline = time.monotonic() + 20
    while (_own_threads() - before or _alive(pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _own_threads() - before
    assert not _alive(pids)


def _alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if _state(pid) not in ("", "Z", "X")}


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _open_files(below: list[Path]) -> list[str]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if any(target.startswith(str(folder)) for folder in below):
            found.append(target)
    return found


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="processes are looked up in /proc")


@needs_proc
@pytest.mark.parametrize(("end", "workers"), [("drop", "threads"), ("drop", "processes"), ("raise", "processes"),
                                              ("close", "processes"), ("finish", "threads"), ("fail", "threads"),
                                              ("fail", "processes")])  # fmt: skip
def test_whatever_ends_a_loop_nothing_of_it_stays(
    ds: shardkit.Dataset, tmp_path: Path, end: str, workers: Workers
) -> None:
    root = ds.repository.store.local_path("shardkit.json")
    assert root is not None
    ds = shardkit.open(str(root.parent))
    before = _own_threads()
    calls = iter(range(3 if end == "fail" else ROWS))

    def change(fields: dict[str, Any], _rngs: Any) -> dict[str, Any]:
        next(calls)
        return fields

    loader = ds.loader(
        _plan(ds),
        transform=_noisy,
        batch_transform=change,
        workers=workers,
        threads=2,
        tensors=False,
        run=tmp_path,
    )
    pids: set[int] = set()
    steps = 0
    try:
        for batch in loader:
            pids |= {int(pid) for pid in batch["worker"]} - {os.getpid()}
            steps += 1
            if steps == 3 and end == "raise":
                raise ZeroDivisionError
            if steps == 3 and end != "finish":
                break
    except (ZeroDivisionError, RunError):
        pass
    assert steps == (ROWS // 12 if end == "finish" else 3)
    assert bool(pids) == (workers == "processes")
    del batch
    if end in ("close", "finish"):
        loader.close()
    del loader, ds
    gc.collect()  # a loop and its error refer to each other
    _until_ended(before, pids)
    assert not _open_files([tmp_path, root.parent])
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} <= {
        ".cells",
        ".journal",
        ".json",
        ".jsonl",
    }


def test_an_interrupt_while_a_batch_is_awaited_leaves_a_loader_that_goes_on(ds: shardkit.Dataset) -> None:
    """Ctrl-C in `next`: the signal is raised by the very transform that the loop waits for."""
    before = _own_threads()
    pressed, noticed = threading.Event(), threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def press(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        if sample["n"] == bad and not pressed.is_set():
            pressed.set()
            signal.pthread_kill(main, signal.SIGINT)
            noticed.wait(30)
        return sample

    def interrupt(*_: Any) -> None:
        noticed.set()
        raise KeyboardInterrupt

    plan = _plan(ds)
    bad = int(ds[int(plan.step(6).ravel()[5])]["n"])
    loader = ds.loader(plan, transform=press, tensors=False, threads=1)
    seen: list[int] = []
    usual = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            seen.extend(batch.step for batch in loader)
    finally:
        signal.signal(signal.SIGINT, usual)
    assert seen == list(range(len(seen)))
    assert len(seen) <= 6
    loader.load_state_dict(loader.state_dict())
    rest = [(batch.step, batch.samples.tolist()) for batch in loader]
    assert rest == [(step, plan.step(step).ravel().tolist()) for step in range(len(seen), 20)]
    del loader
    _until_ended(before)


PROGRAM = """
    import os, sys, time
    import shardkit
    def work(sample, rng):
        if sample["n"] == int(sys.argv[4]):
            os.write(1, b"here\\n")
            while not os.path.exists(sys.argv[5]):
                time.sleep(0.01)
        return sample
    if __name__ == "__main__":
        ds = shardkit.open(sys.argv[1])
        plan = ds.plan(global_batch=12, lanes=4)
        loader = ds.loader(plan, tensors=False, transform=work, workers=sys.argv[2], threads=2, run=sys.argv[3])
        for batch in loader:
            pass
"""


@needs_proc
@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, "threads"), (signal.SIGTERM, "threads"),
                                                 (signal.SIGINT, "processes"), (signal.SIGTERM, "processes"),
                                                 (signal.SIGKILL, "processes")],
                         ids=lambda one: getattr(one, "name", one))  # fmt: skip
def test_a_signal_while_a_batch_is_awaited_leaves_no_process_and_no_file(
    ds: shardkit.Dataset, tmp_path: Path, number: signal.Signals, workers: str
) -> None:
    """What is being transformed ends first where the process is asked to end (SIGINT), and does not otherwise."""
    program, scratch, run, go_on = (tmp_path / name for name in ("program.py", "tmp", "run", "go_on"))
    program.write_text(textwrap.dedent(PROGRAM))
    scratch.mkdir()
    held = int(ds[int(_plan(ds).step(4).ravel()[0])]["n"])
    child = subprocess.Popen(
        [sys.executable, str(program), str(ds.repository.store.url), workers, str(run), str(held), str(go_on)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    )  # fmt: skip
    assert child.stdout is not None
    with child, child.stdout:
        assert child.stdout.readline() == b"here\n"
        family = {pid for pid in _all_pids() if _session(pid) == child.pid}
        assert (len(family) > 1) == (workers == "processes")
        named = [path for pid in family for path in _shared_memory(pid)]
        child.send_signal(number)
        if number == signal.SIGINT:
            go_on.touch()
        assert child.wait(60) != 0
    _until_ended(_own_threads(), family)
    assert not [path for path in named if Path(path).exists()]
    assert not list(scratch.rglob("*"))
    assert {path.suffix for path in run.rglob("*") if path.is_file()} <= {
        ".cells",
        ".journal",
        ".json",
        ".jsonl",
    }


def _all_pids() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def _shared_memory(pid: int) -> list[str]:
    """What a process has mapped that has a name in shared memory: what would stay if nobody removed it."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return []
    names = (line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/" in line and "/pytest-" not in line)
    return [name for name in names if not name.endswith("(deleted)")]


# ---- how processes begin


def _read_all(ds: shardkit.Dataset, plan: Any, state: dict[str, Any], workers: Workers, queue: Any) -> None:
    with ds.loader(plan, transform=_noisy, workers=workers, threads=2, tensors=False) as loader:
        loader.load_state_dict(state)
        queue.put([(batch["n"].tolist(), batch["noise"].tolist()) for batch in loader])


@pytest.mark.parametrize(("method", "workers"), [("fork", "threads"), ("fork", "processes"), ("spawn", "threads"),
                                                 ("forkserver", "processes")])  # fmt: skip
def test_a_process_of_any_kind_reads_what_its_parent_reads(
    ds: shardkit.Dataset, method: str, workers: Workers
) -> None:
    """While the parent's threads run, and hold what threads hold."""
    plan = _plan(ds)
    with ds.loader(plan, transform=_noisy, tensors=False, threads=2) as loader:
        batches = iter(loader)
        first = next(batches)
        state = loader.state_dict(after=first)
        context: Any = multiprocessing.get_context(method)
        queue = context.Queue()
        child = context.Process(target=_read_all, args=(ds, plan, state, workers, queue))
        child.start()
        got = queue.get(timeout=120)
        child.join(30)
        assert child.exitcode == 0
        assert got == [(batch["n"].tolist(), batch["noise"].tolist()) for batch in batches]
        assert len(got) == 19


def test_a_loader_that_is_sent_to_another_process_says_what_to_send(ds: shardkit.Dataset) -> None:
    loader = ds.loader(_plan(ds))
    next(iter(loader))
    with pytest.raises(UsageError, match=r"send the dataset, the plan and loader\.state_dict\(\)"):
        pickle.dumps(loader)
    with pytest.raises(UsageError, match="send the dataset"):  # and nothing unraisable
        copy.deepcopy(iter(loader))
    loader.close()


def test_a_loader_may_be_collected_on_a_thread_of_its_own(ds: shardkit.Dataset) -> None:
    """The last reference goes away while one of its block threads runs: it ends all the same, and nobody waits."""
    before = _own_threads()
    loader = ds.loader(_plan(ds), rank=0, world=1, tensors=False)
    next(iter(loader))
    resources = loader.resources
    assert resources is not None
    collecting = threading.Thread(target=resources.close_unwatched, name="shardkit-blocks-0")
    collecting.start()
    collecting.join(timeout=30)
    assert not collecting.is_alive()
    loader.close()
    _until_ended(before)
