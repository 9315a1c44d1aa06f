"""What a drill runs: a twentieth of its repetitions and some of its cases in `make test`, all in `make drills`.

``pytest.mark.drill(only=True)`` marks what `make drills` alone runs, because cheaper tests hold the same promises.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

__all__ = ["DRILLS", "drill_cases", "drill_count"]

DRILLS: Final = os.environ.get("SHARDKIT_DRILLS") == "full"
"""Whether `make drills` runs, which sets ``SHARDKIT_DRILLS=full``."""

Case = TypeVar("Case")


def drill_count(full: int) -> int:
    """Repetitions of a drill whose stated count is `full`.

    All but `make drills` runs a twentieth, at least one.
    """
    return full if DRILLS else max(1, full // 20)


def drill_cases(cases: Sequence[Case], few: Iterable[int]) -> list[Case]:
    """The cases of a slow drill: all of them in `make drills`, else those at the places `few`, in that order."""
    return list(cases) if DRILLS else [cases[place] for place in few]
