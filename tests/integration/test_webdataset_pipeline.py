"""A webdataset pipeline over a plan has the decoded samples of its tars in plan order, with any number of workers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

wds = pytest.importorskip("webdataset")
image = pytest.importorskip("PIL.Image")
torch = pytest.importorskip("torch")

import shardkit  # noqa: E402
from shardkit.errors import UsageError  # noqa: E402
from shardkit.integrations.webdataset import samples  # noqa: E402
from tests.command_line import call  # noqa: E402

ROWS, BATCH = 60, 12
SCHEMA = {
    "picture": "bytes", "label": "int64", "caption": "str", "about": "json", "box": "float32[4]", "tokens": "int32[*]",
    "note": "str?",
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> shardkit.Dataset:
    root = tmp_path_factory.mktemp("data") / "pictures"
    with shardkit.create(str(root), schema=SCHEMA, format="tar") as writer:
        for n in range(ROWS):
            out = io.BytesIO()
            image.new("RGB", (8, 8), (n, 2 * n, 3 * n)).save(out, "JPEG")
            row: dict[str, Any] = {
                "picture": out.getvalue(), "label": n % 7, "caption": f"picture {n}", "about": {"n": n},
                "box": np.arange(n, n + 4, dtype=np.float32), "tokens": np.arange(n, dtype=np.int32),
            }  # fmt: skip
            writer.add(row | ({"note": f"note {n}"} if n % 3 else {}), key=f"k{n:03d}")
    return shardkit.open(str(root))


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(value, other[name]) if isinstance(value, np.ndarray) else value == other[name]
        for name, value in one.items()
    )


# webdataset's tar reader leaves its file open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_samples_are_those_of_the_exported_tars(ds: shardkit.Dataset, tmp_path: Path) -> None:
    """Field by field, decoded by webdataset from a tar and from the plan."""
    assert call("export", ds.repository.url, "--as", "webdataset", "--out", tmp_path / "all.tar")[0] == 0
    tars = wds.DataPipeline(
        wds.SimpleShardList(str(tmp_path / "all.tar")), wds.tarfile_to_samples(), wds.decode("rgb8")
    )
    # members of tars are named key.field.extension: webdataset calls the part after the first dot its name
    by_key = {
        sample["__key__"]: {name: value for name, value in sample.items() if not name.startswith("__")}
        for sample in tars
    }
    fields = {
        "picture": "picture.jpg", "label": "cls", "caption": "caption.txt", "about": "about.json",
        "box": "box.npy", "tokens": "tokens.npy", "note": "note.txt",
    }  # fmt: skip
    plan = ds.plan(global_batch=BATCH, lanes=4, seed=5)
    order = [ds.key(int(n)) for step in range(ROWS // BATCH) for n in plan.step(step).ravel()]
    pipeline = wds.DataPipeline(samples(ds, plan, names=fields), wds.decode("rgb8"))
    found = list(pipeline)
    assert [sample["__key__"] for sample in found] == order
    assert len(by_key) == ROWS
    for sample in found:
        own = {name: value for name, value in sample.items() if not name.startswith("__")}
        assert equal(own, by_key[sample["__key__"]]), sample["__key__"]


@pytest.mark.parametrize("workers", [0, 2])
def test_one_line_replaces_the_source_of_a_pipeline(ds: shardkit.Dataset, workers: int) -> None:
    plan = ds.plan(global_batch=BATCH, lanes=4, seed=5)
    source = samples(ds, plan)
    pipeline = wds.DataPipeline(
        source, wds.decode("rgb8"), wds.to_tuple("jpg", "cls", "__key__"), wds.batched(BATCH)
    )
    loader = wds.WebLoader(pipeline, batch_size=None, num_workers=workers)
    for epoch in range(2):
        source.data.set_epoch(epoch)
        steps = list(loader)
        assert len(steps) == ROWS // BATCH
        for number, (pixels, labels, keys) in enumerate(steps):
            planned = plan.step(epoch * (ROWS // BATCH) + number).ravel().tolist()
            assert list(keys) == [ds.key(n) for n in planned]
            assert np.asarray(labels).tolist() == [ds[n]["label"] for n in planned]
            assert np.asarray(pixels).shape == (BATCH, 8, 8, 3)


def test_default_names_are_extensions(ds: shardkit.Dataset) -> None:
    one = next(iter(samples(ds, ds.plan(global_batch=BATCH, lanes=4))))
    without_note = {"__key__", "__url__", "jpg", "cls", "json", "box.npy", "tokens.npy"}
    assert set(one) in (without_note | {"txt"}, without_note | {"caption.txt", "note.txt"})
    assert all(isinstance(value, bytes) for name, value in one.items() if not name.startswith("__"))


def test_what_a_pipeline_does_itself_is_refused(ds: shardkit.Dataset) -> None:
    plan = ds.plan(global_batch=BATCH, lanes=4)
    with pytest.raises(UsageError, match="decode= is not for webdataset"):
        samples(ds, plan, decode={"picture": "rgb8"})
    with pytest.raises(UsageError, match="'image' is no field; the fields are picture"):
        samples(ds, plan, names={"image": "jpg"})
