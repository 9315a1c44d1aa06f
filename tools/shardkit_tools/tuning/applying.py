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
_NOTES = re.compile(rf"\n*^{_BEGIN}$.*?^{_END}$", re.MULTILINE | re.DOTALL)


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
    said = []
    text = _NOTES.sub("", text)
    for name, (section, key) in _TRAINER.items():
        if name in values:
            text = _with(text, section, key, values[name].value)
            said.append(f"{section}.{key} = {values[name].value}")
    if notes := _notes(values):
        text = "\n".join([text.rstrip(), "", _BEGIN, *notes, _END, ""])
    _check(text, where)
    return text, said


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


def _with(text: str, section: str, key: str, value: int) -> str:
    """Set a key of a section: in its line, behind the section's heading, or in a section of its own at the end."""
    heading = re.search(rf"^\s*\[\s*{section}\s*\]\s*(#.*)?$", text, re.MULTILINE)
    if heading is None:
        return f"{text.rstrip()}\n\n[{section}]\n{key} = {value}\n".lstrip("\n")
    end = re.compile(r"^\s*\[", re.MULTILINE).search(text, heading.end())
    before, own, after = (
        text[: heading.end()],
        text[heading.end() : end and end.start()],
        text[end.start() :] if end else "",
    )
    own, found = re.subn(rf"^(\s*{key}\s*=\s*)[^#\s]*", rf"\g<1>{value}", own, count=1, flags=re.MULTILINE)
    return f"{before}{own}{after}" if found else f"{before}\n{key} = {value}{own}{after}"
