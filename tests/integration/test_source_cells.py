"""Every source, built and adopted, in a folder, a bucket and the hub: the rows are those that its own library reads.

And, of every source adopted from a folder: its batches are those of a build, no changed byte reaches a row, and an
adoption that was interrupted goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.copies.verify import verify
from shardkit.errors import ShardkitError
from shardkit_tools.adopting import adopt, adoption
from shardkit_tools.building.build_run import build
from shardkit_tools.importers import ImportOptions
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


# ---- Of every source that is adopted

EVERY_SOURCE = pytest.mark.parametrize("name", source_cells.SOURCES)
NOT_ROWS = {".json", ".idx"}
"""Suffixes of files that say where rows are: an index of a shard locates them after an adoption."""


@pytest.fixture
def folder(name: str, sources: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A copy of a source, which a test may damage."""
    return Path(shutil.copytree(sources[0] / name, tmp_path / "source"))


def adopted(name: str, folder: Path, root: Path) -> Any:
    source = source_cells.SOURCES[name]
    options = ImportOptions(**dict(source.settings))
    return adopt(f"{folder}{source.given}", root, from_=source.from_, options=options, block_size="256B")


def files_of(folder: Path) -> list[Path]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in found if path.suffix not in NOT_ROWS)


def rows_in_batches(root: Path) -> dict[str, dict[str, str]]:
    """The fields of each sample as a loader gives them, all at once and each alone, by the sample's key."""
    ds, samples = shardkit.open(root), dict[str, dict[str, str]]()
    plan = ds.plan(global_batch=5, lanes=5, seed=3)

    def row_of(column: Any, row: int) -> str:
        return str(
            column[0][column[1][row] : column[1][row + 1]] if isinstance(column, tuple) else column[row]
        )

    for fields in (None, *([field] for field in ds.schema)):
        with ds.loader(plan, rank=0, world=1, tensors=False, fields=fields) as loader:
            for batch in loader:
                for row, sample in enumerate(batch.samples.tolist()):
                    found = {field: row_of(batch[field], row) for field in fields or ds.schema}
                    known = samples.setdefault(ds.key(sample), found)
                    assert {field: known[field] for field in found} == found
    return samples


@EVERY_SOURCE
def test_batches_are_those_of_a_build(name: str, folder: Path, tmp_path: Path) -> None:
    before = [path.read_bytes() for path in files_of(folder)]
    adopted(name, folder, tmp_path / "adopted")
    source = source_cells.SOURCES[name]
    options = ImportOptions(**dict(source.settings))
    build(f"{folder}{source.given}", tmp_path / "built", from_=source.from_, options=options, shuffle=False)
    assert shardkit.open(tmp_path / "adopted").schema == shardkit.open(tmp_path / "built").schema
    for path in folder.rglob("*"):
        if path.suffix in NOT_ROWS:
            path.unlink()
    found = rows_in_batches(tmp_path / "adopted")
    assert len(found) == len(shardkit.open(tmp_path / "adopted"))
    assert found == rows_in_batches(tmp_path / "built")
    assert [path.read_bytes() for path in files_of(folder)] == before
    assert not verify(str(tmp_path / "adopted"), level="decode").exit_code


@EVERY_SOURCE
def test_no_changed_byte_reaches_a_row(name: str, folder: Path, tmp_path: Path) -> None:
    """One bit anywhere, a byte less, a byte more, no file: verify names the file, and reads do or are right."""
    adopted(name, folder, tmp_path / "root")
    ds, root, chance = shardkit.open(tmp_path / "root"), str(tmp_path / "root"), random.Random(name)
    rows, files = ds[:], files_of(folder)
    is_group, refused = len(ds.table) != len(files), 0
    for shard, path in enumerate(files[:3]):
        data = path.read_bytes()
        places = [chance.randrange(len(data)) for _ in range(3)]
        spans = [] if is_group else ds.reader.index(shard).spans
        for block, span in enumerate(spans):
            places.append(span.offset + chance.randrange(span.size))
            path.write_bytes(data[: places[-1]] + bytes([data[places[-1]] ^ 1]) + data[places[-1] + 1 :])
            (damage,) = verify(root).damaged
            assert (damage.name, damage.blocks) == (str(path), (block,))
            assert "shardkit adopt" in damage.action
        changed = [data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :] for at in places]
        for content in (*changed, data[:-1], data + b"?", None):
            path.unlink() if content is None else path.write_bytes(content)
            assert [one.name for one in verify(root, level="read").damaged] == [str(path)]
            try:
                found = shardkit.open(root)[:]
            except ShardkitError as error:
                assert path.name in str(error)  # noqa: PT017  what is not a row's may change
                refused += 1
            else:
                assert repr(found) == repr(rows)
        path.write_bytes(data)
    assert refused >= 2 * len(files[:3])
    assert not verify(root, level="read").exit_code
    assert repr(shardkit.open(root)[:]) == repr(rows)


@EVERY_SOURCE
def test_an_interrupted_adoption_goes_on(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is finished is not read again, unless its file was written since."""

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    whole = adopted(name, folder, tmp_path / "whole")
    for written_since in (0, 1):
        root = tmp_path / f"root-{written_since}"
        with monkeypatch.context() as patch:
            patch.setattr(adoption, "put_manifest", stopped)
            with pytest.raises(KeyboardInterrupt, match="run the same command again to go on"):
                adopted(name, folder, root)
        tasks = len(list(root.rglob("*.done")))
        for path in files_of(folder)[:written_since]:
            path.write_bytes(path.read_bytes())
        result = adopted(name, folder, root)
        assert (result.manifest, result.reused) == (whole.manifest, tasks - written_since)
    assert tasks
