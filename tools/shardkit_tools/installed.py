"""Find installed packages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from importlib import metadata


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the given packages that are installed, by name."""
    found = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
