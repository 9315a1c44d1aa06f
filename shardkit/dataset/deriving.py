"""Versions that reuse the shards of others: several as one (SPEC.md §11), other look-ups, costs, other words."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from shardkit.dataset.about import About, check_strata, given_about
from shardkit.dataset.committing import Moved, move_refs, standing_refs
from shardkit.dataset.costs import covers, parse_costs, put_costs
from shardkit.dataset.dataset import Dataset, open_dataset
from shardkit.dataset.lookups import parse_lookup, put_lookups
from shardkit.errors import UsageError
from shardkit.manifest import Manifest
from shardkit.repository.repository import Repository
from shardkit.repository.versions import put_location, put_manifest


def merge_datasets(
    parts: Mapping[str, str | os.PathLike[str]],
    root: str | os.PathLike[str],
    *,
    ref: str = "main",
    message: str = "",
    author: str = "",
) -> tuple[Manifest, Moved]:
    """Commit a version of ``root`` whose shards are those of the parts, in the order given.

    Merging the same parts again moves nothing but what the root remembers of where they lie: that is how a
    part that has moved is found again.

    Args:
        parts: name → ``ROOT[@REF]``; the name becomes the first axis of the strata.
        root: made if it is not there; may be one that holds parts.
        ref: that is moved to the merged version.
        message: of the commit.
        author: of the commit.

    Returns:
        The manifest, and what the commit did.

    Raises:
        NotFoundError: a part is not there.
        SchemaError: the parts have different schemas.
        UsageError: a part is merged itself, or a name is no name.
        StoreError, CommitConflict: the root refused.
    """
    if not parts:
        raise UsageError("merge: no parts; name at least one dataset")
    merged = open_dataset(parts)  # opens and checks every part, down to its last column
    repository = Repository.create(root)
    expected = standing_refs(repository, [ref])
    for part in merged.version.parts:
        put_location(repository, part.name, part.manifest.id, part.repository)
    put_manifest(repository, merged.manifest, [])
    said = message or f"merge {', '.join(parts)}"
    moved = move_refs(repository, {ref: merged.manifest.id}, expected, message=said, author=author)
    return merged.manifest, moved


def relabel(
    repository: Repository,
    dataset: Dataset,
    *,
    about: About | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    lookup: str | Sequence[str] | None = None,
    cost: str | Sequence[str] | None = None,
) -> Manifest:
    """Put a manifest of the same shards with other look-ups, costs or another about; what is not given stays.

    Args:
        repository: of the dataset, open for writing.
        dataset: not merged.
        about: see `shardkit.create`.
        lookup: fields; sidecars that are there are taken over, others made by reading the shards back.
        cost: expressions; costs that are there are taken over, others made from indexes or shards.

    Raises:
        UsageError: the dataset is merged, a field cannot be looked up, or an expression is no cost.
        ConfigurationError: the about speaks of strata that are not there.
    """
    manifest = dataset.manifest
    if manifest.parts:
        raise UsageError(
            "a merged dataset takes look-ups, costs and about from its parts; change those, then merge again"
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
    if cost is not None:
        texts = parse_costs(cost, manifest.schema) if cost else ()
        rows = dataset.table.rows
        known = {found.expression: found for found in manifest.costs if covers(found, rows)}
        wanted = [text for text in texts if text not in known]
        made = put_costs(repository, dataset.reader, dataset.table, manifest.schema, wanted)
        known |= {found.expression: found for found in made}
        new = dataclasses.replace(new, costs=tuple(known[text] for text in texts))
    if new == manifest:
        return manifest
    new = dataclasses.replace(new, parent=manifest.id)
    put_manifest(repository, new, [])
    return new
