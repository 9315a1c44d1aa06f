"""Growing a version: new rows in new shards behind those that are there, whose pages stay as they are (SPEC.md §7)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardkit.dataset.encoding import key_identity
from shardkit.dataset.splits import Split
from shardkit.dataset.version_settings import NewVersion
from shardkit.errors import UsageError
from shardkit.formats import ShardIndex
from shardkit.manifest import Manifest
from shardkit.repository.repository import Repository
from shardkit.repository.versions import Version, load_manifest


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """The version that rows are appended to."""

    ref: str  # by which it is named
    version: Version
    keys: NDArray[np.uint64]  # (rows, 2) the identities of its keys, for the search for duplicates
    row_strata: Mapping[int, NDArray[np.int32]]  # shard → own strata of its rows, where some are pooled
    splits: Mapping[str, Version]  # split → its version over the same shards

    @property
    def manifest(self) -> Manifest:
        return self.version.manifest

    @property
    def first_ordinal(self) -> int:
        """Of the rows that are appended: rows that were erased have had ordinals, and so keys, of their own."""
        return self.manifest.rows + int(self.manifest.build.get("erased", 0))

    @property
    def expected(self) -> dict[str, str | None]:
        """Where the refs must still stand when the longer version is committed."""
        refs: dict[str, str | None] = {name: split.manifest.id for name, split in self.splits.items()}
        return {**refs, self.ref: self.manifest.id}


def load_base(repository: Repository, ref: str, new: NewVersion) -> Base:
    """Load what a new version is appended to, and check that it is of the same kind.

    Every index is read, for the keys: about 100 bytes per row.

    Raises:
        NotFoundError: there is no such ref.
        UsageError: schema, format, compression, axes of strata, class names, splits, look-ups or costs differ.
    """
    version = load_manifest(repository, repository.resolve(ref))
    manifest = version.manifest
    if manifest.parts:
        raise UsageError(f"{ref} is merged from other datasets; append to one of its parts, then merge again")
    for what, found, given in (
        ("schema", manifest.schema.to_json(), new.schema.to_json()),
        ("format", manifest.format, new.format),
        ("compression", manifest.compression, new.compression),
        ("stratify", list(manifest.axes), list(new.axes)),
        ("classes", list(manifest.classes), list(new.classes)),
    ):
        if found != given:
            raise UsageError(
                f"cannot append to {ref}: its {what} is {found}, that of the new rows {given}; append rows of the "
                "same kind, or build a dataset of their own"
            )
    for what, wanted, held in (
        ("lookups of", new.lookups, tuple(lookup.field for lookup in manifest.lookups)),
        ("costs", new.costs, tuple(one.expression for one in manifest.costs)),
    ):
        if wanted and wanted != held:
            raise UsageError(
                f"cannot append to {ref} with {what} {', '.join(wanted)}: it has {', '.join(held) or 'none'}; leave "
                "them out, or rebuild it with others first"
            )
    keys = []
    row_strata = {}
    for shard in range(len(version.table)):
        digest, size = version.table.index_digest_text(shard), int(version.table.index_size[shard])
        index = ShardIndex.from_bytes(repository.get_object(digest, "index", size))
        keys += [key_identity(key) for key in index.keys()]  # noqa: SIM118 (an index is no dict)
        if index.row_stratum is not None:
            row_strata[shard] = index.row_stratum
    return Base(
        ref=ref,
        version=version,
        keys=np.array(keys, dtype=np.uint64).reshape(-1, 2),
        row_strata=row_strata,
        splits=_splits(repository, version, new.split),
    )


def _splits(repository: Repository, version: Version, split: Split | None) -> dict[str, Version]:
    if split is None:
        return {}
    splits = {}
    for name in split.names:
        found = load_manifest(repository, repository.resolve(name))
        noted = {**split.to_json(), "name": name}
        if found.manifest.build.get("split") != noted or not np.array_equal(
            found.table.digest, version.table.digest
        ):
            raise UsageError(
                f"cannot append with this split: the ref {name!r} is not this share of the same version; give the "
                "shares and the field that it was built with, or append without --split"
            )
        splits[name] = found
    return splits
