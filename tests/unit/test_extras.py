"""The command that messages give for an extra installs its packages, from wherever shardkit was installed."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from shardkit.extras import install_command

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PACKAGES = ("shardkit", "tools/shardkit_tools", "trainer/shardkit_trainer")


@pytest.mark.parametrize("extra", sorted(set(EXTRAS) - {"dev", "docs", "webdataset"}))
def test_the_command_names_the_packages_of_the_extra(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"{one}; extra == '{name}'" for name, listed in EXTRAS.items() for one in listed]
    monkeypatch.setattr("importlib.metadata.requires", lambda _name: ["numpy>=2.0", *lines])
    words = shlex.split(install_command(extra))
    assert words[:2] == ["pip", "install"]
    listed = {one for one in EXTRAS[extra] if not one.startswith("shardkit[")}
    assert listed <= set(words[2:])
    assert "numpy>=2.0" not in words


def test_no_text_names_an_extra_of_an_index() -> None:
    """shardkit is not on an index: a message, an example or a page with shardkit[…] cannot be followed."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    files += [
        path
        for folder in ("docs", "examples")
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in (".py", ".md")
    ]
    files += [ROOT / name for name in ("README.md", "AGENTS.md", "llms.txt")]
    found = [
        f"{path.relative_to(ROOT)}: {match}"
        for path in files
        for match in re.findall(
            r"install[^\n]{0,40}shardkit(?:\[| shardkit|$)", path.read_text(encoding="utf-8")
        )
    ]
    assert found == []
