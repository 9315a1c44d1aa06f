"""Short text and HTML forms of samples: types and sizes instead of megabytes of bytes."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from shardkit.errors import ShardkitError
from shardkit.formats import Schema
from shardkit.notebook import escape, table, value_text

_PICTURE: Final = 96  # pixels of the longer side of a thumbnail
_MAX_BYTES: Final = 16 << 20  # a larger file is not decoded for a page
_ROWS: Final = 20  # samples on a page
_PICTURES: Final = 6  # samples on the page of a dataset


class Sample(dict[str, Any]):
    """A sample: a dict of its fields with a short representation.

    Attributes:
        classes: names of the values of ``label``; empty if they have none.
    """

    __slots__ = ("classes",)

    def __init__(self, fields: Mapping[str, Any], classes: Sequence[str] = ()) -> None:
        super().__init__(fields)
        self.classes = classes

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{name!r}: {text}' for name, text in _texts(self))}}}"

    def _repr_html_(self) -> str:
        return samples_page([self])

    def __reduce__(self) -> tuple[Any, ...]:
        return Sample, (dict(self), self.classes)


class SampleList(list[dict[str, Any]]):
    """A list of samples, printed one per line."""

    def __repr__(self) -> str:
        return f"[{(',' + chr(10) + ' ').join(map(repr, self))}]"

    def _repr_html_(self) -> str:
        return samples_page(self[:_ROWS])


def _texts(sample: dict[str, Any]) -> Iterable[tuple[str, str]]:
    for name, value in sample.items():
        text = value_text(value)
        if (
            name == "label"
            and type(value) is int
            and isinstance(sample, Sample)
            and 0 <= value < len(sample.classes)
        ):
            text += f" ({sample.classes[value]})"
        yield name, text


def samples_page(samples: Sequence[dict[str, Any]]) -> str:
    """Return HTML: thumbnails with their class if a field holds images, then a table of all fields."""
    figures, rows = [], []
    for sample in samples:
        shown = dict(_texts(sample))
        for name, value in sample.items():
            if (source := thumbnail(value)) is not None:
                caption = escape(shown.get("label", ""))
                figures.append(
                    f'<figure style="display:inline-block;margin:0 8px 8px 0"><img alt="{escape(name)}" src="{source}">'
                    f'<figcaption style="font-size:80%">{caption}</figcaption></figure>'
                )
        rows.append(list(shown.values()))
    names = list(samples[0]) if samples else []
    return "".join(figures) + table(names, rows, most=_ROWS)


def first_page(schema: Schema, head: Callable[[int], Sequence[dict[str, Any]]]) -> str:
    """Return the samples of ``head`` as HTML; empty if no field can hold images."""
    if not any(kind.kind == "bytes" for kind in schema.values()):
        return ""
    try:
        return samples_page(head(_PICTURES))
    except ShardkitError as error:  # the rest of the page is still useful
        return f"<p>its first samples cannot be shown: {escape(str(error))}</p>"


def thumbnail(value: object) -> str | None:
    """Return an image file as a data: URL of a small PNG; None for other values, or without Pillow."""
    if not isinstance(value, bytes) or len(value) > _MAX_BYTES:
        return None
    try:
        from shardkit.images.decoding import decode_picture

        pixels = decode_picture(value)
        from PIL import Image

        image = Image.fromarray(pixels)
        image.thumbnail((_PICTURE, _PICTURE))
    except Exception:  # noqa: BLE001  bytes of any kind come here: what is no picture has none
        return None
    sink = io.BytesIO()
    image.save(sink, "PNG")
    return f"data:image/png;base64,{base64.b64encode(sink.getvalue()).decode()}"
