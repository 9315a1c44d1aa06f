"""What a notebook shows of a dataset: its facts and first pictures, escaped, verified and small."""

from __future__ import annotations

import base64
import io
import pickle
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np

import shardkit
from shardkit.notebook import value_text
from shardkit.telemetry import Record, read_run
from shardkit.telemetry.records import record_path
from tests.flips import flip
from tests.pictures import grey


def pixels(data: bytes) -> bytes:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return image.convert("L").tobytes()


def made(root: Path, pictures: list[bytes]) -> shardkit.Dataset:
    with shardkit.create(root, {"image": "bytes", "kind": "str"}, stratify="kind", shuffle=False) as writer:
        for number, data in enumerate(pictures):
            writer.add({"image": data, "kind": f"<script>{number % 20:02}"})
    return shardkit.open(root)


def test_fields_strata_and_pictures_are_shown_escaped(tmp_path: Path) -> None:
    pictures = [grey(number) for number in range(40)]
    ds = made(tmp_path / "a", pictures)
    page = ds._repr_html_()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "40 samples" in page
    assert "and 8 more" in page
    shown = [base64.b64decode(text) for text in re.findall(r"base64,([^\"]+)", page)]
    assert [pixels(one) for one in shown] == [pixels(sample["image"]) for sample in ds.head(6)]
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)  # type: ignore[method-assign]
    parser.feed(page)
    assert set(tags) == {"div", "p", "b", "code", "table", "tr", "th", "td", "img", "figure", "figcaption"}


def test_strata_have_the_names_of_their_classes(tmp_path: Path) -> None:
    with shardkit.create(
        tmp_path / "a", {"label": "int8"}, stratify="label", classes=("cat", "dog")
    ) as writer:
        for number in range(40):
            writer.add({"label": number % 2})
    page = shardkit.open(tmp_path / "a")._repr_html_()
    assert ">0 cat<" in page
    assert ">1 dog<" in page


def test_large_files_stay_out_of_the_notebook(tmp_path: Path) -> None:
    ds = made(tmp_path / "a", [grey(1) + bytes(5 << 20)] * 8)
    assert len(ds._repr_html_()) < 10_000


def test_damage_is_said_and_nothing_of_it_shown(tmp_path: Path) -> None:
    ds = made(tmp_path / "a", [grey(number) for number in range(8)])
    [shard] = (tmp_path / "a" / "objects").rglob("*.tar")
    flip(shard, 600)
    page = ds._repr_html_()
    assert "mismatch" in page
    assert "base64" not in page


class Tables(HTMLParser):
    """Texts of the cells of a page, row by row."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def test_a_plan_shows_its_grid_balance_and_locality(tmp_path: Path) -> None:
    ds = made(tmp_path / "a", [bytes([number]) * 9 for number in range(64)])
    plan = ds.plan(16, lanes=4, seed=0)
    page = Tables(plan._repr_html_())
    assert page.tags == {"div", "p", "b", "code", "table", "tr", "th", "td"}
    assert page.rows[0] == ["step", "lane 0", "lane 1", "lane 2", "lane 3"]
    assert [row[0] for row in page.rows[1:5]] == ["0", "1", "2", "3"]
    for step, row in enumerate(page.rows[1:5]):
        for lane, text in enumerate(row[1:]):
            assert text == ", ".join(map(str, plan.cell(step, lane)[:3].tolist())) + ", …"
    balance = {row[0]: row[1:] for row in page.rows}
    assert balance["strata in a batch"][1] == "2"
    assert float(balance["strata in a batch"][0]) < 2
    assert [row[0] for row in page.rows[-3:]] == ["1", "2", "4"], "as many nodes as have lanes"


def test_a_run_shows_its_ranks_escaped(tmp_path: Path) -> None:
    for rank in range(2):
        path = record_path(tmp_path, rank)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(
            b"".join(
                Record(time=1000.0 + at, rank=rank, world=2, host="<script>n1", session="s", lanes=(rank,),
                       values={"loader.step": at * 10, "loader.steps": at * 10, "loader.samples": at * 640}).to_line()
                for at in range(3)
            )
        )  # fmt: skip
    page = read_run(tmp_path)._repr_html_()
    assert "<script" not in page
    rows = Tables(page).rows
    assert [row[:2] + row[3:4] for row in rows[1:3]] == [["0", "<script>n1", "20"], ["1", "<script>n1", "20"]]
    assert rows[1][4] == "640", "samples a second"
    assert "step 20" in page
    assert "no records yet" in read_run(tmp_path / "nothing")._repr_html_()


def test_samples_and_batches_print_in_a_few_short_lines(tmp_path: Path) -> None:
    schema = {"image": "bytes", "label": "int64", "tokens": "int32[2048]", "words": "int32[*]", "text": "str"}
    with shardkit.create(tmp_path / "a", schema, classes=("cat", "dog"), shuffle=False) as writer:
        for number in range(48):
            writer.add({
                "image": bytes(6_000 + 1_700 * number), "label": number % 2, "tokens": np.arange(2048, dtype=np.int32),
                "words": np.arange(number, dtype=np.int32), "text": "a long text " * 100,
            })  # fmt: skip
    ds = shardkit.open(tmp_path / "a")
    sample = repr(ds[17])
    assert sample.startswith(
        "{'image': bytes, 34.1 KiB, 'label': 1 (dog), 'tokens': int32[2048], 'words': int32[17], "
    )
    assert len(sample) < 250
    assert len(repr(ds.head(3)).splitlines()) == 3
    copy = pickle.loads(pickle.dumps(ds[17]))
    assert repr(copy) == sample
    assert copy["image"] == ds[17]["image"]
    with ds.loader(ds.plan(global_batch=48, lanes=1), tensors=False) as loader:
        batch = repr(next(iter(loader)))
    assert "\n  image: 48 × bytes, 5.86 to 83.9 KiB\n" in batch
    assert "\n  tokens: int32[48,2048]\n" in batch
    assert "\n  words: 48 × int32[*], 0 to 47 items\n" in batch
    assert len(batch) < 500
    assert "dog" in ds.head(2)._repr_html_()  # type: ignore[attr-defined]


def test_any_value_prints_in_one_short_line() -> None:
    values = [
        None, b"", [], [None], ["x" * 999], [1] * 10**5, {"a": "b" * 10**5}, np.zeros(0), np.float16(1), "\n" * 500,
        (np.zeros(0), np.zeros(1, np.int64)), [b"1", None, b"22"], np.zeros((2, 3)), float("nan"),
    ]  # fmt: skip
    assert value_text([b"1", None, b"22"]) == "3 × bytes, 1 to 2 bytes, 1 missing"
    for value in values:
        text = value_text(value)
        assert 0 < len(text) < 150
        assert "\n" not in text
