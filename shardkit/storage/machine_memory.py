"""How much memory this machine has left, within the limit of a container."""

from __future__ import annotations

from pathlib import Path

__all__ = ["available_memory"]

_MEMORY = Path("/proc/meminfo")
# limit, what is taken, and its parts, among which the files that can be dropped; of control groups 2 and 1
_GROUPS = (
    tuple(Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current", "memory.stat")),
    tuple(
        Path("/sys/fs/cgroup/memory") / name
        for name in ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    ),
)
_FILE_PAGES = ("active_file", "inactive_file")


def available_memory() -> int:
    """Bytes that may be taken now without anything being swapped or killed; 0 where nobody says.

    What the page cache holds of files counts, since it gives way.
    """
    try:
        available = _numbers(_MEMORY, ":")["MemAvailable"] * 1024
    except (OSError, ValueError, KeyError):
        return 0
    for limit, taken, parts in _GROUPS:
        try:
            most, used = (int(path.read_text(encoding="ascii")) for path in (limit, taken))
            known = _numbers(parts, " ")
        except (OSError, ValueError):
            continue  # no such group, or its limit is "max"
        files = sum(known.get(f"total_{name}", known.get(name, 0)) for name in _FILE_PAGES)
        available = min(available, most - used + files)
    return max(0, available)


def _numbers(path: Path, separator: str) -> dict[str, int]:
    """The first number of each line by its name."""
    found = {}
    for line in path.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(separator)
        first = value.split()[:1]
        if first and first[0].isdecimal():
            found[name] = int(first[0])
    return found
