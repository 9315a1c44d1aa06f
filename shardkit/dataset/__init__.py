"""Datasets for users: `create` writes a version, `open` reads one.

`open` and `create` are the public interface; every way to make a version ends in one commit.
Layout and splits are pure functions.
The plan decides which rank reads which sample at which step.
SPEC.md defines the layout rules and lists what decides the manifest id.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardkit.dataset.creating import Writer, create
    from shardkit.dataset.dataset import Dataset
    from shardkit.dataset.opening import open_dataset
    from shardkit.dataset.parts import commit_parts, list_parts

__all__ = ["Dataset", "Writer", "commit_parts", "create", "list_parts", "open_dataset"]

# imported lazily: readers do not pay for the imports of the writers
_MODULES = {
    "Dataset": "dataset",
    "Writer": "creating",
    "commit_parts": "parts",
    "create": "creating",
    "list_parts": "parts",
    "open_dataset": "opening",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
