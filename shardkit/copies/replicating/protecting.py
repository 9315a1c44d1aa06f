"""Parity, where the policy asks for it."""

from __future__ import annotations

from collections.abc import Iterable

from shardkit.copies.parity_encoding import encode_sets
from shardkit.copies.policy import LocationTable
from shardkit.copies.replicating.pacing import Pace
from shardkit.errors import IntegrityError, NotFoundError, StoreError
from shardkit.repository.inventory import walk_versions
from shardkit.repository.repository import Repository

__all__ = ["encode_parity"]


def encode_parity(repository: Repository, table: LocationTable, versions: Iterable[str], pace: Pace) -> int:
    """Encode what is not encoded yet of some versions; how many sets were.

    A merged version has no sets of its own, its parts have; those of parts in other roots are their roots' business.

    Raises:
        StoreError: the root failed; or, once all that can be encoded is, sets are left without parity: a member is
            lost or did not come.
        KeyboardInterrupt: the pace was stopped.
    """
    if table.policy.parity is None:
        return 0
    encoded = 0
    failed: dict[str, str] = {}
    for version, inventory in walk_versions(repository, versions, optional=True):
        if inventory.manifest.parts:
            continue
        try:
            done = encode_sets(
                repository,
                version,
                k=table.policy.parity.members,
                pace=pace.take,
                stopped=lambda: pace.is_stopped,
            )
        except (NotFoundError, IntegrityError) as error:  # without its size nobody knows how the rest is cut
            failed[version] = str(error)
            continue
        encoded += done.encoded
        failed |= done.failed
    if failed:
        name, why = next(iter(failed.items()))
        raise StoreError(
            f"{len(failed)} parity sets of {repository.url} could not be encoded, among them {name}: {why}; "
            f"run: shardkit repair {repository.url}"
        )
    return encoded
