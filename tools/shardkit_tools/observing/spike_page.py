"""The samples of a step with a spike as an HTML page without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from shardkit.audit import SampleLoss
from shardkit.dataset import Dataset
from shardkit.dataset.sample_view import thumbnail
from shardkit.notebook import escape, page, value_text

_CHARACTERS = 4000  # most that is shown of a text


def spike_page(run: str, step: int, dataset: Dataset, samples: Sequence[SampleLoss]) -> str:
    """Return a page with the fields of each sample below its loss; pictures are shown, texts cut at 4,000 characters.

    Args:
        run: the run directory.
        step: number of the step.
        dataset: the version that the step consumed; samples are verified when they are read.
        samples: samples of the step, in the order of the page.
    """
    parts = [part for one in samples for part in _section(one, dataset[one.sample])]
    head = '<!doctype html><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
    policy = "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">"
    return head + policy + page("spike", f"{run}, step {step}", f"{len(samples)} samples", *parts)


def _section(one: SampleLoss, sample: dict[str, Any]) -> Iterable[str]:
    came = "" if one.source is None else f", from {one.source[0]} row {one.source[1]}"
    yield f"<h3>loss {one.loss:.4g}: sample {one.sample}, key {escape(one.key)}, {escape(one.stratum + came)}</h3>"
    for name, value in sample.items():
        picture, text = thumbnail(value), _text(value)
        if picture is not None:
            yield f'<p>{escape(name)}<br><img alt="{escape(name)}" src="{picture}"></p>'
        elif text is not None:
            yield f'{escape(name)}<pre style="white-space:pre-wrap">{escape(text)}</pre>'
        else:
            yield f"<p>{escape(name)}: {escape(value_text(value))}</p>"


def _text(value: object) -> str | None:
    """Return the beginning of a text, None for other values."""
    if isinstance(value, bytes):
        try:
            value = value[: 4 * _CHARACTERS].decode()
        except UnicodeDecodeError:
            return None
    if not isinstance(value, str):
        return None
    return value if len(value) <= _CHARACTERS else value[:_CHARACTERS] + "…"
