"""The `shardkit` command, and as functions: `shardkit_tools.build` and `shardkit_tools.adopt`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardkit_tools.adopting.adoption import Adoption, adopt
    from shardkit_tools.building.build_run import build
    from shardkit_tools.building.outcome import BuildResult

__all__ = ["Adoption", "BuildResult", "adopt", "build"]

_MODULES = {
    "Adoption": "shardkit_tools.adopting.adoption",
    "BuildResult": "shardkit_tools.building.build_run",
    "adopt": "shardkit_tools.adopting.adoption",
    "build": "shardkit_tools.building.build_run",
}


def __getattr__(name: str) -> Any:
    if name in __all__:  # imported when asked for: `shardkit --help` needs neither numpy nor pyarrow
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'shardkit_tools' has no attribute {name!r}")
