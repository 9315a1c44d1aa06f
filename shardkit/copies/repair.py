"""`repair`: replace bad and missing copies from another copy, otherwise from parity (SPEC.md, "Repair")."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from shardkit.copies.repair_results import CheckSettings, Repair
from shardkit.copies.repairer import Repairer
from shardkit.errors import (
    NotFoundError,
    UsageError,
)
from shardkit.reading.attestations import read_attestations
from shardkit.reading.objects import (
    DEPTHS,
    ROOT_NAME,
    Depth,
)
from shardkit.stores.local import LocalStore
from shardkit.stores.store import Store


def repair(
    url: str,
    *,
    level: str = "read",
    from_runs: Sequence[str] = (),
    settings: CheckSettings | None = None,
) -> Repair:
    """Replace bad and missing copies. May be interrupted and called again at any time.

    Args:
        url: URL of the root.
        level: depth of the checks; "attested" checks only copies that were attested as bad.
        from_runs: run directories whose readers attested bad copies.
        settings: how copies are checked.

    Raises:
        UsageError: The level is unknown.
        NotFoundError: A run directory does not exist.
    """
    if level != "attested" and level not in DEPTHS:
        raise UsageError(f"level {level!r}: expected attested, {', '.join(DEPTHS)}")
    with Repairer(url, "repair", level, settings) as work:
        looks = read_attestations([work.root, *map(_run_store, from_runs)])
        bad = list(work.check_attested(looks))
        if level != "attested":
            known = {(one.location, one.name) for one in bad}
            wanted = [one for one in work.placed() if one[:2] not in known]
            bad += work.check_copies(wanted, lambda _: level)  # type: ignore[arg-type, return-value]
        work.repair_copies(bad)
        work.finish()
    return work.done


def repair_listed(url: str, *, level: Depth, settings: CheckSettings) -> Repair:
    """Repair missing objects of the root and wrong copies in all locations; `replicate` makes the missing copies.

    Nothing is attested, so that `replicate` needs no right to write attestations. `level` applies to shards and
    parity; metadata is read. See `repair`.
    """
    if level not in DEPTHS:
        raise UsageError(f"level {level!r}: expected {', '.join(DEPTHS)}")
    with Repairer(url, None, level, settings) as work:
        bad = work.check_copies(
            list(work.placed()), lambda one: level if one.name.endswith(_LARGE) else "read"
        )
        work.repair_copies([one for one in bad if one.location == ROOT_NAME or one.was != "missing"])
        work.finish(is_lag_left=True)
    return work.done


_LARGE: Final = (".tar", ".arrow", ".parity")


def _run_store(run: str) -> Store:
    """Open the directory of a run, which has the attestations of its readers."""
    if not os.path.isdir(run):
        raise NotFoundError(
            f"run directory {run} is not there; give the directory that the loader was given as run="
        )
    return LocalStore(run, read_only=True)
