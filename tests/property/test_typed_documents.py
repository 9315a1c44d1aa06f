"""Documents: one spelling each, and nothing but an error in words for any other bytes."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from shardkit.documents import (
    Digest,
    Document,
    Name,
    Natural,
    Record,
    Time,
    configure,
    decode,
    decode_plain,
    encode,
    parse_toml,
    seal,
    sha256_digest,
    unseal,
)
from shardkit.errors import ConfigurationError, FormatError, IntegrityError, UsageError

MAX_BYTES = 100_000


class Part(Record, frozen=True, kw_only=True):
    name: Name
    rows: Natural
    flag: bool = False


class Whole(Document, frozen=True, kw_only=True, tag="shardkit-whole/1"):
    parts: Annotated[tuple[Part, ...], Meta(max_length=5)]
    parent: Digest | None
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    time: Time = "2026-01-01T00:00:00Z"


class Ranks(Document, frozen=True, kw_only=True, tag="shardkit-ranks/1"):
    ranks: frozenset[int]


class Store(Record, frozen=True, kw_only=True):
    bandwidth: Annotated[float, Meta(gt=0)] = 1.0


class Settings(Record, frozen=True, kw_only=True):
    lanes: Annotated[int, Meta(ge=1, le=512)] = 64
    store: Store = Store()


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
parts = st.builds(Part, name=texts.filter(bool), rows=st.integers(0, 2**62), flag=st.booleans())
wholes = st.builds(
    Whole,
    parts=st.lists(parts, max_size=5).map(tuple),
    parent=st.none() | st.binary().map(sha256_digest),
    settings=st.dictionaries(texts, plain, max_size=3),
)


@given(wholes)
def test_a_document_has_one_spelling(document: Whole) -> None:
    data = encode(document)
    assert decode(Whole, data, "whole", max_bytes=MAX_BYTES) == document
    values = json.loads(data)
    assert values["format"] == "shardkit-whole/1"
    assert data == json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    for other in (json.dumps(values, sort_keys=True), json.dumps(values, indent=1), data.decode() + "\n"):
        with pytest.raises(FormatError, match=r"^whole: "):
            decode(Whole, other.encode(), "whole", max_bytes=MAX_BYTES)


@given(plain)
def test_values_without_a_type_are_spelled_as_json_spells_them(value: Any) -> None:
    data = encode(value)
    assert data == json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert decode_plain(data, "value", max_bytes=MAX_BYTES) == value


@pytest.mark.parametrize(
    "value", [0.5, float("nan"), {1, 2}, b"x", 2**63, {1: 2}, "\ud800", {"a": [object()]}]
)
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="canonical JSON"):
        encode(value)


def test_values_that_are_nested_deeply_are_refused() -> None:
    deep: object = 1
    for _ in range(100):
        deep = [deep]
    with pytest.raises(UsageError, match="deeper"):
        encode(deep)


OTHER_SPELLINGS = [
    b'{"b":1,"a":2}', b'{"a": 1}', b'{"a":1,"a":1}', b"1.0", b"1e3", b"NaN", b'"\\u00e4"', b"[1,]", b"\xff", b"01",
    b"9223372036854775808", b"[" * 5000, b"", b"1 ", b'"\\ud800"', b"-0", b"9" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("data", OTHER_SPELLINGS)
def test_other_spellings_of_values_without_a_type_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        decode_plain(data, max_bytes=MAX_BYTES)
    with pytest.raises(FormatError, match="at most 3"):
        decode_plain(b'"long"', max_bytes=3)


@given(wholes, st.data())
def test_any_other_field_is_an_error_that_names_the_document(document: Whole, data: st.DataObject) -> None:
    """A field is replaced, removed or added: refused, or valid and then spelled as it is written."""
    values = json.loads(encode(document))
    key = data.draw(st.sampled_from([*values, "more"]))
    if data.draw(st.booleans()):
        values[key] = data.draw(plain)
    else:
        values.pop(key, None)
    forged = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    try:
        found = decode(Whole, forged, "whole", max_bytes=MAX_BYTES)
    except FormatError as error:
        message = str(error)
    else:
        assert encode(found) == forged
        return
    assert message.startswith("whole: ")


HOSTILE = {
    "nothing": b"",
    "no JSON": b"\xff\xfe{}",
    "cut": b'{"parent":null,',
    "deep list": b"[" * 200_000,
    "deep object": b'{"settings":' * 50_000,
    "deep settings": b'{"format":"shardkit-whole/1","parent":null,"parts":[],"settings":{"a":'
    + b"[" * 40_000
    + b"]" * 40_000
    + b"}}",
    "giant number": b'{"format":"shardkit-whole/1","parent":null,"parts":[{"name":"x","rows":'
    + b"9" * 90_000
    + b"}]}",
    "large number": b'{"format":"shardkit-whole/1","parent":null,"parts":[{"name":"x","rows":4611686018427387905}]}',
    "float": b'{"format":"shardkit-whole/1","parent":null,"parts":[],"settings":{"a":0.5}}',
    "whole float": b'{"format":"shardkit-whole/1","parent":null,"parts":[{"name":"x","rows":1.0}]}',
    "duplicate key": b'{"format":"shardkit-whole/1","parent":null,"parent":null,"parts":[]}',
    "written default": b'{"format":"shardkit-whole/1","parent":null,"parts":[],"settings":{}}',
    "escaped": b'{"format":"shardkit-whole/1","parent":null,"parts":[{"name":"\\u0061","rows":1}]}',
    "surrogate": b'{"format":"shardkit-whole/1","parent":null,"parts":[{"name":"\\ud800","rows":1}]}',
    "bool for a number": b'{"format":"shardkit-whole/1","parent":null,"parts":[{"name":"x","rows":true}]}',
    "too many": b'{"format":"shardkit-whole/1","parent":null,"parts":['
    + b",".join([b'{"name":"x","rows":1}'] * 6)
    + b"]}",
    "another format": b'{"format":"shardkit-whole/2","parent":null,"parts":[]}',
    "no format": b'{"parent":null,"parts":[]}',
    "a digest in capitals": b'{"format":"shardkit-whole/1","parent":"sha256:' + b"A" * 64 + b'","parts":[]}',
    "a line end behind a digest": b'{"format":"shardkit-whole/1","parent":"sha256:'
    + b"a" * 64
    + b'\\n","parts":[]}',
    "too large": b'"' + b"x" * MAX_BYTES + b'"',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_errors_in_words(name: str) -> None:
    with pytest.raises(FormatError, match=r"^whole: ") as caught:
        decode(Whole, HOSTILE[name], "whole", max_bytes=MAX_BYTES)
    assert len(str(caught.value)) < 600
    with pytest.raises((FormatError, IntegrityError), match=r"^whole: "):
        unseal(Whole, HOSTILE[name], "whole", max_bytes=MAX_BYTES)


@given(st.binary(max_size=300))
def test_no_bytes_break_a_reader(data: bytes) -> None:
    for read in (decode, unseal):
        with pytest.raises((FormatError, IntegrityError)):
            read(Whole, data, "whole", max_bytes=MAX_BYTES)


@given(wholes, st.data())
def test_a_sealed_document_is_read_whole_or_not_at_all(document: Whole, data: st.DataObject) -> None:
    sealed = seal(document)
    assert unseal(Whole, sealed, "whole", max_bytes=MAX_BYTES) == document
    place = data.draw(st.integers(0, len(sealed) - 1))
    changed = sealed[:place] + bytes([sealed[place] ^ data.draw(st.integers(1, 255))]) + sealed[place + 1 :]
    with pytest.raises((FormatError, IntegrityError), match=r"^whole: "):
        unseal(Whole, changed, "whole", max_bytes=MAX_BYTES)


@given(st.frozensets(st.integers(0, 2**40)))
def test_the_digest_is_of_a_set_as_it_is_written(ranks: frozenset[int]) -> None:
    document = Ranks(ranks=ranks)
    assert unseal(Ranks, seal(document), "ranks", max_bytes=MAX_BYTES) == document


def test_a_field_called_digest_inside_does_not_replace_the_own_one() -> None:
    inner = Whole(parts=(), parent=None, settings={"digest": "sha256:" + "0" * 64, "f": 1})
    assert unseal(Whole, seal(inner), "whole", max_bytes=MAX_BYTES) == inner
    with pytest.raises(IntegrityError, match="its content has"):
        unseal(Whole, encode(inner), "whole", max_bytes=MAX_BYTES)


@given(st.dictionaries(st.sampled_from(["lanes", "store", "lane", ""]), plain | st.floats(), max_size=3))
def test_any_configuration_is_read_or_refused_in_words(values: dict[str, Any]) -> None:
    try:
        found = configure(Settings, values, "settings.toml")
    except ConfigurationError as error:
        message = str(error)
    else:
        assert 1 <= found.lanes <= 512
        return
    assert message.startswith("settings.toml: ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lane = 3", "unknown field `lane`; did you mean lanes?"),
        ("[store]\nbandwith = 1", "did you mean bandwidth?"),
        ("[store]\nxyz = 1", "known are bandwidth, lanes, store"),
        ("lanes = 0", "`lanes`"),
        ("lanes = 1.5", "Expected `int`, got `float` at `lanes`"),
        ("[store]\nbandwidth = -1", "`store.bandwidth`"),
        ("lanes", "is no TOML"),
        ("a = " + "[" * 5_000, "is no TOML"),
    ],
)
def test_a_person_is_told_what_to_write(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^settings\.toml") as caught:
        configure(Settings, parse_toml(text, "settings.toml"), "settings.toml")
    assert said in str(caught.value)
