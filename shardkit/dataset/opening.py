"""`shardkit.open`: from what a user types to a dataset."""

from __future__ import annotations

import os
from collections.abc import Mapping

from shardkit.dataset.dataset import Dataset
from shardkit.errors import FormatError, UsageError
from shardkit.formats import Verify
from shardkit.manifest import ShardTable, check_against, merge
from shardkit.reading.locating import Locations
from shardkit.reading.read_path import ReadSettings
from shardkit.repository.catalog import Part, Version, load_manifest
from shardkit.repository.repository import Repository
from shardkit.stores.urls import parse_dataset_url

__all__ = ["open_dataset"]

Url = str | os.PathLike[str]


def open_dataset(
    url: Url | Mapping[str, Url],
    *,
    verify: Verify = "fast",
    locations: Locations | None = None,
    settings: ReadSettings | None = None,
    heal: bool = False,
) -> Dataset:
    """Open one version of a dataset; or several datasets as one.

    Args:
        url: ``"data/cats"`` (its ref `main`), ``"data/cats@val"`` (a ref or tag), ``"data/cats@sha256:…"`` (a
            manifest). A mapping such as ``{"web": "a/web@v3", "code": "data/code"}`` opens several as one: their
            samples follow each other, and the name is the first axis of the strata ("web/de").
        verify: "fast" checks XXH3 of every block that is read, "strong" SHA-256. There is no "off". What comes over a
            network is always checked by SHA-256.
        locations: further copies of the objects, name → URL, nearest first (``{"mirror": "s3://other/cats"}``), or
            caches of neighbours (``http://host:port``); reads go on over them when the root is slow, wrong or gone.
        settings: deadlines, concurrency and hedging of reads over a network.
        heal: put good bytes over bad copies that are met; needs the right to write them.

    Raises:
        NotFoundError: there is no dataset, ref or manifest of that name.
        IntegrityError: the manifest or a page is damaged.
        SchemaError: several datasets of different schemas.
    """
    if isinstance(url, Mapping):
        if locations:
            raise UsageError(
                "locations belong to one root; open the datasets one by one, or merge them first"
            )
        return Dataset(_open_parts(url, settings), verify=verify)
    return Dataset(_open_version(url, locations, settings, heal=heal), verify=verify)


def _open_version(
    url: Url, locations: Locations | None, settings: ReadSettings | None, *, heal: bool = False
) -> Version:
    root, ref = parse_dataset_url(url)
    repository = Repository.open(root, read_only=True, locations=locations, settings=settings, heal=heal)
    return load_manifest(repository, repository.resolve(ref))


def _open_parts(urls: Mapping[str, Url], settings: ReadSettings | None) -> Version:
    versions = {name: _open_version(url, None, settings) for name, url in urls.items()}
    manifest = merge([(name, version.manifest) for name, version in versions.items()])
    parts: list[Part] = []
    stratum_offsets: list[int] = []
    first_shard = first_stratum = 0
    for name, version in versions.items():
        if len(version.parts) != 1:
            raise FormatError(f"part {name!r} is merged itself; name its parts instead")
        parts.append(Part(name, version.parts[0].repository, version.manifest, first_shard))
        stratum_offsets.append(first_stratum)
        first_shard += version.manifest.shards
        first_stratum += len(version.manifest.strata)
    table = ShardTable.concatenate([v.table for v in versions.values()], stratum_offsets=stratum_offsets)
    check_against(manifest, table)
    return Version(manifest, table, tuple(parts))
