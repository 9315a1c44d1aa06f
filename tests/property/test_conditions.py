"""Conditions select the rows for which Python, with missing values as in SQL, finds them true."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkit
from shardkit.dataset.expressions import Where
from shardkit.errors import UsageError
from shardkit.formats import Schema

Row = dict[str, Any]
Found = bool | None  # None: neither true nor false
Condition = tuple[str, Callable[[Row], Found]]

TYPES = {
    "big": "int64", "small": "int8?", "huge": "uint64", "half": "float16?", "score": "float32", "good": "bool?",
    "text": "str", "note": "str?",
}  # fmt: skip
NUMBERS: dict[str, list[Any]] = {
    "big": [0, 1, -1, 3, -(2**63), 2**63 - 1, 2**53 + 1],
    "small": [0, 1, -1, 3, -128, 127, None],
    "huge": [0, 1, 3, 2**63, 2**64 - 1, 2**53 + 1],
    "half": [0.0, 1.0, -1.5, 0.25, 65504.0, None],
    "score": [0.0, 1.0, -1.5, 0.25, 2.0**100],
    "good": [True, False, None],
}
TEXTS = ["", "a", "ab", "abc", "b", "a\0", "é", "漢", "\U0001f600", "x" * 500]
ROWS = [
    {name: values[(row * step) % len(values)] for step, (name, values) in enumerate(NUMBERS.items(), 1)}
    | {"text": TEXTS[row % len(TEXTS)], "note": [*TEXTS, None][(row * 3) % 11]}
    for row in range(60)
]
LITERALS = [
    0,
    1,
    -1,
    3,
    300,
    1.5,
    0.25,
    -1.5,
    2**63,
    2**64,
    -(2**70),
    2**53 + 1,
    10**400,
    -1e300,
    65520.0,
    True,
]
COMPARISONS = {
    "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


@pytest.fixture(scope="module")
def dataset() -> Iterator[shardkit.Dataset]:
    with TemporaryDirectory() as folder:
        with shardkit.create(f"{folder}/data", TYPES, block_size="1KiB", shuffle=False) as writer:
            for row in ROWS:
                writer.add(row)
        yield shardkit.open(f"{folder}/data")


def compared(left: Any, word: str, right: Any) -> Found:
    return None if left is None or right is None else COMPARISONS[word](left, right)


def both(left: Found, right: Found) -> Found:
    return False if left is False or right is False else None if None in (left, right) else True


def negated(value: Found) -> Found:
    return None if value is None else not value


words = st.sampled_from(sorted(COMPARISONS))


@st.composite
def comparisons(draw: st.DrawFn) -> Condition:
    names = sorted(NUMBERS) if draw(st.booleans()) else ["text", "note"]
    name, other = draw(st.sampled_from(names)), draw(st.sampled_from(names))
    literals = st.sampled_from(LITERALS if name in NUMBERS else TEXTS)
    one, two, word, second = draw(literals), draw(literals), draw(words), draw(words)
    match draw(st.integers(0, 5)):
        case 0:
            return f"{name} {word} {one!r}", lambda row: compared(row[name], word, one)
        case 1:
            return f"{one!r} {word} {name}", lambda row: compared(one, word, row[name])
        case 2:
            return f"{one!r} {word} {name} {second} {two!r}", lambda row: both(
                compared(one, word, row[name]), compared(row[name], second, two)
            )
        case 3:
            is_in = draw(st.booleans())
            given = f"{name} {'in' if is_in else 'not in'} [{one!r}, {two!r}]"
            return given, lambda row: None if row[name] is None else (row[name] in [one, two]) == is_in
        case 4:
            return name, lambda row: None if row[name] is None else bool(row[name])
    if {name, other} & {"half", "score"}:  # two fields are compared in the type that NumPy gives both
        other = name
    return f"{name} {word} {other}", lambda row: compared(row[name], word, row[other])


def larger(inner: st.SearchStrategy[Condition]) -> st.SearchStrategy[Condition]:
    def joined(first: Condition, second: Condition, word: str) -> Condition:
        (left, is_left), (right, is_right) = first, second
        if word == "and":
            return f"({left}) and ({right})", lambda row: both(is_left(row), is_right(row))
        return f"({left}) or ({right})", lambda row: negated(
            both(negated(is_left(row)), negated(is_right(row)))
        )

    def inverse(one: Condition) -> Condition:
        return f"not ({one[0]})", lambda row: negated(one[1](row))

    return st.builds(joined, inner, inner, st.sampled_from(["and", "or"])) | st.builds(inverse, inner)


@given(st.recursive(comparisons(), larger, max_leaves=4))
def test_rows_for_which_it_is_true_are_selected(dataset: shardkit.Dataset, condition: Condition) -> None:
    text, is_true = condition
    expected = [number for number, row in enumerate(ROWS) if is_true(row)]
    try:
        view = dataset.select(where=text)
    except UsageError as error:
        assert "no row is selected" in str(error)  # noqa: PT017  most conditions select some
        assert expected == []
    else:
        assert [view.key(number) for number in range(len(view))] == [f"{row:010d}" for row in expected]


@pytest.mark.parametrize("number", [2**63, -(2**70), 10**400])
def test_truths_are_compared_with_integers_of_any_size(dataset: shardkit.Dataset, number: int) -> None:
    assert len(dataset.select(where=f"good {'<' if number > 0 else '>'} {number}")) == len(dataset)


@pytest.mark.parametrize(
    "text",
    [
        "", "big <", "nothing < 5", "image == 'x'", "1 < 2", "__import__('os').system('true') == big", "big.real < 1",
        "(lambda: big)() < 1", "big[0] < 1", "big + 1 < 2", "big in text", "big in (small, 3)", "big in 5",
        "big in ((1, 2), 3)", "-big == -3", "big == -text", "big == None", "big is 1", "big < 1 < 2", "big == 1j",
        "text == b'a'", "big == 'a'", "text < 5", "text in ('a', 5)", "text == big", "'a' < big",
    ],
)  # fmt: skip
def test_everything_else_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="where="):
        Where(text, Schema.parse(TYPES | {"image": "bytes"}))
