"""A dataset as a notebook shows it: fields, strata, and its first pictures, from verified blocks."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from html import escape

from shardkit.dataset.samples import Samples
from shardkit.errors import ShardkitError
from shardkit.formats.tar_members import sniff_extension
from shardkit.notebook import page, table

_PICTURES = 6
_MAX_BYTES = 64 << 10  # of a picture; what is shown is in the notebook's file
_TYPES = {"jpg": "jpeg", "png": "png", "gif": "gif", "webp": "webp"}


def dataset_page(dataset: Samples, name: str, strata: Mapping[str, int]) -> str:
    """HTML without scripts or addresses; everything that comes out of the dataset is escaped."""
    fields = table(["field", "type"], dataset.schema.items(), most=200)
    counts = table(["stratum", "samples"], strata.items())
    return page("dataset", name, f"{len(dataset):,} samples", fields, counts, *_pictures(dataset))


def _pictures(dataset: Samples) -> Iterator[str]:
    name = next((name for name, kind in dataset.schema.items() if kind.kind == "bytes"), None)
    if name is None:
        return
    try:
        samples = dataset.head(_PICTURES)
    except ShardkitError as error:  # a page that says so is more use than none
        yield f"<p>its first samples cannot be shown: {escape(str(error))}</p>"
        return
    for sample in samples:
        data = sample[name]
        kind = _TYPES.get(sniff_extension(data)) if data is not None and len(data) <= _MAX_BYTES else None
        if kind is not None:
            text = base64.b64encode(data).decode()
            yield f'<img alt="{escape(name)}" style="height:64px" src="data:image/{kind};base64,{text}">'
