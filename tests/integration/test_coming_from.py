"""The page for those who come from another loader: its lines run, on data that the other one wrote or reads."""

from __future__ import annotations

import importlib
import io
import json
import re
import shlex
import struct
import tarfile
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shardkit
from tests.command_line import call

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"
SECTIONS = dict(part.split("\n", 1) for part in re.split(r"(?m)^## ", PAGE.read_text(encoding="utf-8"))[1:])
COUNT = 66


@pytest.fixture(scope="module")
def samples() -> list[tuple[bytes, int]]:
    image = pytest.importorskip("PIL.Image")
    found = []
    for number in range(COUNT):
        file = io.BytesIO()
        image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(file, "JPEG")
        found.append((file.getvalue(), number % 3))
    return found


def write_folder(samples: list[tuple[bytes, int]]) -> None:
    for number, (data, label) in enumerate(samples):
        path = Path("photos") / f"class{label}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def write_tars(samples: list[tuple[bytes, int]]) -> None:
    Path("tars").mkdir()
    with tarfile.open("tars/00000.tar", "w") as tar:
        for number, (data, label) in enumerate(samples):
            for name, content in (("jpg", data), ("cls", str(label).encode())):
                info = tarfile.TarInfo(f"{number:06d}.{name}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def write_mds(samples: list[tuple[bytes, int]]) -> None:
    """One shard, as Streaming's MDSWriter lays it out."""
    Path("mds").mkdir()
    rows = [struct.pack("<I", len(data)) + data + struct.pack("<q", label) for data, label in samples]
    about = {"column_names": ["image", "label"], "format": "mds", "version": 2}
    config = json.dumps(about).encode()
    offsets = np.cumsum([4 + 4 * (len(rows) + 1) + len(config), *map(len, rows)]).astype("<u4")
    body = struct.pack("<I", len(rows)) + offsets.tobytes() + config + b"".join(rows)
    Path("mds/shard.00000.mds").write_bytes(body)
    shard = about | {
        "column_encodings": ["jpeg", "int"], "column_sizes": [None, 8], "compression": None, "hashes": [],
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(body), "hashes": {}}, "zip_data": None,
        "samples": len(rows), "size_limit": 1 << 26,
    }  # fmt: skip
    Path("mds/index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))


def write_hf(samples: list[tuple[bytes, int]]) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])}
    )
    columns = {
        "image": [{"bytes": data, "path": None} for data, _ in samples],
        "label": [label for _, label in samples],
    }
    datasets.Dataset.from_dict(columns, features=features).save_to_disk("hf")


def leave(samples: list[tuple[bytes, int]]) -> None:
    """LitData's own reader hands out the samples."""


WRITERS = {
    "torchvision ImageFolder": write_folder,
    "WebDataset": write_tars,
    "MosaicML MDS": write_mds,
    "Hugging Face datasets": write_hf,
    "LitData": leave,
}
RUNS_HERE = {"webdataset": {"wds": "webdataset"}, "datasets": {"datasets": "datasets"}}
"""Left sides whose library the tests have: title → name in the code → module."""


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # webdataset leaves its tars open
@pytest.mark.parametrize("name", SECTIONS)
def test_both_sides_run(
    name: str, samples: list[tuple[bytes, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    WRITERS[name](samples)
    trained: list[tuple[int, int]] = []

    def train_step(images: Any, labels: Any) -> None:
        trained.append((len(images), len(set(np.asarray(labels).tolist()))))

    rows = [{"image": data, "label": label} for data, label in samples]
    names: dict[str, Any] = {
        "shardkit": shardkit, "train_step": train_step, "islice": islice, "epoch": 0, "done": 0,
        "litdata": SimpleNamespace(StreamingDataset=lambda folder: rows if folder == "chunks" else []),
    }  # fmt: skip
    for line in re.findall(r"(?m)^\$ shardkit (.*)$", SECTIONS[name]):
        assert call(*shlex.split(line), "--jobs", 1)[0] == 0
    for title, code in re.findall(r'```python title="(\w+)"\n(.*?)```', SECTIONS[name], re.DOTALL):
        program = compile(code, f"{name}, {title}", "exec")
        if title == "shardkit":
            trained.clear()
            names["state"] = fresh_state()
        elif title in RUNS_HERE:
            names |= {word: importlib.import_module(module) for word, module in RUNS_HERE[title].items()}
        elif title != "once":
            continue  # a library that the tests do not have: its lines are Python
        exec(program, names)
        assert title == "once" or trained[0] == (64, 3), title
    assert trained == [(64, 3)], "one step of 64 samples of all three classes"


def fresh_state() -> dict[str, Any]:
    """Of a loader that begins."""
    ds = shardkit.open("data/cats")
    with ds.loader(ds.plan(global_batch=64, seed=0)) as loader:
        return loader.state_dict()


def test_every_loader_has_its_section() -> None:
    assert set(SECTIONS) == set(WRITERS)
