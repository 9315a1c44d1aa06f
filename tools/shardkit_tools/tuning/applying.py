"""Settings into a trainer's TOML file, line by line: comments and order stay (SPEC.md §3)."""

from __future__ import annotations

import os
import re
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardkit.errors import ConfigurationError
from shardkit_tools.tuning.proposing import Proposal

_TRAINER = {"window_blocks": ("data", "window_blocks"), "sync_every": ("parallel", "sync_every")}
_BEGIN, _END = "# shardkit tune: for builds and loaders", "# shardkit tune: end"
_TABLE = re.compile(r"\s*\[\s*([A-Za-z0-9_.\"-]+)\s*\]\s*(#.*)?")


def apply(path: Path, proposals: Sequence[Proposal]) -> list[str]:
    """Write proposals into a file, new or not; what was set, as ``section.name = value``.

    Raises:
        ConfigurationError: the file is no TOML, or cannot be written.
    """
    try:
        text = path.read_text("utf-8") if path.exists() else ""
        changed, said = merged(text, proposals, str(path))
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8"
        ) as file:
            file.write(changed)
        os.replace(file.name, path)  # whole or not at all
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be written: {error}") from None
    return said


def merged(text: str, proposals: Sequence[Proposal], where: str) -> tuple[str, list[str]]:
    """The text with the proposals in it, and what was set. Applying twice gives the same text."""
    _check(text, where)
    values = {one.name: one for one in proposals}
    lines, said = _without_notes(text.splitlines()), []
    for name, (section, key) in _TRAINER.items():
        if name in values:
            lines = _with(lines, section, key, values[name].value)
            said.append(f"{section}.{key} = {values[name].value}")
    notes = _notes(values)
    if notes:
        while lines and not lines[-1].strip():
            lines.pop()
        lines += ["", _BEGIN, *notes, _END]
    result = "\n".join(lines).strip("\n") + "\n"
    _check(result, where)
    return result, said


def _check(text: str, where: str) -> None:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{where} is no TOML: {error}; nothing was written") from None


def _notes(values: Mapping[str, Proposal]) -> list[str]:
    found = []
    build = [
        f"--{n.replace('_', '-')} {values[n].value}" for n in ("block_size", "shard_size") if n in values
    ]
    if build:
        found.append(f"#   shardkit build … {' '.join(build)}")
    loader = [f"{n}={values[n].value}" for n in ("memory",) if n in values]
    if loader:
        found.append(f"#   ds.loader(…, {', '.join(loader)})")
    if "concurrency" in values:
        found.append(f"#   ReadSettings(first_concurrency={values['concurrency'].value})")
    if "accumulation" in values:
        found.append(f"#   cells of a rank between two synchronisations: {values['accumulation'].value}")
    return found


def _without_notes(lines: list[str]) -> list[str]:
    kept, inside = [], False
    for line in lines:
        if line.startswith(_BEGIN):
            inside = True
        if not inside:
            kept.append(line)
        if line.startswith(_END):
            inside = False
    return kept


def _with(lines: list[str], section: str, key: str, value: int) -> list[str]:
    """Set a key of a section: in its line, behind the section's last key, or in a section of its own at the end."""
    setting = re.compile(rf"(\s*{key}\s*=\s*)([^#]*?)(\s*(?:#.*)?)$")
    at, last = None, None
    current = ""
    for number, line in enumerate(lines):
        table = _TABLE.fullmatch(line)
        if table is not None or line.lstrip().startswith("[["):
            current = table[1] if table is not None else "[["
            at = number if current == section else at
        elif current == section and line.strip() and not line.lstrip().startswith("#"):
            found = setting.match(line)
            if found is not None:
                return [*lines[:number], f"{found[1]}{value}{found[3]}", *lines[number + 1 :]]
            last = number
    if at is None:
        return [*lines, *([""] if lines and lines[-1].strip() else []), f"[{section}]", f"{key} = {value}"]
    place = (at if last is None else last) + 1
    return [*lines[:place], f"{key} = {value}", *lines[place:]]
