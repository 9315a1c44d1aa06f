"""Datasets as users hold them: written with `create`, read with `open`.

::

    opening        from a URL to a dataset; several as one
    dataset        views, plans, loaders
    samples        the samples of a version as Python values; tables: as Arrow
    sample_numbers   which of them a caller means
    version_settings  what every way to make a version takes alike
    creating       the writer: samples in, one version out
    version_writing  from rows to a committed version, in one process
    part_files     named parts, durable until they are committed
    parts          many writers, one commit
    layout         which row goes to which shard, segment and block (pure)
    row_table      rows as columns: identity, stratum, size, order
    scratch        encoded rows on disk until the layout is known
    scratch_parts  and how they are read back
    shard_writing  one shard from its rows
    committing     manifest, pages and the commit
    splits         train and val by keyed hash
    selecting      versions of the same bytes with fewer rows
    removing       versions without some samples
    erasing        … and their bytes; copies finds them, rewriting makes what replaces them
    erasure_journal  what a killed erasure goes on from, and its report
    store_survey   what a repository holds, named or not
    merging        several datasets as one version
    relabelling    other look-ups or words over the same shards
    lookups        samples by value, from sorted hashes
    about          licence, source and contact
    croissant      a version in the words of MLCommons Croissant
    where          conditions over fields
    population     what the plan needs to know
    sizes          "256MiB"

SPEC.md says the layout rules and what decides the manifest id.
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

# who reads does not wait until what writes is imported
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
