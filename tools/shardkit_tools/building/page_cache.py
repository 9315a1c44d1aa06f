"""Whether a source stays in memory by itself: what the page cache holds can be read twice, and in any order."""

from __future__ import annotations

from collections.abc import Iterable

from shardkit.stores.machine_memory import available_memory
from shardkit_tools.importers.protocol import SourceFile
from shardkit_tools.importers.remote_files import is_url

__all__ = ["fits_page_cache"]


def fits_page_cache(files: Iterable[SourceFile], room: int | None = None) -> bool:
    """Whether all files are of this machine, and take no more than half of what its page cache may hold.

    The other half is for the shards that are written meanwhile.

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
