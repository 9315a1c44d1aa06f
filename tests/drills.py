"""How many repetitions a fault drill runs: a twentieth in `make test`, all of them in `make drills`."""

from __future__ import annotations

import os

__all__ = ["drill_count"]


def drill_count(full: int) -> int:
    """Repetitions of a drill whose stated count is `full`.

    `make drills` sets ``SHARDKIT_DRILLS=full``; everything else runs a twentieth, at least one.
    """
    return full if os.environ.get("SHARDKIT_DRILLS") == "full" else max(1, full // 20)
