"""Every source, built and adopted, in a folder, a bucket and the hub: the rows are those that its own library reads."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration import source_cells
from tests.integration.conftest import made_once
from tests.servers.hub import hub
from tests.servers.object_stores import moto, s3_environment, upload

TOKEN = "hf_" + "s3cr3ttoken" * 3


def told(*arguments: object, **environment: str) -> Any:
    """What the program of the cells prints."""
    done = subprocess.run(
        [sys.executable, source_cells.__file__, *map(str, arguments)],
        env={**os.environ, "HF_DATASETS_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with all sources, and their rows as their libraries read them."""

    def write(folder: Path) -> None:
        rows = told("write", folder / "sources")
        (folder / "rows.json").write_text(json.dumps(rows))

    made = made_once(tmp_path_factory, "source-cells", write)
    return made / "sources", json.loads((made / "rows.json").read_text())


@contextlib.contextmanager
def served(place: str, folder: Path, home: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The files of a folder at a place: its URL, and the environment that reaches it."""
    if place == "folder":
        yield str(folder), {}
    elif place == "hub":
        with hub("me/all", folder, TOKEN) as made:
            yield "hf://datasets/me/all", {
                "HF_ENDPOINT": made.url, "HF_TOKEN": TOKEN, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1",
            }  # fmt: skip
    else:
        with moto("their-files") as endpoint:
            yield upload(endpoint, "their-files", folder), s3_environment(endpoint)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["folder", "bucket", "hub"])
def test_every_source_is_read_as_its_library_reads_it(
    place: str, sources: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, rows = sources
    if place == "hub":
        pytest.importorskip("huggingface_hub")
    with served(place, folder, tmp_path / "home") as (url, environment):
        found = told("read", url, tmp_path / "roots", **environment)
    expected = {f"{name}, {way}": rows[name] for name in source_cells.SOURCES for way in source_cells.WAYS}
    assert found == expected
