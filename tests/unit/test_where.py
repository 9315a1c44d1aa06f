"""Conditions over fields: what they mean, and that nothing else is understood."""

from __future__ import annotations

import numpy as np
import pytest

from shardkit.dataset.expressions import Where
from shardkit.errors import UsageError
from shardkit.formats import Schema

SCHEMA = Schema.parse({"label": "int64", "score": "float32", "lang": "str", "image": "bytes"})
COLUMNS = {
    "label": np.array([0, 3, 5, 9]),
    "score": np.array([0.1, 0.5, 0.5, 0.9], dtype=np.float32),
    "lang": np.array(["en", "de", "en", "fr"]),
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("label < 5", [1, 1, 0, 0]),
        ("3 <= label < 9", [0, 1, 1, 0]),
        ("label == 9 or lang == 'de'", [0, 1, 0, 1]),
        ("lang in ('en', 'fr') and not (label == 0)", [0, 0, 1, 1]),
        ("lang not in ['en']", [0, 1, 0, 1]),
        ("score > 0.4 and label != 3", [0, 0, 1, 1]),
        ("label > -1", [1, 1, 1, 1]),
    ],
)
def test_conditions(text: str, expected: list[int]) -> None:
    where = Where(text, SCHEMA)
    assert where({name: COLUMNS[name] for name in where.fields}).tolist() == [bool(x) for x in expected]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "label <",
        "nothing < 5",
        "image == 'x'",
        "1 < 2",
        "__import__('os').system('true') == label",
        "label.real < 1",
        "(lambda: label)() < 1",
        "label[0] < 1",
        "label + 1 < 2",
        "label in lang",
    ],
)
def test_everything_else_is_refused(text: str) -> None:
    def ask() -> None:
        where = Where(text, SCHEMA)
        where({name: COLUMNS[name] for name in where.fields})

    with pytest.raises(UsageError):
        ask()
