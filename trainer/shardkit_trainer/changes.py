"""A run that goes on with other settings: what differs, and what of it nobody may change by accident; no torch here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shardkit.errors import ConfigurationError
from shardkit.formats.digest import sha256_digest
from shardkit.ledger import bind_configuration, bound_settings, setting_differences

from .configuration import Configuration
from .run_directory import RunDirectory, read_lines

__all__ = ["Change", "check_changes", "record_changes"]

_FREE_SECTIONS: Final = ("checkpoint", "evaluation", "log")
_FREE: Final = {
    "run.directory", "run.device", "data.dataset", "data.parts", "data.locations", "data.cache", "data.cache_size",
    "parallel.strategy", "parallel.shard_ranks", "parallel.pass_samples", "parallel.activation_checkpointing",
    "parallel.compile", "parallel.rebalance", "parallel.rebalance_every", "parallel.recovery", "parallel.timeout_s",
    "parallel.shutdown_s",
}  # fmt: skip
"""What says where and how fast. (The dataset's version is pinned by run.json, wherever the dataset lies.)"""


@dataclass(frozen=True)
class Change:
    """A setting that is not what the run had before; ``guarded`` where it changes the data or the model."""

    key: str
    old: Any
    new: Any
    guarded: bool

    def __str__(self) -> str:
        return f"{self.key} {_text(self.old)} → {_text(self.new)}"


def check_changes(config: Configuration, allowed: Collection[str] = ()) -> list[Change]:
    """What differs from the settings that the run of this directory went on with last.

    Args:
        config: of this start.
        allowed: keys that may change although the data or the model change with them.

    Raises:
        ConfigurationError: another key than those changes the data or the model; a key of ``allowed`` is unknown.
    """
    now = _as_stored(config)
    guarded = {f"{section}.{key}" for section, values in now.items() for key in values} - _free(config)
    for key in allowed:
        if key not in guarded:
            raise ConfigurationError(f"--allow-changes {key}: expected some of {', '.join(sorted(guarded))}")
    before = _known_settings(Path(config.run.directory))
    if before is None:
        return []
    # settings that a later version brought were what they are by default; those that went away say nothing
    defaults = _as_stored(config, default=True)
    merged = {section: {key: before.get(section, {}).get(key, defaults[section][key]) for key in values}
              for section, values in now.items()}  # fmt: skip
    found = [Change(key, old, new, key in guarded) for key, old, new in setting_differences(merged, now)]
    if any(one.guarded and one.key not in allowed for one in found):
        keys = ",".join(one.key for one in found if one.guarded)
        raise ConfigurationError(
            f"run.directory = {config.run.directory!r} was trained with other settings, which change its data or its "
            f"model: {', '.join(str(one) for one in found if one.guarded)}; take the old ones or another directory, or "
            f"go on with: --allow-changes {keys}"
        )
    return found


def record_changes(directory: RunDirectory, config: Configuration, changes: Sequence[Change]) -> None:
    """Bind run.json and the settings of this start in the run's ledger, before it consumes anything.

    Raises:
        IntegrityError: run.json is not the one that the ledger records.
    """
    settings = config.to_json()
    if changes:
        directory.event("configuration", changed=[one.key for one in changes], configuration=settings)
    bind_configuration(
        directory.path, record=sha256_digest((directory.path / "run.json").read_bytes()), settings=settings,
        changed=[(one.key, one.old, one.new) for one in changes],
        allowed=[one.key for one in changes if one.guarded],
    )  # fmt: skip


def _free(config: Configuration) -> set[str]:
    """The keys that change neither the data nor the model."""
    found = set(_FREE) | {
        f"{section}.{key}" for section in _FREE_SECTIONS for key in vars(getattr(config, section))
    }
    if config.schedule.kind == "constant":
        found |= {"run.steps", "run.epochs"}  # else the rate of every step follows from how many there are
    if config.parallel.exact == "off":
        found.add("parallel.threads")
    return found


def _as_stored(config: Configuration, *, default: bool = False) -> dict[str, Any]:
    """The settings as run.json has them; or what they all are by default."""
    sections = {one.name: getattr(config, one.name) for one in dataclasses.fields(config)}
    chosen = {name: type(section)() if default else section for name, section in sections.items()}
    stored: dict[str, Any] = json.loads(json.dumps({n: dataclasses.asdict(one) for n, one in chosen.items()}))
    return stored


def _known_settings(run: Path) -> dict[str, Any] | None:
    """As the ledger binds them; runs of 0.1 have them in their log, and before any change in run.json alone."""
    bound = bound_settings(run)
    if bound is not None:
        return bound
    logged = [one for one in read_lines(run / "events.jsonl") if one.get("event") == "configuration"]
    if logged:
        return dict(logged[-1]["configuration"])
    try:
        return dict(json.loads((run / "run.json").read_text(encoding="utf-8"))["configuration"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{run / 'run.json'} is damaged ({error}); restore it from a copy"
        ) from error


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)
