"""Whether a build will fit on its disks, and its source in the page cache, before it begins.

What it takes is estimated from below, so that nothing is refused that would have fitted: a full disk in the middle of a
build is an error as well, and costs no finished work.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardkit.dataset.version_settings import NewVersion
from shardkit.errors import StoreFullError
from shardkit.storage import available_memory
from shardkit.stores.file_operations import explained
from shardkit_tools.importers.protocol import SourceFile
from shardkit_tools.importers.remote_files import is_url

__all__ = ["SpaceNeed", "check_space", "fits_page_cache", "least_bytes", "space_needs"]

# Numbers in text take a multiple of what they take in a shard, and transforms may leave anything.
_OF_TEXT = 0.25
_OF_DATA = 0.9
_TEXT_IMPORTERS = frozenset({"csv", "jsonl", "text"})


@dataclass(frozen=True, slots=True)
class SpaceNeed:
    """What one folder needs.

    Attributes:
        what: "scratch" or "shards".
        folder: where.
        need_bytes: about.
        free_bytes: there now.
        device: of the file system.
    """

    what: str
    folder: str
    need_bytes: int
    free_bytes: int
    device: int


def least_bytes(version: NewVersion, source_bytes: int) -> int:
    """What so many bytes of the source at least become as encoded rows."""
    described = version.recipe.get("source", {})
    importer = described.get("importer") if isinstance(described, dict) else None
    is_changed = bool(set(version.recipe) - {"source"})
    return int(source_bytes * (_OF_TEXT if is_changed or importer in _TEXT_IMPORTERS else _OF_DATA))


def space_needs(
    scratch: str | None, scratch_bytes: int, root: str | None, shard_bytes: int
) -> list[SpaceNeed]:
    """What the folders of a build need, and have.

    Args:
        scratch: folder of the encoded rows; None for none.
        scratch_bytes: of them.
        root: local folder of the dataset; None where it is remote.
        shard_bytes: of its new shards.

    Raises:
        StoreError: a folder cannot be looked at.
    """
    wanted = [("scratch", scratch, scratch_bytes), ("shards", root, shard_bytes)]
    needs = []
    for what, folder, need in wanted:
        if folder is None:
            continue
        there = _existing(folder)
        with explained(f"see how much room is in {there}"):
            found, device = shutil.disk_usage(there), os.stat(there).st_dev
        needs.append(SpaceNeed(what, folder, need, found.free, device))
    return needs


def check_space(needs: Sequence[SpaceNeed]) -> None:
    """Refuse to begin what cannot end; folders on one file system share its room.

    Raises:
        StoreFullError: names the folder, what is needed there and what is free.
    """
    for need in needs:
        together = [other for other in needs if other.device == need.device]
        total = sum(other.need_bytes for other in together)
        if total > need.free_bytes:
            parts = " and ".join(f"{_gib(one.need_bytes)} of {one.what}" for one in together)
            raise StoreFullError(
                f"{need.folder}: {_gib(need.free_bytes)} free, but the build needs at least {_gib(total)} there "
                f"({parts}); make room, or name a folder on another disk with --scratch"
            )


def fits_page_cache(files: Iterable[SourceFile], room: int | None = None) -> bool:
    """Whether a source stays in memory by itself: what the page cache holds can be read twice, and in any order.

    Which it does where all files are of this machine, and take no more than half of what its page cache may hold. The
    other half is for the shards that are written meanwhile.

    Args:
        files: of a source.
        room: bytes that the page cache may hold; by default what the machine says.
    """
    left = (available_memory() if room is None else room) // 2
    for file in files:
        left -= file.size
        if left < 0 or is_url(file.path):
            return False
    return True


def _existing(folder: str) -> str:
    """The folder, or the nearest one above it that exists."""
    at = os.path.abspath(folder)
    while not os.path.isdir(at) and os.path.dirname(at) != at:
        at = os.path.dirname(at)
    return at


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
