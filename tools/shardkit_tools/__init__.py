"""The `shardkit` command, its importers, and the build engine as a function: `shardkit_tools.build`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardkit_tools.building.build_run import build
    from shardkit_tools.building.outcome import BuildResult

__all__ = ["BuildResult", "build"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # imported when asked for: `shardkit --help` needs neither numpy nor pyarrow
        from shardkit_tools.building import build_run

        return getattr(build_run, name)
    raise AttributeError(f"module 'shardkit_tools' has no attribute {name!r}")
