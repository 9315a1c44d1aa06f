"""Whether a source stays in memory by itself: what the page cache holds can be read twice, and in any order."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shardkit_tools.importers.protocol import SourceFile
from shardkit_tools.importers.remote_files import is_url

__all__ = ["fits_page_cache", "page_cache_bytes"]

_MEMORY = Path("/proc/meminfo")
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def fits_page_cache(files: Iterable[SourceFile], room: int | None = None) -> bool:
    """Whether all files are of this machine, and take no more than half of what its page cache may hold.

    The other half is for the shards that are written meanwhile.

    Args:
        files: of a source.
        room: bytes that the page cache may hold; by default what the machine says.
    """
    left = (page_cache_bytes() if room is None else room) // 2
    for file in files:
        left -= file.size
        if left < 0 or is_url(file.path):
            return False
    return True


def page_cache_bytes() -> int:
    """Memory that files may take now, within the limit of a container; 0 where nobody says."""
    available = 0
    try:
        for line in _MEMORY.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                available = int(value.removesuffix("kB")) * 1024
    except (OSError, ValueError):
        return 0
    for path in _LIMITS:
        try:
            available = min(available, int(path.read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue  # no such controller, or "max"
    return available
