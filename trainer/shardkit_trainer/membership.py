"""Which processes are the ranks of a job: numbered groups, agreed on in the store of its first supervisor (SPEC.md §5).

Keys of the store:

    generation, members/<g>     number of the newest group; its processes in rank order
    formed/<g>, accused/<g>     its process group stands; ranks of it that do not answer
    ready/<name>                a process that can join
    leaving/<name>              one that was asked to leave
    processes                   names given so far
    news, news/<n>, answer/<n>  what supervisors and commands tell the first supervisor, and what it says to that
    host/<id>                   heartbeat of a supervisor
    job, lanes                  what rank 0 writes to job.json; the most ranks that a job can have
    stopping, finished          every rank shall save and end; the run has ended, and the processes of its last group
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from shardkit.errors import RunError

ADDRESS = "SHARDKIT_SUPERVISOR"
"""Environment variable: host:port of the job's store."""

NAME = "SHARDKIT_MEMBER"
"""Environment variable: this process among those of the job."""

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable of gloo: the network interface that ranks reach each other by."""


CONNECT_S = 10.0
"""What a command waits for a job to answer."""


class Left(Exception):
    """This process was asked to leave the job, and the others have gone on without it."""


def serve_store(timeout_s: float) -> Store:
    """A store that other processes and machines can connect to; it lives as long as this process."""
    served: Any = dist.TCPStore  # type: ignore[attr-defined]
    timeout = timedelta(seconds=timeout_s)
    store: Store = served("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    return store


def connect(address: str, timeout_s: float) -> Store:
    """The store at host:port.

    Raises:
        RunError: nobody answers.
    """
    host, _, port = address.rpartition(":")
    timeout = timedelta(seconds=timeout_s)
    try:
        store: Store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    except (dist.DistError, ValueError) as error:
        raise RunError(
            f"nobody answers at {address}: the job there has ended, or this machine cannot reach it"
            f" ({str(error).splitlines()[0]})"
        ) from error
    return store


def own_place(toward: str = "") -> tuple[str, str]:
    """(network interface, its IPv4 address): what others reach this machine by.

    That of ``GLOO_SOCKET_IFNAME`` where it is set, else the one that leads to the address ``toward``, or outside; the
    name is empty where it cannot be told.
    """
    known = _interfaces()
    if name := os.environ.get(INTERFACE, "").split(",")[0]:
        return name, known.get(name, "127.0.0.1")
    address = next((one for one in known.values() if not one.startswith("127.")), "127.0.0.1")
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect((toward or "203.0.113.1", 9))  # nothing is sent: the kernel looks up the route
        address = asked.getsockname()[0]
    return next((name for name, one in known.items() if one == address), ""), address


def _interfaces() -> dict[str, str]:
    found: dict[str, str] = {}
    if sys.platform == "linux":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            for _, name in socket.if_nameindex():
                with suppress(OSError):
                    answer = fcntl.ioctl(asked, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                    found[name] = socket.inet_ntoa(answer[20:24])
    return found


def publish(store: Store, generation: int, members: list[str]) -> None:
    """First supervisor: make ``members`` the ranks; the number is set last."""
    store.set(f"members/{generation}", json.dumps(members))
    store.set("generation", str(generation))


def members_of(store: Store, generation: int) -> list[str]:
    """Processes of a group, in rank order."""
    members: list[str] = json.loads(store.get(f"members/{generation}"))
    return members


def tell(store: Store, news: dict[str, Any]) -> int:
    """Tell the first supervisor something; returns its number, under which an answer may come."""
    number: int = store.add("news", 1)
    store.set(f"news/{number}", json.dumps(news))
    return number


@dataclass
class Membership:
    """One rank's view of the job's store."""

    store: Store
    name: str
    patience_s: float

    @classmethod
    def from_environment(cls, patience_s: float) -> Membership:
        """In the job whose supervisor started this process."""
        store = connect(os.environ[ADDRESS], patience_s)
        store.set(f"ready/{os.environ[NAME]}", "1")
        return cls(store, os.environ[NAME], patience_s)

    def newest(self) -> int:
        """The newest generation.

        Raises:
            RunError: the supervisor does not answer.
        """
        try:
            return int(self.store.get("generation"))
        except dist.DistError as error:
            raise RunError(
                f"{self.name}: the supervisor does not answer any more; start the run again: it goes on from its"
                f" newest checkpoint ({str(error).splitlines()[0]})"
            ) from error

    def change_after(self, generation: int) -> int:
        """0: the group is the newest; 1: it is not; 2: nor that, and ranks of it were asked to leave."""
        if self.newest() == generation:
            return 0
        asked = [f"leaving/{name}" for name in members_of(self.store, generation)]
        return 2 if any(self.store.check([key]) for key in asked) else 1

    def accuse(self, generation: int, ranks: list[int]) -> None:
        """Say which ranks of a group do not answer: their supervisor kills them."""
        members = members_of(self.store, generation)
        self.store.set(f"accused/{generation}", " ".join(members[rank] for rank in ranks))

    def wait_after(self, after: int) -> tuple[int, int, int]:
        """(generation, rank, size) of the first newer generation that this process is a member of.

        Raises:
            Left: it was asked to leave.
            RunError: none comes in time.
        """
        deadline = time.monotonic() + self.patience_s
        while time.monotonic() < deadline:
            generation = self.newest()
            if generation > after:
                members = members_of(self.store, generation)
                if self.name in members:
                    return generation, members.index(self.name), len(members)
                if self.store.check([f"leaving/{self.name}"]):
                    raise Left
            time.sleep(0.005)
        raise RunError(
            f"process {self.name} waited {self.patience_s} s for a group of ranks after number {after}; the supervisor"
            " has not formed one: look at its output, or restart the run: it goes on from its newest checkpoint"
        )
