"""Values as people type them: sizes, keys, endpoints and conditions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkit
from shardkit.errors import ConfigurationError, SampleError, UsageError
from shardkit.formats import Texts
from shardkit.formats.writing import check_keys
from shardkit.ranges import parse_size

# ---- Sizes as people write them


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("256MiB", 268_435_456),
        ("2 GB", 2_000_000_000),
        ("1.5KiB", 1536),
        ("0", 0),
        ("7", 7),
        ("4k", 4096),
        (12, 12),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 XB", "1e9", -5])
def test_other_things_are_refused(text: str | int) -> None:
    with pytest.raises(ConfigurationError):
        parse_size(text)


# ---- Keys checked together are checked like keys one by one; texts packed together come back


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


# ---- Endpoints of object stores that the environment names wrongly


@pytest.mark.parametrize(
    ("variable", "url"),
    [
        ("AWS_ENDPOINT_URL", "s3://bucket/x"),
        ("AWS_ENDPOINT_URL_S3", "s3://bucket/x"),
        ("STORAGE_EMULATOR_HOST", "gs://bucket/x"),
    ],
)
@pytest.mark.parametrize(
    "endpoint",
    ["not a url", "http://127.0.0.1:99999", "http://127.0.0.1:port", "http://", "ftp://host", "http://[::1", "http://h\n"],
)  # fmt: skip
def test_an_endpoint_that_is_no_url_is_named(
    variable: str, url: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, endpoint)
    with pytest.raises(UsageError, match=f"{variable}=.* is no address of an object store"):
        shardkit.open(url)
