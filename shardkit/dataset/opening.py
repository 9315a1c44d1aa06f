"""`shardkit.open`: open one version of a dataset, or several datasets as one."""

from __future__ import annotations

import os
from collections.abc import Mapping

from shardkit.dataset.dataset import Dataset
from shardkit.errors import FormatError, UsageError
from shardkit.manifest import merge
from shardkit.reading.blocks import VerifySetting
from shardkit.reading.located_store import Locations
from shardkit.reading.read_path import ReadSettings
from shardkit.repository.log import parse_dataset_url
from shardkit.repository.repository import Repository
from shardkit.repository.versions import Version, load_manifest, merged_version

Url = str | os.PathLike[str]


def open_dataset(
    url: Url | Mapping[str, Url],
    *,
    verify: VerifySetting = "auto",
    locations: Locations | None = None,
    settings: ReadSettings | None = None,
    heal: bool = False,
) -> Dataset:
    """Open one version of a dataset, or several datasets as one.

    Args:
        url: ``"data/cats"`` (its ref `main`), ``"data/cats@val"`` (a ref or tag), ``"data/cats@sha256:…"`` (a
            manifest). A mapping such as ``{"web": "a/web@v3", "code": "data/code"}`` opens several as one:
            their samples follow each other, and the name is the first axis of the strata ("web/de").
        verify: checksum that is checked for every block read from a local file. "fast" (XXH3) detects
            accidental damage, "strong" (SHA-256) also detects forgery; "auto" is "strong" for files that
            another user can write, and "fast" otherwise. There is no "off". Bytes from a network are always
            compared by SHA-256. See docs/threats.md.
        locations: further copies of the objects, name → URL, nearest first (``{"mirror":
            "s3://other/cats"}``); reads continue with them if the root is slow, wrong or unavailable.
        settings: deadlines, concurrency and hedging of reads over a network.
        heal: overwrite bad copies with good bytes when a read meets them; needs write access.

    Raises:
        NotFoundError: The dataset, ref or manifest does not exist.
        IntegrityError: The manifest or a page is damaged.
        SchemaError: The datasets have different schemas.

    Examples:
        >>> ds = shardkit.open("data/digits")
        >>> len(ds), list(ds.schema)
        (200, ['image', 'label'])
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
    return load_manifest(repository, repository.resolve(ref, repository.opened))


def _open_parts(urls: Mapping[str, Url], settings: ReadSettings | None) -> Version:
    versions = {name: _open_version(url, None, settings) for name, url in urls.items()}
    manifest = merge([(name, version.manifest) for name, version in versions.items()])
    for name, version in versions.items():
        if len(version.parts) != 1:
            raise FormatError(f"part {name!r} is merged itself; name its parts instead")
    return merged_version(manifest, list(versions.items()))
