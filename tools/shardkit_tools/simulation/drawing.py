"""Pictures of simulations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardkit_tools.console import pyplot

__all__ = ["draw"]

_FIGURES = (
    ("egress_bytes", "egress per epoch, TB", 1e12),
    ("stall_s", "stall per epoch, s", 1.0),
    ("step_s", "seconds per step", 1.0),
    ("dollars", "dollars per epoch", 1.0),
)
_WAYS = (("lanes", "lanes, cache that knows the plan", "o-"), ("shuffle", "full shuffle, LRU", "s--"))


def draw(results: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Draw the last epoch of each result against its label; or, of a single one, all its epochs.

    Args:
        results: each with ``label``, ``lanes`` and perhaps ``shuffle``.
        title: of the picture.
        path: where it goes; the ending says which format.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    plt = pyplot("simulate")
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    for axis, (name, label, unit) in zip(axes.ravel(), _FIGURES, strict=True):
        for way, legend, style in _WAYS:
            places, values = _series(results, way, name)
            if values:
                axis.plot(places, [v / unit for v in values], style, label=legend)
        axis.set(title=label, xlabel="epoch" if len(results) == 1 else title.partition(":")[0])
        drawn = [v for line in axis.get_lines() for v in line.get_ydata() if v > 0]
        if name == "step_s" and drawn and max(drawn) > 30 * min(drawn):
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0, 0].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _series(results: Sequence[dict[str, Any]], way: str, name: str) -> tuple[list[str], list[float]]:
    if len(results) == 1:
        epochs = results[0].get(way, {}).get("epochs", [])
        return [str(i + 1) for i in range(len(epochs))], [float(one[name]) for one in epochs]
    found = [(one["label"], float(one[way]["epochs"][-1][name])) for one in results if way in one]
    return [label for label, _ in found], [value for _, value in found]
