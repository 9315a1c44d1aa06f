"""Datasets as users hold them: written with `create`, read with `open`.

`open` and `create` are the public face; every way to make a version ends in one commit. Layout and splits are pure.
Who reads which sample when is the plan's business. SPEC.md says the layout rules and what decides the manifest id.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardkit.dataset.creating import Writer, create
    from shardkit.dataset.dataset import Dataset, open_dataset
    from shardkit.dataset.parts import commit_parts, list_parts

__all__ = ["Dataset", "Writer", "commit_parts", "create", "list_parts", "open_dataset"]

# who reads does not wait until what writes is imported
_MODULES = {
    "Dataset": "dataset",
    "Writer": "creating",
    "commit_parts": "parts",
    "create": "creating",
    "list_parts": "parts",
    "open_dataset": "dataset",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
