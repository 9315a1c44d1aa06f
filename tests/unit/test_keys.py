"""Keys checked together are checked like keys one by one; texts packed together come back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import SampleError
from shardkit.formats import Texts
from shardkit.formats.writing import check_keys

GOOD = st.from_regex(r"[A-Za-z0-9_-]{1,80}", fullmatch=True)
ANY = GOOD | st.text(max_size=100) | st.sampled_from(["", "a,b", ",", "a\n", "x" * 80, "x" * 81, "é"])


@given(st.lists(ANY, min_size=1, max_size=8), st.integers(18, 90))
def test_many_keys_are_refused_where_one_of_them_is(keys: list[str], limit: int) -> None:
    wrong = None
    for key in keys:
        try:
            check_keys([key], limit)
        except SampleError as error:
            wrong = str(error)
            break
    if wrong is None:
        check_keys(keys, limit)
        return
    with pytest.raises(SampleError) as caught:
        check_keys(keys, limit)
    assert str(caught.value) == wrong


def test_a_key_that_is_no_text_is_refused() -> None:
    with pytest.raises(SampleError, match="7"):
        check_keys(["a", 7], 80)  # type: ignore[list-item]


@given(st.lists(st.text(alphabet=st.characters(codec=None, exclude_categories=[])), max_size=8))
def test_texts_come_back(texts: list[str]) -> None:
    packed = Texts.pack(texts)
    assert packed.to_list() == texts
    packed.check("texts", len(texts))
