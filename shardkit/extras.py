"""Installed and optional packages, as metadata lists them, and commands in messages."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterable, Iterator

_REQUIREMENT = re.compile(r"([^;]*?)\s*;.*\bextra\s*==\s*['\"](\w+)['\"]")


def optional_packages() -> Iterator[tuple[str, str]]:
    """Yield (extra, requirement) of each optional package, such as ("s3", "obstore>=0.8")."""
    import importlib.metadata  # slow to import, and needed in messages only

    for text in importlib.metadata.requires("shardkit") or []:
        match = _REQUIREMENT.fullmatch(text)
        if match is not None:
            yield match[2], match[1]


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the given packages that are installed, by name."""
    import importlib.metadata  # slow to import

    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra.

    It names the packages and not ``shardkit[extra]``, so it is right whether shardkit was installed from an index, a
    wheel or a clone.
    """
    return shlex.join(
        ["pip", "install", *(package for name, package in optional_packages() if name == extra)]
    )


def shell_word(text: str | os.PathLike[str]) -> str:
    """Quote a text or a path for a shell; unprintable characters are escaped as bash and zsh read them."""
    text = os.fspath(text)
    if text.isprintable():
        return shlex.quote(text)
    escaped = text.encode("unicode_escape").decode().replace("'", r"\'")
    return "$'" + re.sub(r"\\x(?=[89a-f])", r"\\u00", escaped) + "'"
