"""What a notebook shows of a dataset: its facts and first pictures, escaped, verified and small."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import shardkit


def png(shade: int) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("L", (4, 3), shade).save(buffer, "png")
    return buffer.getvalue()


def made(root: Path, pictures: list[bytes]) -> shardkit.Dataset:
    with shardkit.create(root, {"image": "bytes", "kind": "str"}, stratify="kind", shuffle=False) as writer:
        for number, data in enumerate(pictures):
            writer.add({"image": data, "kind": f"<script>{number % 20:02}"})
    return shardkit.open(root)


def test_fields_strata_and_pictures_are_shown_escaped(tmp_path: Path) -> None:
    pictures = [png(number) for number in range(40)]
    ds = made(tmp_path / "a", pictures)
    page = ds._repr_html_()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "40 samples" in page
    assert "and 8 more" in page
    shown = [base64.b64decode(text) for text in re.findall(r"base64,([^\"]+)", page)]
    assert shown == [sample["image"] for sample in ds.head(6)]
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)  # type: ignore[method-assign]
    parser.feed(page)
    assert set(tags) == {"div", "p", "b", "code", "table", "tr", "th", "td", "img"}


def test_large_files_stay_out_of_the_notebook(tmp_path: Path) -> None:
    ds = made(tmp_path / "a", [png(1) + bytes(5 << 20)] * 8)
    assert len(ds._repr_html_()) < 10_000


def test_damage_is_said_and_nothing_of_it_shown(tmp_path: Path) -> None:
    ds = made(tmp_path / "a", [png(number) for number in range(8)])
    [shard] = (tmp_path / "a" / "objects").rglob("*.tar")
    data = bytearray(shard.read_bytes())
    data[600] ^= 1
    shard.write_bytes(data)
    page = ds._repr_html_()
    assert "mismatch" in page
    assert "base64" not in page
