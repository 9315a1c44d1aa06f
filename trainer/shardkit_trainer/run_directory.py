"""The run directory: run.json, events, metrics, a lock for one trainer, and the settings that later starts may change.

Does not import torch.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardkit.documents import sha256_digest
from shardkit.errors import ConfigurationError, IntegrityError, RunError, StateError
from shardkit.ledger import bind_configuration, bound_settings, setting_differences
from shardkit.stores.file_operations import explained
from shardkit.stores.local import check_vacant, open_store
from shardkit.stores.store import Store
from shardkit.telemetry.recorder import EventLog
from shardkit.telemetry.records import json_object, read_documents

from .configuration import Configuration, expect

if TYPE_CHECKING:
    from .distributed import World


def read_steps(run: Path) -> list[dict[str, Any]]:
    """Return one record for every step; for a step that was repeated after a failure, its last record."""
    records = read_documents(run / "metrics" / "train.jsonl")
    last = {record["step"]: record for record in records if "step" in record}
    return [last[step] for step in sorted(last)]


def has_taken_steps(run: Path) -> bool:
    """Return True if a step was recorded or a checkpoint saved."""
    return any((run / "checkpoints").glob("*.json")) or bool(read_steps(run))


class RunDirectory:
    """The folder of one run, which is also a store.

    Rank 0 opens it with ``lead=True``, takes the lock, and writes run.json, events and metrics.

    Raises:
        RunError: another process is training in the directory.
    """

    def __init__(self, location: str, *, lead: bool):
        expect(("://" not in location, f"run.directory = {location!r}: expected a local folder"))
        self.path = Path(location).absolute()
        self.store: Store = open_store(self.path)
        self._lock = -1
        self._events = EventLog(self.path if lead else None, rank=None)
        if lead:
            check_vacant(self.path, "run")
            with explained(f"train in run directory {self.path}", writing=True):
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock = self._take_lock()
                if not has_taken_steps(self.path):
                    self._set_aside()

    def _take_lock(self) -> int:
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        # The ranks of a killed command end with a delay; the kernel frees the lock when they are gone.
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

    def _set_aside(self) -> None:
        """Move the files of a start that failed before its first step into ``failed-starts``: they bind nothing."""
        if not (self.path / "run.json").exists():
            return
        folder = self.path / FAILED / f"{time.time_ns()}"
        folder.mkdir(parents=True)
        for name in ("run.json", "events.jsonl", "journal", "ledger", "metrics", "telemetry"):
            if (self.path / name).exists():
                (self.path / name).rename(folder / name)

    def manifest_of_run(self) -> dict[str, Any] | None:
        """Return run.json, or None before the first start."""
        return _run_record(self.path, manifest=str, plan=str)

    def begin(self, settings: Mapping[str, Any], manifest: str, plan: str, parts: Mapping[str, str]) -> None:
        """Write run.json at the first start; check later starts against it.

        Raises:
            IntegrityError: run.json is missing although the ledger records it.
            StateError: the run has another manifest or plan.
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
        """Append an event on rank 0; do nothing on other ranks."""
        self._events.record(kind, **details)

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def software() -> dict[str, str]:
    """Return the versions and CPU features on which results may depend."""
    import torch

    kernels = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
    host = {"python": platform.python_version(), "platform": sys.platform}
    return {"shardkit": metadata.version("shardkit"), **kernels, **host}


FAILED: Final = "failed-starts"
"""Folder of a run directory for the files of starts that failed before their first step."""

_FREE_SECTIONS: Final = ("checkpoint", "evaluation", "log")
_FREE: Final = {
    "run.directory", "run.steps", "run.epochs",
    "run.device", "data.dataset", "data.parts", "data.locations", "data.cache", "data.cache_size",
    "data.share", "data.device_prefetch",
    "parallel.strategy", "parallel.shard_ranks", "parallel.pass_samples", "parallel.activation_checkpointing",
    "parallel.compile", "parallel.assignment", "parallel.rebalance", "parallel.rebalance_every",
    "parallel.timeout_s", "parallel.shutdown_s",
}  # fmt: skip
"""Settings of location, speed and length, free to change. run.json pins the dataset's version in any location."""

OF_A_MACHINE: Final = frozenset({
    "run.directory", "run.device", "data.dataset", "data.locations", "data.cache", "data.cache_size", "log.listen",
})  # fmt: skip
"""Settings that may differ between the machines of a run."""


@dataclass(frozen=True)
class SettingChange:
    """A setting that differs from the previous start; ``guarded`` if it changes the data or the model."""

    key: str
    old: Any
    new: Any
    guarded: bool

    def __str__(self) -> str:
        return f"{self.key} {_text(self.old)} → {_text(self.new)}"


def check_changes(config: Configuration, allowed: Collection[str] = ()) -> list[SettingChange]:
    """Return the settings that differ from the previous start; empty if no step was taken.

    Raises:
        ConfigurationError: a guarded setting differs and is not in ``allowed``.
    """
    now = json.loads(json.dumps(config.to_json()))
    guarded = {f"{section}.{key}" for section, values in now.items() for key in values} - _free(config)
    for key in allowed:
        if key not in guarded:
            raise ConfigurationError(f"--allow-changes {key}: expected some of {', '.join(sorted(guarded))}")
    run = Path(config.run.directory)
    before = _known_settings(run) if has_taken_steps(run) else None
    if before is None:
        return []
    found = [
        SettingChange(key, old, new, key in guarded) for key, old, new in setting_differences(before, now)
    ]
    if any(one.guarded and one.key not in allowed for one in found):
        keys = ",".join(one.key for one in found if one.guarded)
        raise ConfigurationError(
            f"run.directory = {config.run.directory!r} was trained with other settings, which change its data or its "
            f"model: {', '.join(str(one) for one in found if one.guarded)}; take the old ones or another directory, or "
            f"go on with: --allow-changes {keys}"
        )
    return found


def record_changes(directory: RunDirectory, config: Configuration, changes: Sequence[SettingChange]) -> None:
    """Bind run.json and the settings of this start in the run's ledger, before the run consumes samples."""
    settings = config.to_json()
    if changes:
        directory.event("configuration", changed=[one.key for one in changes], configuration=settings)
    bind_configuration(
        directory.path, record=sha256_digest((directory.path / "run.json").read_bytes()), settings=settings,
        changed=[(one.key, one.old, one.new) for one in changes],
        allowed=[one.key for one in changes if one.guarded],
    )  # fmt: skip


def check_same(config: Configuration, world: World) -> None:
    """Refuse ranks that were started with other settings or software than rank 0; collective."""
    if world.size == 1:
        return
    names = ("shardkit", "torch", *(["cpu"] if config.parallel.exact != "off" else []))
    versions = {name: version for name, version in software().items() if name in names}
    first, *others = world.exchange({**config.to_json(), "software": versions})
    for rank, other in enumerate(others, 1):
        differing = [
            f"{key} = {theirs!r} (rank 0: {mine!r})"
            for key, mine, theirs in setting_differences(first, other)
            if key not in OF_A_MACHINE
        ]
        if differing:
            raise RunError(
                f"rank {rank} was started with {'; '.join(differing)}; start all machines with the same settings and"
                f" software; they may differ in {', '.join(sorted(OF_A_MACHINE))}"
            )


def _free(config: Configuration) -> set[str]:
    """Return the keys of settings that change neither the data nor the model."""
    found = set(_FREE) | {
        f"{section}.{key}" for section in _FREE_SECTIONS for key in vars(getattr(config, section))
    }
    if config.parallel.exact == "off":
        found.add("parallel.threads")
    return found


def _known_settings(run: Path) -> dict[str, Any] | None:
    """Return the settings of the previous start from the ledger, otherwise from run.json; None before the first."""
    bound = bound_settings(run)
    if bound is not None:
        return bound
    record = _run_record(run, configuration=dict)
    return None if record is None else dict(record["configuration"])


def _run_record(run: Path, **needed: type) -> dict[str, Any] | None:
    """Return run.json, or None before the first start."""
    path = run / "run.json"
    if not path.exists():
        return None
    found = json_object(path.read_bytes())
    if found is None or not all(isinstance(found.get(one), kind) for one, kind in needed.items()):
        raise StateError(
            f"{path} is damaged: it does not say with which {' and '.join(needed)} the run was begun; put it back from"
            " a copy of the run directory, or train in a new one"
        )
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)
