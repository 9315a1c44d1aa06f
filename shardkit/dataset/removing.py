"""Remove samples from versions, and optionally erase their bytes (SPEC.md §10)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardkit.copies.replicate import commit
from shardkit.dataset.dataset import Dataset
from shardkit.dataset.erasing import erase_rows, finish_erasures, plan_erasure
from shardkit.dataset.lookups import KEY, NUMBER, check_absent, list_samples
from shardkit.dataset.opening import open_dataset
from shardkit.dataset.rewriting import ErasureReport
from shardkit.dataset.selecting import put_selected, select_rows
from shardkit.documents import encode
from shardkit.errors import NotFoundError, UsageError
from shardkit.formats import sha256_digest
from shardkit.repository.log import parse_dataset_url
from shardkit.repository.repository import Repository
from shardkit.repository.versions import Version, load_manifest

Places = dict[int, list[int]]
"""Shard → rows, ascending."""


@dataclass(frozen=True, slots=True)
class Removal:
    """The result of `remove`."""

    samples: int  # number of samples asked for
    refs: Mapping[str, tuple[str, int]]  # ref → (new manifest id, number of samples removed from it)
    still: tuple[str, ...]  # refs and tags that still hold some of the samples
    commit: int  # number of the log entry


def remove(
    url: str,
    *,
    rows: Sequence[int] | NDArray[np.int64] | None = None,
    keys: Sequence[str] | None = None,
    reason: str,
    author: str = "",
    allow_absent: bool = False,
) -> Removal:
    """Commit versions without some samples; their bytes, tags and the old versions stay.

    Raises:
        AbsentError: The dataset does not hold some of them, and `allow_absent` is not set.
    """
    root, ref = parse_dataset_url(url)
    _check_reason(reason)
    repository = Repository.open(root)
    version, places = _places(url, rows, keys, allow_absent)
    lost = {version.table.digest_text(shard): numbers for shard, numbers in places.items()}
    head = repository.head()
    if ref is not None and ref not in head.refs:
        raise UsageError(
            f"{ref!r} is no ref: only refs can be moved; remove from the ref that it was made of"
        )
    moved: dict[str, tuple[str, int]] = {}
    still: list[str] = []
    for name, manifest_id in head.refs.items():
        try:
            held = load_manifest(repository, manifest_id)
        except NotFoundError as error:  # a merged version with a part that has moved
            still.append(f"{name} (cannot be opened: {error})"[:300])
            continue
        gone = _count_rows(held, lost)
        if gone and held.manifest.parts:
            still.append(f"{name} (merged: merge again)")
        elif gone and ref not in (None, name):
            still.append(name)
        elif gone:
            moved[name] = _without(repository, held, lost, gone, name), gone
    still += [
        f"{tag} (tag)"
        for tag, held_id in head.tags.items()
        if _count_rows(load_manifest(repository, held_id), lost)
    ]
    entry = commit(
        repository,
        {name: new for name, (new, _) in moved.items()},
        message=f"removed {sum(map(len, places.values()))} samples: {reason}"[:9_000],
        author=author,
        expected={name: head.refs[name] for name in moved},
    )
    return Removal(sum(map(len, places.values())), moved, tuple(still), entry.n)


def erase(
    url: str,
    *,
    rows: Sequence[int] | NDArray[np.int64] | None = None,
    keys: Sequence[str] | None = None,
    reason: str,
    author: str = "",
    allow_absent: bool = False,
) -> ErasureReport:
    """Erase samples of a version from every version of the root, and withdraw the tags of those versions.

    After a kill at any moment, the same call or `resume_erasures` continues.

    Raises:
        AbsentError: The dataset does not hold some of them, and `allow_absent` is not set.
    """
    root, _ = parse_dataset_url(url)
    _check_reason(reason)
    repository = Repository.open(root)
    given = [int(row) for row in rows] if rows is not None else list(keys or ())
    request = sha256_digest(encode([url.rpartition("@")[2] if "@" in url else "", given, reason]))
    finished = finish_erasures(repository)
    if request in finished:
        return finished[request]
    version, places = _places(url, rows, keys, allow_absent)
    return erase_rows(
        repository, plan_erasure(repository, version, places, request=request, reason=reason, author=author)
    )


def resume_erasures(root: str) -> list[ErasureReport]:
    """Finish the erasures of a root that were killed, and return their reports."""
    return list(finish_erasures(Repository.open(root)).values())


def _places(
    url: str,
    rows: Sequence[int] | NDArray[np.int64] | None,
    keys: Sequence[str] | None,
    allow_absent: bool,
) -> tuple[Version, Places]:
    """Return the version that names the samples, and the samples' shards and rows."""
    if (rows is None) == (keys is None):
        raise UsageError("name the samples by their numbers or by their keys")
    dataset = open_dataset(url)
    if dataset.manifest.parts:
        names = ", ".join(name for name, _ in dataset.manifest.parts)
        raise UsageError(f"{url} is merged; remove from its parts ({names}), then merge them again")
    values = [str(int(row)) for row in rows] if rows is not None else list(dict.fromkeys(keys or ()))
    if not values:
        raise UsageError("no sample is named; give at least one")
    listed = list_samples(dataset, values, NUMBER if rows is not None else KEY)
    if not allow_absent or not len(listed.samples):
        check_absent(listed.absent, f"the list for {url}")
    where = dataset.rows.locate(listed.samples)
    places: Places = {}
    for shard, row in zip(where.shard.tolist(), where.row.tolist(), strict=True):
        places.setdefault(shard, []).append(row)
    return dataset.version, {shard: sorted(numbers) for shard, numbers in places.items()}


def _without(
    repository: Repository, version: Version, lost: Mapping[str, list[int]], gone: int, name: str
) -> str:
    """Store the version of a ref without the rows, and return its id."""
    if gone == version.manifest.selected:
        raise UsageError(f"ref {name!r} would hold no sample; drop it instead, or name fewer samples")
    masks = [version.mask(shard) for shard in range(len(version.table))]
    for shard, mask in enumerate(masks):
        mask[lost.get(version.table.digest_text(shard), [])] = False
    build = {"removed": int(version.manifest.build.get("removed", 0)) + gone}
    fewer = select_rows(version, masks, row_strata=Dataset(version).row_strata, build=build)
    return put_selected(repository, fewer).id


def _count_rows(version: Version, lost: Mapping[str, list[int]]) -> int:
    """Return how many of the rows a version holds."""
    shards = ((shard, lost.get(version.table.digest_text(shard))) for shard in range(len(version.table)))
    return sum(
        int(version.mask(shard)[rows].sum())
        for shard, rows in shards
        if rows is not None and version.table.selected[shard]
    )


def _check_reason(reason: str) -> None:
    if not reason.strip():
        raise UsageError("give a reason: the log keeps it")
