"""A rank among others: process group, small collectives, errors that name the rank that failed, requests to stop."""

from __future__ import annotations

import itertools
import json
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from shardkit.errors import RunError

from .configuration import Configuration, expect

# torch 2.13 renames these and warns about the older names
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
START_PATIENCE = timedelta(seconds=60)  # ranks of a busy machine start seconds apart
_joined = itertools.count()
STAGES = ("start", "data", "exchange", "compute", "reduce", "step", "checkpoint", "end")
"""Stages of a step and of a run, as faults and telemetry name them."""


@dataclass
class World:
    """The process group of a run, seen from this rank."""

    # rank, size: as in torch
    rank: int
    size: int
    device: torch.device  # device of the model
    store: c10d.Store  # store of the rendezvous; carries the heartbeats
    owned: bool  # whether `join_world` made the process group, so that `leave_world` destroys it
    bytes_moved: int = 0  # payload bytes of this rank's collectives that the trainer itself issued
    _place: tuple[int, str] = (0, "start")
    _exchanges: int = 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over ranks, in place, and return it."""
        self.bytes_moved += tensor.numel() * tensor.element_size()
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """Return every rank's row of integers, by rank; collective."""
        mine = torch.tensor(values, dtype=torch.int64, device=self.device)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine)
        return [row.tolist() for row in rows]

    def exchange(self, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return every rank's mapping of JSON values, by rank; collective."""
        self._exchanges += 1
        key = f"exchange-{self._exchanges}"
        self.store.set(f"{key}/{self.rank}", json.dumps(mine))
        self.gather_integers([0])
        return [json.loads(self.store.get(f"{key}/{rank}")) for rank in range(self.size)]

    def gather_slices(self, whole: Tensor, mine: Tensor) -> None:
        """Fill ``whole`` (size · n elements) with every rank's n elements; collective."""
        self.bytes_moved += whole.numel() * whole.element_size()
        all_gather_single(whole, mine)

    def report(self, step: int, stage: str) -> None:
        """Send a heartbeat: this rank has entered a stage of a step."""
        self._place = (step, stage)
        self.store.set(f"alive/{self.rank}", f"{step} {STAGES.index(stage)}")

    @property
    def stage(self) -> str:
        return self._place[1]

    def __post_init__(self) -> None:
        # other ranks look up this process when it does not answer
        self.store.set(f"process/{self.rank}", f"{os.getpid()} {_kernel()}")

    def failure(self, error: RuntimeError) -> RunError | None:
        """Return an error that names the ranks that caused ``error`` in a collective, or None if no rank did.

        Gloo raises plain RuntimeErrors, as a model does, so the state of the other ranks decides.
        """
        step, stage = self._place
        time.sleep(0.2)  # the kernel reports a dying process with a delay
        try:
            suspects = [text for rank in range(self.size) if (text := self._suspicion(rank))]
        except RuntimeError:
            suspects = ["rank 0 (dead: the store that it serves is gone)"]
        elsewhere = isinstance(error, dist.DistError)
        if not suspects and not elsewhere:
            return None
        names = ", ".join(suspects) or "a rank of another machine that is dead or cannot be reached"
        reason = str(error).partition(". This is")[0].partition("\n")[0]
        return RunError(
            f"rank {self.rank} waited in step {step}, stage {stage}, for: {names}. Start the run again: it continues"
            f" from its newest checkpoint; if a rank is only slow, raise parallel.timeout_s. ({reason})"
        )

    def _suspicion(self, rank: int) -> str:
        """Describe why another rank may be the cause; empty if nothing is known."""
        if rank == self.rank:
            return ""
        step, stage = self._place
        here, condition = self._condition(rank)
        last = self._look_up(f"alive/{rank}").split()
        place = (int(last[0]), int(last[1])) if last else (-1, 0)
        if not condition and place >= (step, STAGES.index(stage)):
            return "" if here else f"rank {rank} (on another machine, dead or out of reach)"
        at = f"step {place[0]}, stage {STAGES[place[1]]}" if place[0] >= 0 else "its start"
        return f"rank {rank} ({condition or 'late'}; last seen at {at})"

    def _condition(self, rank: int) -> tuple[bool, str]:
        """Return whether a rank runs on this machine, and its state according to the kernel: dead, frozen or empty."""
        pid, _, node = self._look_up(f"process/{rank}").partition(" ")
        if node != _kernel() or not os.path.exists("/proc/self/stat"):
            return node in {"", _kernel()}, ""
        try:
            state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except OSError:
            return True, "dead"
        return True, {"Z": "dead", "X": "dead", "T": "frozen", "t": "frozen"}.get(state, "")

    def _look_up(self, key: str) -> str:
        """Return a key's value, empty if it is not set; a plain look-up would wait for the key."""
        return self.store.get(key).decode() if self.store.check([key]) else ""


def _kernel() -> str:
    """Identify the process-id namespace. Host names may be equal, and each container of a host numbers its own."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return platform.node()


def join_world(config: Configuration) -> World:
    """Join the process group that the environment describes, or make a group of this process only.

    Under plain torchrun the agent's store outlives the group. Its keys are prefixed by the restart count, since
    restarted ranks would otherwise read the addresses of dead ranks and hang (pytorch issue 135712).
    """
    device = _own_device(config.run.device)
    torch.set_num_threads(config.parallel.threads)
    if dist.is_initialized():
        given = c10d._get_default_store()  # noqa: SLF001 - the only way to the store of a given group
        store = c10d.PrefixStore(f"train-{next(_joined)}", given)  # a group may serve several runs in turn
        return World(dist.get_rank(), dist.get_world_size(), device, store, owned=False)
    timeout = timedelta(seconds=config.parallel.timeout_s)
    patience = max(timeout, START_PATIENCE)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    found: c10d.Store = dist.HashStore()  # type: ignore[attr-defined]
    if "RANK" in os.environ:
        try:
            found, rank, size = next(iter(rendezvous("env://", rank, size, timeout=patience)))
        except (RuntimeError, ValueError) as error:
            raise _no_group(rank, size, error) from error
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        found = c10d.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", found)
    found.set_timeout(patience)
    _form_group(device, found, rank, size, timeout, patience)
    return World(rank, size, device, found, owned=True)


def _own_device(asked: str) -> torch.device:
    """Return the device of this rank's model."""
    found = torch.cuda.device_count() if asked != "cpu" and torch.cuda.is_available() else 0
    number = int(os.environ.get("LOCAL_RANK", "0"))
    few = f"this machine has {found} CUDA devices: start at most {found} ranks on it, or take cpu"
    expect(
        (
            asked != "cuda" or found > 0,
            "run.device = 'cuda': torch finds no CUDA device here; take auto or cpu",
        ),
        (not found or number < found, f"run.device = {asked!r}: {few}"),
    )
    if not found:
        return torch.device("cpu")
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def _form_group(
    device: torch.device, store: c10d.Store, rank: int, size: int, timeout: timedelta, patience: timedelta
) -> None:
    """Make the process group; ranks may start ``patience`` apart, later collectives fail after ``timeout``."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
        dist.barrier()
    except RuntimeError as error:
        raise _no_group(rank, size, error) from error
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(timeout)


def _no_group(rank: int, size: int, error: Exception) -> RunError:
    reason = str(error).partition("\n")[0]
    return RunError(
        f"rank {rank} and the other ranks, {size} in all, did not form a group: one of them has ended while it started,"
        f" or cannot be reached; look for the first error above, then start the run again ({reason})"
    )


def leave_world(world: World) -> None:
    """Destroy the group that `join_world` made."""
    if world.owned and dist.is_initialized():
        dist.destroy_process_group()


# ---- requests to stop

RESTART = 75
"""Exit code (EX_TEMPFAIL) of a rank that saved and ended because another rank was asked to stop."""

LAUNCHER = "SHARDKIT_LAUNCHER"
"""Environment variable: process id of the command that started the rank."""


@contextmanager
def on_stop_signals(handler: Callable[[int, object], None], *, ending: bool = False) -> Iterator[None]:
    """Send SIGTERM, SIGINT and SIGHUP to ``handler`` inside the context; outside the main thread, do nothing.

    SIGHUP, which a terminal sends when it is closed, stays ignored under nohup.

    Args:
        handler: called with the signal's number and the frame.
        ending: ignore these signals afterwards. The process ends next, and its exit code must show how training ended.
    """
    main = threading.current_thread() is threading.main_thread()
    stops = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        stops.append(signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in stops if main}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, signal.SIG_IGN if ending else earlier)


class StopRequest:
    """A request to end this rank after the current step.

    A signal requests it. So does the death of the command that started the rank, since no other process can stop it.
    """

    def __init__(self) -> None:
        self._asked = threading.Event()
        launcher = int(os.environ.get(LAUNCHER, "0"))
        self.launcher = launcher if launcher == os.getppid() else 0  # 0: no command started this rank

    def ask(self, number: int = signal.SIGTERM, _frame: object = None) -> None:
        """Handle a signal; the second SIGINT interrupts at once."""
        if self._asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._asked.set()

    def is_set(self) -> bool:
        return self._asked.is_set() or bool(self.launcher and os.getppid() != self.launcher)
