"""How much memory this machine has left, within the limits of containers and of jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_MEMORY = Path("/proc/meminfo")
_MEMBERSHIP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
# limit and what is taken, of control groups 2 and 1; memory.stat says what of it is files, which can be dropped
_FILES = {"": ("memory.max", "memory.current"), "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes")}
_FILE_PAGES = ("active_file", "inactive_file")


def available_memory() -> int:
    """Bytes that may be taken now without anything being swapped or killed; 0 where nobody says.

    What the page cache holds of files counts, since it gives way.
    """
    try:
        available = _numbers(_MEMORY, ":")["MemAvailable"] * 1024
    except (OSError, ValueError, KeyError):
        return 0
    for folder, names in _limits():
        try:
            most, used = (int((folder / name).read_text(encoding="ascii")) for name in names)
            known = _numbers(folder / "memory.stat", " ")
        except (OSError, ValueError):
            continue  # no such group, or its limit is "max"
        files = sum(known.get(f"total_{name}", known.get(name, 0)) for name in _FILE_PAGES)
        available = min(available, most - used + files)
    return max(0, available)


def _limits() -> Iterator[tuple[Path, tuple[str, str]]]:
    """Folders of the control groups that this process is in, the outer ones too, and what is to be read there.

    A container may see its own group as the root and yet be told the name that its host has for it: a folder that is
    not there limits nothing.
    """
    for kind, group in _memberships():
        inside = PurePosixPath(group.lstrip("/"))
        for part in (inside, *inside.parents):
            yield _GROUPS / kind / part, _FILES[kind]


def _memberships() -> set[tuple[str, str]]:
    """The groups of this process that limit memory, and the roots: (a key of `_FILES`, name)."""
    found = {(kind, "/") for kind in _FILES}
    try:
        lines = _MEMBERSHIP.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return found
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        found |= {(kind, group) for kind in controllers.split(",") if kind in _FILES}
    return found


def _numbers(path: Path, separator: str) -> dict[str, int]:
    """The first number of each line by its name."""
    found = {}
    for line in path.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(separator)
        first = value.split()[:1]
        if first and first[0].isdecimal():
            found[name] = int(first[0])
    return found
