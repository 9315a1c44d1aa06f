"""The same shards under another root: other look-ups, or other words about them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from shardkit.dataset.about import About, check_strata, given_about
from shardkit.dataset.dataset import Dataset
from shardkit.dataset.lookups import parse_lookup, put_lookups
from shardkit.errors import UsageError
from shardkit.manifest import Manifest
from shardkit.repository.catalog import put_manifest
from shardkit.repository.repository import Repository

__all__ = ["relabel"]


def relabel(
    repository: Repository,
    dataset: Dataset,
    *,
    about: About | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    lookup: str | Sequence[str] | None = None,
) -> Manifest:
    """Put a manifest of the same shards with other look-ups or another about; what is not given stays.

    Args:
        repository: of the dataset, open for writing.
        dataset: not merged.
        about: see `shardkit.create`.
        lookup: fields; sidecars that are there are taken over, others made by reading the shards back.

    Raises:
        UsageError: the dataset is merged, or a field cannot be looked up.
        ConfigurationError: the about speaks of strata that are not there.
    """
    manifest = dataset.manifest
    if manifest.parts:
        raise UsageError(
            "a merged dataset takes look-ups and about from its parts; change those, then merge again"
        )
    new = manifest
    if about is not None:
        said = given_about(about)
        assert said is not None
        check_strata(said, {stratum.name for stratum in manifest.strata if not stratum.pooled})
        new = dataclasses.replace(new, about=repository.put_object(said.to_bytes(), "about").digest)
    if lookup is not None:
        fields = parse_lookup(lookup, manifest.schema) if lookup else ()
        held = {found.field: found for found in manifest.lookups}
        missing = [field for field in fields if field not in held]
        held |= {
            found.field: found for found in put_lookups(repository, dataset.reader, dataset.table, missing)
        }
        new = dataclasses.replace(new, lookups=tuple(held[field] for field in fields))
    if new == manifest:
        return manifest
    new = dataclasses.replace(new, parent=manifest.id)
    put_manifest(repository, new, [])
    return new
