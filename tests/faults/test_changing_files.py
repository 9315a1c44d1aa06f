"""Files that change under a running loader: every batch is right, or a typed error names the file; no signal ends it.

Datasets of every format and kind of payload, on the local disk and through a cache, with the compiled modules and
without. ``SHARDKIT_SEED`` makes other changes.
"""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardkit
from shardkit_tools.adopting.adoption import adopt
from tests.drills import drill_cases, drill_count
from tests.integration.test_adopt_mds import ZSTD, write_mds
from tests.pictures import JPEG
from tests.unit.test_importer_numpy import write

ROWS = 480
READER = Path(__file__).with_name("changing_files_reader.py")
FORMATS = [("tar", "none"), ("arrow", "none"), ("arrow", "zstd")]
KINDS: dict[str, dict[str, str]] = {
    "fixed": {"tokens": "int32[400]"},
    "small": {"x": "uint8[300]", "label": "int64"},
    "blobs": {"blob": "bytes"},
    "text": {"text": "str"},
    "ragged": {"values": "int32[*]"},
}


def _row(kind: str, n: int, chance: random.Random) -> dict[str, Any]:
    if kind == "fixed":
        return {"tokens": np.arange(n, n + 400, dtype=np.int32)}
    if kind == "small":
        return {"x": np.full(300, n % 251, np.uint8), "label": n}
    if kind == "blobs":
        return {"blob": chance.randbytes(chance.randrange(6000))}
    if kind == "text":
        return {"text": f"{n} " + "".join(chance.choices("abc äöü\n", k=chance.randrange(3000)))}
    return {"values": np.arange(chance.randrange(900), dtype=np.int32) + n}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base, chance, made = tmp_path_factory.mktemp("changing"), random.Random(5), []
    for shard_format, compression in FORMATS:
        for kind, schema in KINDS.items():
            folder = base / f"{shard_format}-{compression}-{kind}"
            with shardkit.create(str(folder / "root"), schema=schema, format=shard_format, compression=compression,
                                 block_size="8KiB", shard_size="200KiB") as writer:  # fmt: skip
                for n in range(ROWS):
                    writer.add(_row(kind, n, chance))
            made.append(folder)
    folder = base / "adopted"
    (folder / "tars").mkdir(parents=True)
    for number in range(4):
        with tarfile.open(folder / "tars" / f"part-{number:012d}.tar", "w") as tar:
            for n in range(ROWS // 4):
                for extension, data in (("bin", chance.randbytes(chance.randrange(6000))), ("txt", b"text %d" % n),
                                        ("cls", b"%d" % (n % 7))):  # fmt: skip
                    member = tarfile.TarInfo(f"{n:05d}.{extension}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    adopt([folder / "tars"], folder / "root", block_size="8KiB")
    arrays = base / "adopted-arrays"
    (arrays / "arrays").mkdir(parents=True)
    for number in range(4):
        values = np.frombuffer(chance.randbytes(ROWS // 4 * 600), np.int16).reshape(-1, 300)
        np.save(arrays / "arrays" / f"part-{number:012d}.npy", values)
    adopt([arrays / "arrays"], arrays / "root", block_size="8KiB")
    tables = base / "adopted-tables"
    (tables / "tables").mkdir(parents=True)
    for number in range(4):
        columns = {"data": [chance.randbytes(chance.randrange(3000)) for _ in range(ROWS // 4)],
                   "n": list(range(ROWS // 4))}  # fmt: skip
        pq.write_table(
            pa.table(columns), tables / "tables" / f"part-{number:012d}.parquet", row_group_size=20
        )
    adopt([tables / "tables"], tables / "root")
    pictures = base / "adopted-files"
    for n in range(ROWS):
        path = pictures / "files" / f"{n % 5}" / f"{n:012d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(JPEG + chance.randbytes(chance.randrange(6000)))
    adopt([pictures / "files"], pictures / "root", block_size="8KiB")
    lines = base / "adopted-lines"
    (lines / "lines").mkdir(parents=True)
    for number in range(4):
        rows = [{"n": n, "text": "x" * chance.randrange(3000)} for n in range(ROWS // 4)]
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (lines / "lines" / f"part-{number:012d}.jsonl").write_text(
            text.replace('"n": 0,', f'"n": -{number},')
        )
    adopt([lines / "lines"], lines / "root", block_size="8KiB")
    documents = base / "adopted-documents"
    (documents / "tokens").mkdir(parents=True)
    archives = base / "adopted-archives"
    (archives / "archives").mkdir(parents=True)
    for number in range(4):
        texts = [[list(chance.randbytes(chance.randrange(900)))] for _ in range(ROWS // 4)]
        write(documents / "tokens", texts, "int32", "megatron", f"part-{number:012d}")
        np.savez(
            archives / "archives" / f"part-{number:012d}.npz",
            x=np.frombuffer(chance.randbytes(ROWS // 4 * 600), np.int16).reshape(-1, 300),
            y=np.arange(ROWS // 4),
        )
    adopt([documents / "tokens"], documents / "root", from_="tokens", block_size="8KiB")
    adopt([archives / "archives"], archives / "root")
    frames = base / "adopted-frames"
    frames.mkdir()
    write_mds(frames / "mds", (0, 200, ROWS), compressor=ZSTD)
    adopt([frames / "mds"], frames / "root")
    return [*made, folder, arrays, tables, pictures, lines, documents, archives, frames]


@pytest.mark.drill
@pytest.mark.parametrize(
    ("where", "compiled"),
    drill_cases(
        [("local", "compiled"), ("local", "plain"), ("cache", "compiled"), ("cache", "plain")], [1, 2]
    ),
)
@pytest.mark.parametrize("turn", range(drill_count(20)))
def test_no_change_of_a_file_reaches_a_batch_or_ends_the_process(
    folders: list[Path], where: str, compiled: str, turn: int
) -> None:
    """25 changes or more a turn."""
    if compiled == "compiled":
        pytest.importorskip("shardkit.loader.block_rows")
    seed, changes = f"{os.environ.get('SHARDKIT_SEED', '17')}-{turn}", len(folders)
    used = [folder for folder in folders if where == "local" or "adopted" not in folder.name]
    done = subprocess.run(
        [sys.executable, str(READER), where, compiled, seed, str(changes), *map(str, used)],
        capture_output=True, text=True, timeout=3600, check=False,
    )  # fmt: skip
    assert done.returncode >= 0, (
        f"signal {-done.returncode} while reading {done.stdout.splitlines()[-1:]}\n{done.stderr}"
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    print(f"seed {seed}, {where}, {compiled}: {seen}")
    assert (seen["wrong"], seen["unnamed"]) == (0, 0), done.stdout[-2000:]
    assert seen["changes"] >= changes
    assert seen["batches"] > 0
    if where == "local":
        assert seen["errors"] > 0
