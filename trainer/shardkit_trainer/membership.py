"""Which processes are the ranks of a run, generation by generation: the words between supervisor and ranks.

The supervisor's store holds ``generation`` (the newest number), ``members/<generation>`` (process names in rank order,
as JSON), ``formed/<generation>`` (set once its process group stands), ``accused/<generation>`` (names that do not
answer) and ``ready/<name>`` (set by a process that can join).
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardkit.errors import RunError

__all__ = ["ADDRESS", "NAME", "Membership", "publish"]

ADDRESS = "SHARDKIT_SUPERVISOR"
"""Environment variable: host:port of the supervisor's store."""

NAME = "SHARDKIT_MEMBER"
"""Environment variable: this process among those of the supervisor."""


def publish(store: c10d.Store, generation: int, members: list[str]) -> None:
    """Supervisor: make ``members`` the ranks; the number is set last."""
    store.set(f"members/{generation}", json.dumps(members))
    store.set("generation", str(generation))


@dataclass
class Membership:
    """One process's view of the supervisor's store."""

    store: c10d.Store
    name: str
    patience_s: float

    @classmethod
    def from_environment(cls, patience_s: float) -> Membership | None:
        """The supervisor that started this process, None without one."""
        if ADDRESS not in os.environ:
            return None
        host, _, port = os.environ[ADDRESS].rpartition(":")
        timeout = timedelta(seconds=patience_s)
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)  # type: ignore[attr-defined]
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

    def accuse(self, generation: int, ranks: list[int]) -> None:
        """Tell the supervisor which ranks of a group do not answer."""
        members = json.loads(self.store.get(f"members/{generation}"))
        self.store.set(f"accused/{generation}", " ".join(members[rank] for rank in ranks))

    def wait_after(self, after: int) -> tuple[int, int, int]:
        """(generation, rank, size) of the first newer generation that this process is a member of.

        Raises:
            RunError: none comes in time.
        """
        deadline = time.monotonic() + self.patience_s
        while time.monotonic() < deadline:
            generation = self.newest()
            if generation > after:
                members = json.loads(self.store.get(f"members/{generation}"))
                if self.name in members:
                    return generation, members.index(self.name), len(members)
            time.sleep(0.005)
        raise RunError(
            f"process {self.name} waited {self.patience_s} s for a group of ranks after number {after}; the supervisor"
            " has not formed one: look at its output, or restart the run: it goes on from its newest checkpoint"
        )
