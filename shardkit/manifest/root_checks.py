"""Whether a manifest's root agrees with itself: everything that can be known before a page is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from shardkit.errors import FormatError

if TYPE_CHECKING:
    from shardkit.manifest.manifest import Manifest, Stratum

__all__ = ["check_totals"]


def check_totals(manifest: Manifest) -> None:
    """Compare the totals of a root with its pages and strata.

    Raises:
        FormatError: They contradict each other, or a stratum or part appears twice.
    """
    if not 0 <= manifest.selected <= manifest.rows:
        _refuse(f"{manifest.selected} of {manifest.rows} rows are selected")
    _check_strata(manifest)
    _check_lookups(manifest)
    if manifest.parts:
        _check_parts(manifest)
        return
    if sum(page.shards for page in manifest.pages) != manifest.shards:
        _refuse(
            f"its pages hold {sum(page.shards for page in manifest.pages)} shards, the root {manifest.shards}"
        )
    if sum(page.rows for page in manifest.pages) != manifest.rows:
        _refuse(f"its pages hold {sum(page.rows for page in manifest.pages)} rows, the root {manifest.rows}")


def _check_strata(manifest: Manifest) -> None:
    own = [stratum for stratum in manifest.strata if not stratum.in_pool]
    if len({stratum.values for stratum in manifest.strata}) != len(manifest.strata):
        _refuse("a stratum appears twice")
    for stratum in manifest.strata:
        _check_stratum(manifest, stratum)
    if sum(stratum.rows for stratum in own) != manifest.rows:
        _refuse(f"its strata hold {sum(stratum.rows for stratum in own)} rows, the root {manifest.rows}")
    if sum(stratum.selected for stratum in own) != manifest.selected:
        _refuse(
            f"{sum(stratum.selected for stratum in own)} rows of its strata are selected, "
            f"{manifest.selected} in all"
        )
    # Every pooled row is in a pool, and the other way round.
    inside = [stratum for stratum in manifest.strata if stratum.in_pool]
    pools = [stratum for stratum in manifest.strata if stratum.pooled]
    if sum(s.rows for s in inside) != sum(s.rows for s in pools):
        _refuse("the strata in the pool do not add up to the pool")
    if sum(s.selected for s in inside) != sum(s.selected for s in pools):
        _refuse("the selected rows of the strata in the pool do not add up to the pool's")


def _check_stratum(manifest: Manifest, stratum: Stratum) -> None:
    if not 0 <= stratum.selected <= stratum.rows:
        _refuse(f"stratum {stratum.name!r}: {stratum.selected} of {stratum.rows} rows are selected")
    if stratum.pooled and stratum.in_pool:
        _refuse(f"stratum {stratum.name!r} is a pool inside a pool")
    if not stratum.pooled and not manifest.parts and len(stratum.values) != len(manifest.axes):
        _refuse(f"stratum {stratum.name!r} has {len(stratum.values)} values for {len(manifest.axes)} axes")


def _check_lookups(manifest: Manifest) -> None:
    fields = [lookup.field for lookup in manifest.lookups]
    if fields != sorted(set(fields)):
        _refuse(f"its lookups are of the fields {fields[:10]}, expected each once and sorted")
    for lookup in manifest.lookups:
        if lookup.field != "key" and lookup.field not in manifest.schema:
            _refuse(f"it has a lookup of {lookup.field!r}, which is no field")
        covered = sum(piece.shards for piece in lookup.pieces)
        if covered != manifest.shards or manifest.parts:
            _refuse(f"its lookup of {lookup.field!r} covers {covered} shards of {manifest.shards}")


def _check_parts(manifest: Manifest) -> None:
    if manifest.pages:
        _refuse("a merged manifest has pages of its own")
    names = [name for name, _ in manifest.parts]
    if len(set(names)) != len(names):
        _refuse("a part appears twice")
    unknown = {stratum.values[0] if stratum.values else "" for stratum in manifest.strata} - set(names)
    if unknown:
        _refuse(f"a stratum belongs to {min(unknown)[:100]!r}, which is no part")


def _refuse(why: str) -> NoReturn:
    raise FormatError(f"the manifest contradicts itself: {why}; do not trust it")
