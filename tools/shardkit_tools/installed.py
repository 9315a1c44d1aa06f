"""Which packages are installed here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from importlib import metadata


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Package → version, of those that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
