"""What shardkit finds where it runs: its compiled modules, and the packages of its extras."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import re

from shardkit_tools.console import print_facts, print_heading, print_json, print_line

__all__ = ["show_environment"]

_COMPILED = {
    "shardkit.formats.span_digests": "digests of several blocks at once; hashlib and xxhash do it one by one",
    "shardkit.loader.block_rows": "reading, hashing and gathering in one call; numpy takes up to twice as long",
}
_GET = "install a C compiler (apt install gcc), then: pip install --force-reinstall --no-binary shardkit shardkit"
_EXTRA = re.compile(r"([A-Za-z0-9._-]+)[^;]*;.*extra\s*==\s*['\"](\w+)['\"]")
_OWN = ("dev", "docs")


def show_environment(*, as_json: bool) -> None:
    """Print which fast modules and optional packages are missing, and how to get them."""
    compiled = {name: _is_there(name) for name in _COMPILED}
    extras = _extras()
    versions = {"shardkit": importlib.metadata.version("shardkit"), "python": platform.python_version()}
    missing = [name for name, is_there in compiled.items() if not is_there]
    if as_json:
        print_json(
            {**versions, "compiled": compiled, "to_compile": _GET if missing else None, "extras": extras}
        )
        return
    print_facts(list(versions.items()))
    print_heading("Compiled modules")
    print_facts([(name, "there" if compiled[name] else f"missing: {_COMPILED[name]}") for name in compiled])
    if missing:
        print_line(f"To get them: {_GET}")
    print_heading("Extras")
    for extra, packages in extras.items():
        lacks = [name for name, version in packages.items() if version is None]
        found = ", ".join(f"{name} {version}" for name, version in packages.items() if version is not None)
        how = f'missing {", ".join(lacks)}; run: pip install "shardkit[{extra}]"' if lacks else ""
        print_facts([(f"{extra:<10}", "; ".join(filter(None, [found, how])))])


def _is_there(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def _extras() -> dict[str, dict[str, str | None]]:
    """Extra → package → version that is installed, as shardkit's own metadata lists them."""
    found: dict[str, dict[str, str | None]] = {}
    for text in importlib.metadata.requires("shardkit") or []:
        match = _EXTRA.match(text)
        if match is None or match[1] == "shardkit" or match[2] in _OWN:
            continue
        try:
            version: str | None = importlib.metadata.version(match[1])
        except importlib.metadata.PackageNotFoundError:
            version = None
        found.setdefault(match[2], {})[match[1]] = version
    return found
