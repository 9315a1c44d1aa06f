"""Commands on versions in which some rows lack values, as somebody types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardkit
from tests.command_line import output_of

ROWS: list[dict[str, Any]] = [
    {"id": number}
    | ({"age": number % 7} if number % 3 else {})
    | ({"note": f"n{number}"} if number % 4 else {})
    for number in range(50)
]


def table(root: str) -> list[dict[str, Any]]:
    found = sorted(shardkit.open(root), key=lambda sample: int(sample["id"]))
    return [{name: value for name, value in sample.items() if value is not None} for sample in found]


@pytest.mark.parametrize("format", ["tar", "arrow"])
def test_versions_with_missing_values(tmp_path: Path, format: str) -> None:
    lines, root = tmp_path / "a.jsonl", str(tmp_path / "root")
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    output_of("build", lines, root, "--format", format, "--lookup", "age")
    assert "age" in output_of("show", root)
    assert "int64?" in output_of("show", root)
    assert table(root) == ROWS
    output_of("verify", root)
    recipe = shardkit.open(root).manifest.build
    assert recipe["source"]["importer"] == "jsonl"
    output_of("rebuild", root, "--ref", "other", "--format", "arrow" if format == "tar" else "tar")
    output_of("verify", f"{root}@other")
    assert table(f"{root}@other") == ROWS
    output_of("build", lines, str(tmp_path / "two"), "--format", format)
    output_of("merge", f"a={root}", f"b={tmp_path / 'two'}", str(tmp_path / "both"))
    assert table(str(tmp_path / "both")) == sorted(ROWS * 2, key=lambda row: int(row["id"]))
    output_of("select", root, "--where", "age > 3", "--ref", "old")
    assert table(f"{root}@old") == [row for row in ROWS if row.get("age", 0) > 3]
    assert output_of("find", root, "--field", "age=0").count("sample") >= 1
    said = output_of("build", lines, str(tmp_path / "three"), "--schema", "age=int64", code=1)
    assert "--schema age=int64?" in said
