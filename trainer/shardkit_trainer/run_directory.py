"""The run directory (DESIGN §7.3): run.json once, events and metrics line by line, one trainer at a time."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from shardkit.errors import IntegrityError, RunError, StateError
from shardkit.ledger import bound_settings
from shardkit.stores.store import Store
from shardkit.stores.urls import open_store

from .configuration import expect

__all__ = ["Lines", "RunDirectory", "read_lines", "read_steps"]


class Lines:
    """A JSON-lines file that survives kills: one write per line, and a torn last line is closed on opening."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")

    def write(self, record: Mapping[str, object]) -> None:
        """Append one record."""
        os.write(self._descriptor, json.dumps(record, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file; lines that a kill has torn are left out."""
    records = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError, RecursionError):
            records.append(json.loads(line))
    return records


def read_steps(run: Path) -> list[dict[str, Any]]:
    """The record of every step, each once: steps that were taken again after a loss count as they were taken last."""
    records = read_lines(run / "metrics" / "train.jsonl")
    last = {record["step"]: record for record in records if "step" in record}
    return [last[step] for step in sorted(last)]


class RunDirectory:
    """One run's folder, itself a store.

    Rank 0 opens it with ``lead=True``: it takes the lock, writes run.json, events and metrics.
    """

    def __init__(self, location: str, *, lead: bool):
        expect(("://" not in location, f"run.directory = {location!r}: expected a local folder"))
        self.path = Path(location).absolute()
        self.store: Store = open_store(self.path)
        self._lock = -1
        self._events: Lines | None = None
        if lead:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock()
            self._events = Lines(self.path / "events.jsonl")

    def _take_lock(self) -> int:
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        # A killed predecessor's orphans need a moment to notice; the kernel frees the lock when they are gone.
        for _ in range(100):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
                return descriptor
            except BlockingIOError:
                time.sleep(0.1)
        holder = os.pread(descriptor, 32, 0).decode(errors="replace")
        os.close(descriptor)
        advice = "stop it or choose another one"
        raise RunError(f"run directory {self.path}: process {holder} is training in it; {advice}")

    def manifest_of_run(self) -> dict[str, Any] | None:
        """run.json, None before the first start.

        Raises:
            StateError: it is damaged.
        """
        path = self.path / "run.json"
        if not path.exists():
            return None
        try:
            found = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not all(
            isinstance(found.get(key), str) for key in ("manifest", "plan")
        ):
            raise StateError(
                f"{path} is damaged: it does not say on which manifest and plan the run was begun; put it back from a "
                "copy of the run directory, or train in a new one"
            )
        return found

    def begin(self, settings: Mapping[str, Any], manifest: str, plan: str, parts: Mapping[str, str]) -> None:
        """Write run.json at the first start; check later ones against it.

        Args:
            settings: the resolved configuration.
            manifest: of the dataset.
            plan: digest, before any stage changes it.
            parts: where several datasets are one: the URL of each, at its version.

        Raises:
            StateError: the directory belongs to another dataset version or plan.
            IntegrityError: run.json is gone.
        """
        known = self.manifest_of_run()
        if known is None:
            record: dict[str, Any] = {
                "format": "shardkit-run", "version": 1, "configuration": settings, "manifest": manifest, "plan": plan,
                "software": software(), "started": time.time(), **({"parts": parts} if parts else {}),
            }  # fmt: skip
            if bound_settings(self.path) is not None:
                raise IntegrityError(
                    f"{self.path}/run.json is gone; the ledger records it: restore it from a copy"
                )
            self.store.put_new("run.json", json.dumps(record, indent=1, sort_keys=True).encode() + b"\n")
        elif (known["manifest"], known["plan"]) != (manifest, plan):
            raise StateError(
                f"run directory {self.path} belongs to manifest {known['manifest']}, plan {known['plan']};"
                f" this run has manifest {manifest}, plan {plan}; use another run.directory or the old settings"
            )

    def event(self, kind: str, **details: object) -> None:
        """Append an event; nothing where this rank does not lead."""
        if self._events is not None:
            self._events.write({"time": round(time.time(), 3), "event": kind, **details})

    def close(self) -> None:
        """Free the lock."""
        if self._events is not None:
            self._events.close()
            os.close(self._lock)
            self._events = None


def software() -> dict[str, str]:
    """Versions that a result may depend on."""
    import torch

    kernels = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
    host = {"python": platform.python_version(), "platform": sys.platform}
    return {"shardkit": metadata.version("shardkit"), **kernels, **host}
