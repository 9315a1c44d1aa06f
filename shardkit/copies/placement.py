"""Which objects the versions of a root need, and how many copies the policy asks for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from shardkit.copies.policy import LocationTable, Placed, placement
from shardkit.manifest import Manifest
from shardkit.reading.parity.catalogue import parity_names
from shardkit.repository.inventory import Inventory, walk_versions
from shardkit.repository.repository import Repository
from shardkit.stores.objects import parse_object_name
from shardkit.stores.store import Store

__all__ = [
    "LARGE",
    "Needed",
    "add_needed",
    "find_needed",
    "live_versions",
    "needed_of",
    "strata_of",
    "there_are",
    "unknown_strata",
]

LARGE: Final = ("tar", "tar.zst", "arrow", "parity")
"""Extensions of objects that are not metadata."""


@dataclass(frozen=True, slots=True)
class Needed:
    """An object that a version needs.

    Attributes:
        name: of the object in a root.
        size: bytes; None where no page says.
        where: names of the locations that it belongs in, the root first.
        is_critical: whether a commit in hybrid mode waits for its copies: metadata, and shards with critical strata.
    """

    name: str
    size: int | None
    where: tuple[str, ...]
    is_critical: bool


def live_versions(repository: Repository) -> list[str]:
    """Manifest ids that a ref or a tag names, each once, and those of their parts that lie in this root."""
    head = repository.head()
    found = dict.fromkeys([*head.refs.values(), *head.tags.values()]) if head else {}
    return list(found)


def find_needed(
    repository: Repository,
    table: LocationTable,
    versions: Iterable[str],
    *,
    stores: Sequence[Store] | None = None,
) -> dict[str, Needed]:
    """Name → what is needed, of some versions, their parts in this root, and their parity.

    Args:
        repository: that holds them.
        table: locations and policy.
        versions: manifest ids.
        stores: see `parity_names`.

    Raises:
        NotFoundError, IntegrityError, FormatError: a manifest or page is gone or damaged everywhere.
    """
    found: dict[str, Needed] = {}
    for inventory in walk_versions(repository, versions):
        add_needed(found, needed_of(repository, table, inventory, stores))
    return found


def add_needed(found: dict[str, Needed], more: Iterable[Needed]) -> None:
    """Note what another version needs; one version may know a shard as critical, another not."""
    for one in more:
        if one.name not in found or len(found[one.name].where) < len(one.where):
            found[one.name] = one


def needed_of(
    repository: Repository, table: LocationTable, inventory: Inventory, stores: Sequence[Store] | None = None
) -> Iterator[Needed]:
    """What one version needs; see `find_needed`."""
    strata = _strata_of_shards(inventory) if table.policy.critical else {}
    sizes = dict(inventory.names())
    sizes |= dict.fromkeys(sorted(parity_names(repository, inventory, stores=stores) - sizes.keys()))
    for name, size in sizes.items():
        if name.startswith("objects/"):
            digest, extension = parse_object_name(name)
            held = strata.get(digest, frozenset())
            where = placement(table.policy, table.locations, Placed(digest, extension, held))
            yield Needed(name, size, where, extension not in LARGE or table.policy.is_critical(held))


def strata_of(repository: Repository, versions: Iterable[str]) -> set[str]:
    """Names by which a policy may call the strata of some versions and of their parts in this root.

    Raises:
        NotFoundError, IntegrityError, FormatError: a manifest or page is gone or damaged everywhere.
    """
    found: set[str] = set()
    for inventory in walk_versions(repository, versions):
        found.update(*_names_of_strata(inventory.manifest))
    return found


def unknown_strata(repository: Repository, table: LocationTable) -> dict[str, str]:
    """Critical strata of the policy that no version has → which there are; empty while there is no version.

    Raises:
        NotFoundError, IntegrityError, FormatError: a manifest or page is gone or damaged everywhere.
    """
    versions = live_versions(repository)
    if not versions or not table.policy.critical:
        return {}
    known = strata_of(repository, versions)
    names = [one.stratum for one in table.policy.critical]
    return {name: there_are(name, known) for name in names if name not in known}


def there_are(name: str, known: Iterable[str]) -> str:
    """For a message: the stratum that was meant, or some of those that there are."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"there are {', '.join(map(repr, names[:10]))}{more}"


def _strata_of_shards(inventory: Inventory) -> dict[str, frozenset[str]]:
    """Digest of each shard → names of the strata of which it holds rows."""
    found: dict[str, frozenset[str]] = {}
    names = _names_of_strata(inventory.manifest)
    for table in inventory.tables:
        borders = table.segment_starts
        for shard in range(len(table)):
            numbers = np.unique(table.segment_stratum[borders[shard] : borders[shard + 1]])
            found[table.digest_text(shard)] = frozenset().union(*(names[i] for i in numbers.tolist()))
    return found


def _names_of_strata(manifest: Manifest) -> list[frozenset[str]]:
    """What each stratum may be called: by its name, and by that of its class; the pool by all that are in it."""
    found: list[frozenset[str]] = []
    for stratum in manifest.strata:
        names = {stratum.name}
        if "label" in manifest.axes and len(stratum.values) == len(manifest.axes):
            values = list(stratum.values)
            place = manifest.axes.index("label")
            if values[place].isdecimal() and int(values[place]) < len(manifest.classes):
                values[place] = manifest.classes[int(values[place])]
                names.add("/".join(values))
        found.append(frozenset(names))
    pooled = frozenset().union(
        *(names for names, one in zip(found, manifest.strata, strict=True) if one.in_pool)
    )
    return [
        names | pooled if one.pooled else names for names, one in zip(found, manifest.strata, strict=True)
    ]
