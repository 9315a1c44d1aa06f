"""Credentials do not leave: every known shape, every name that sounds like one; and what is none stays readable."""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.credentials import (
    MARK,
    find_credential,
    hide_credentials,
    redact,
    redact_document,
    redactor,
    refuse_credentials,
)
from shardkit.dataset.about import parse_about
from shardkit.errors import UsageError
from shardkit.repository.log import parse_dataset_url
from shardkit.repository.policy import LocationRecord
from shardkit.stores.local import open_store
from shardkit.stores.remote.addresses import parse_address, split_url
from shardkit_tools.main import COMMANDS
from tests.command_line import output_of
from tests.drills import DRILLS

CANARY = "Zq7canary9Xw2LongEnough"


SHAPES = [
    f"s3://key:{CANARY}@bucket/x",
    f"https://host/x?X-Amz-Signature={CANARY}&b=1",
    f"password={CANARY}",
    f"password: {CANARY}",
    f'{{"secret_access_key": "{CANARY}"}}',
    f"{{'token': '{CANARY}'}}",
    f"Authorization: Bearer {CANARY}",
    f"aws_session_token={CANARY}",
    f"HF_TOKEN={CANARY}",
    f"api-key = {CANARY}",
    f"AccountKey={CANARY};",
    f"--token={CANARY}",
    f"passphrase='{CANARY} {CANARY}'",
    f"-----BEGIN RSA PRIVATE KEY-----\n{CANARY}\n-----END RSA PRIVATE KEY-----",
    f"-----BEGIN PRIVATE KEY-----\n{CANARY}",
    f"hf_{CANARY}",
    f"ghp_{CANARY}",
    f"sk-{CANARY}",
    f"eyJhbGciOiJI.{CANARY}.abc",
    f"sas={CANARY}",
    f"cookie: {CANARY}",
]


@pytest.mark.parametrize("text", SHAPES)
def test_shapes_of_credentials(text: str) -> None:
    assert CANARY not in redact(text, {})
    assert MARK in redact(text, {})


def test_key_ids() -> None:
    assert "AKIAIOSFODNN7EXAMPLE" not in redact("user AKIAIOSFODNN7EXAMPLE did", {})


HARMLESS = [
    "step 17 of 4000, loss 2.3",
    "s3://bucket/prefix/objects/sha256/ab/abcd.tar",
    "tokens=2048 num_tokens: 99",
    "sha256:" + "ab" * 32,
    "tokenizer=bpe",
    "lane 5 from rank 1 to rank 2",
    "https://host/path",
    "/data/key/value",
]


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_credential_stays(text: str) -> None:
    assert redact(text, {}) == text


@given(
    st.text(alphabet=string.ascii_letters + string.digits, min_size=6, max_size=40),
    st.text(max_size=20),
    st.text(max_size=20),
)
def test_values_of_the_environment_are_taken_out_wherever_they_stand(
    value: str, before: str, after: str
) -> None:
    environment = {"MY_SECRET_KEY": value, "HOME": "/home/user"}
    assert value not in redact(f"{before}{value}{after}", environment).replace(MARK, "")


def test_documents_are_redacted_by_name_and_by_shape() -> None:
    document = {
        "password": CANARY, "nested": [{"api_key": CANARY}, f"url s3://a:{CANARY}@b"], "tokens": "2048", "step": 7,
        "lr": 0.1, "on": True, "none": None, f"hf_{CANARY}": 1,
    }  # fmt: skip
    found = redact_document(document, redactor({}))
    assert CANARY not in str(found)
    assert (found["tokens"], found["step"], found["lr"], found["on"], found["none"]) == (
        "2048",
        7,
        0.1,
        True,
        None,
    )


REFUSED = [
    f"https://{CANARY}@host",
    f"https://{CANARY}@host/cats",
    f"http://user:{CANARY}@host:80/x",
    f"s3://user:{CANARY}@bucket/x",
    f"s3://{CANARY}@bucket",
    f"memory://user:{CANARY}@x",
    f"memory://user:{CANARY}",
    f"sftp://user:{CANARY}@host/x",
    f"https://user%3A{CANARY}%40host/x",
    f"simplecache::s3://user:{CANARY}@bucket/x",
    f"github://user:ghp_{'a1' * 18}@main",
    f"github://user:{CANARY}@github.com:443",
    f"zip://inner.zip::simplecache::https://{CANARY}@host/x",
    f"https://host/x?X-Amz-Signature={CANARY}",
    f"https://host/x?a=1&sig={CANARY}",
    f"https://host/x#access_token={CANARY}",
    f"HTTPS://host/x?a=1;TOKEN={CANARY}",
    f"see https://host/?key={CANARY} for more",
    f"https://user::{CANARY}@host",
    f"s3://key::{CANARY}@bucket",
    f"https:///u:{CANARY}@host",
    f"https://h/x?subscription-key={CANARY}",
    f"https://h/x?Ocp-Apim-Subscription-Key={CANARY}",
    f"https://h/x?x-functions-key={CANARY}",
    f"https://h/?sharedkey={CANARY}",
    f"https://h/?hmac={CANARY}",
    f"https://h/?pat={CANARY}",
    f"https://h/?sid={CANARY}",
    f"https://h/?token[]={CANARY}",
    f"https://h/?api.key={CANARY}",
    f"https://h/?session={CANARY}",
    f"https://h/x;token={CANARY}",
    f"https://h/x;jsessionid={CANARY}",
    f"https://h/x%3Fsig={CANARY}",
    f"https://h/x%253Fsig={CANARY}",
    f"https://user%253A{CANARY}%2540host/x",
    f"https://h/?next=https://u:{CANARY}@host",
    f"https://h/?next=https%3A%2F%2Fu:{CANARY}@host",
    f"https://a b{CANARY}@host",
    f"https://a b:{CANARY}@host",
    f"https:/u:{CANARY}@host",
    f"https:u:{CANARY}@host",
    f"S3:{CANARY}@bucket",
    f"https:\\\\u:{CANARY}@host",
    f"//u:{CANARY}@host",
    f"https://u：{CANARY}@host",
    f"https://u:{CANARY}＠host",
    f"http://u:{CANARY}/w@host",
    f'https://u:"{CANARY}"@host',
    f"memory:///u:{CANARY}@x",
    f"https://h/?a=token={CANARY}",
    f"webhdfs://h/x?delegation={CANARY}",
    f"https://h/x?bearer={CANARY}",
    f"https://h/x?pw={CANARY}",
    f"https://h/?next=//u:{CANARY}@host",
    f"simplecache::https://u::{CANARY}@host",
    f"zip://a::b.zip::https://u::{CANARY}@host",
    f"mirror=https://u:{CANARY}@host",
    f"https://u:%0A{CANARY}@host",
    f"https://x=https://u:{CANARY}@h",
    f"hf_{'a1' * 16}",
    f"ghp_{'a1' * 18}",
]
ACCEPTED = [
    "s3://bucket/cats@main",
    "github://org:repo@main",
    "github://my-org:my.repo@v1.2/data",
    "s3://bucket@v1",
    "sftp://user@host/x",
    "memory://x/y@main",
    "http://10.0.0.1:8450",
    "http://[::1]:8450/x",
    "https://example.org/page?number=7&author=me",
    "https://creativecommons.org/licenses/by/4.0/#deed",
    "me@example.org",
    "data/cats@sha256:" + "ab" * 32,
    "simplecache::s3://bucket/x",
    "sk-learn-digits",
    "http://host:8450: no answer",
    "abfss://container@account.dfs.core.windows.net/x",
    "s3://bucket/key=1/code=US/session=3/part.parquet@main",
    "memory:///x@main",
    "file:///data/x@main",
    "C:/data/x@main",
    "https://example.org, write to me@example.org",
    "(https://host:80).",
    "[::1]:8450",
    "std::vector",
    "mailto:me@example.org",
    "license:cats@v1",
    "data//cats@main",
    "https://host/x?tokenizer=bpe&max_tokens=5&page=3",
    "server:/export/x",
    "zip://inner.zip::simplecache::https://host/x",
]


@pytest.mark.parametrize("text", REFUSED)
def test_credentials_are_found_and_not_quoted(text: str) -> None:
    assert find_credential(text)
    with pytest.raises(UsageError, match="not printed here") as caught:
        refuse_credentials(text, "this")
    assert CANARY not in str(caught.value)
    assert CANARY not in hide_credentials(f"cannot open {text}: no")


@pytest.mark.parametrize("text", ACCEPTED)
def test_addresses_without_credentials_are_accepted(text: str) -> None:
    assert find_credential(text) is None
    assert hide_credentials(text) == text


LINKS = st.sampled_from(["", "simplecache::", "zip://a.zip::", "blockcache::filecache::", "mirror=", "x::y "])
SCHEMES = st.sampled_from(["s3", "gs", "az", "memory", "https", "HTTP", "sftp", "file", "hf", "x+y"])
SLASHES = st.sampled_from(["://", "://", "://", ":///", ":\\\\"])
WORDS = st.text(string.ascii_letters + string.digits + "._-%:=;", max_size=12)
NAMES = st.sampled_from(
    ["X-Amz-Signature", "sig", "token", "X-Goog-Credential", "access_token", "Password", "subscription-key", "api.key",
     "token[]", "sharedkey", "hmac", "jsessionid", "%73ig", "%2573ig"]
)  # fmt: skip
PARAMETERS = st.sampled_from(["?", "#", ";", "?a=1&", "?versionId=7;"])


@st.composite
def urls(draw: st.DrawFn) -> str:
    """A URL that holds the canary as a password, a user, or the value of a parameter, spelled in many ways."""
    name, host, path = draw(NAMES), draw(WORDS), draw(WORDS)
    start = f"{draw(SCHEMES)}{draw(SLASHES)}"
    url = {
        "password": f"{start}{draw(WORDS)}:{CANARY}@{host}/{path}",
        "user": f"{draw(st.sampled_from(['s3', 'https', 'ftp']))}://{CANARY}@{host}/{path}",
        "parameter": f"{start}host/{path}{draw(PARAMETERS)}{name}={CANARY}",
        "nested": f"{start}host/?next=https://user:{CANARY}@host",
    }[draw(st.sampled_from(["password", "user", "parameter", "nested"]))]
    for _ in range(draw(st.integers(0, 3))):
        sign = draw(st.sampled_from(["@", ":", "/", "?", "=", "%", "&", ";"]))
        head, _, rest = url.partition("//")
        url = f"{head}//{rest.replace(sign, quote(sign, safe=''))}"
    return f"{draw(LINKS)}{url}"


@pytest.mark.drill
@settings(max_examples=100_000 if DRILLS else 500)
@given(urls(), WORDS, WORDS)
def test_no_form_of_url_gets_a_credential_through(url: str, before: str, after: str) -> None:
    """Neither as a root, a version, a location or a source, nor in a message."""
    takers: list[Callable[[str], object]] = [
        open_store,
        parse_dataset_url,
        parse_address,
        split_url,
        LocationRecord.parse,
        lambda text: LocationRecord.parse(f"mirror={text}"),
        lambda text: parse_about({"homepage": text}),
        lambda text: parse_about({"note": f"{before} {text} {after}"}),
        lambda text: parse_about({"stratum": {text: {}}}),
    ]
    for take in takers:
        with pytest.raises(UsageError) as caught:
            take(url)
        assert CANARY not in str(caught.value)
    assert CANARY not in hide_credentials(f"{before} {url}: {after}")


LONG = [
    "a://?" + "secret" * 20_000,
    "a::" * 40_000,
    "a://" * 30_000,
    "%25" * 40_000,
    "a." * 60_000,
    "eyJaaaaaaaa-" * 10_000,
    "token='\"" * 20_000,
    "a// " * 30_000,
    "bearer" + " " * 120_000,
    "a://" + "?;" * 60_000,
    "x@" * 60_000,
    "s3:" * 40_000,
]


@pytest.mark.parametrize("text", LONG, ids=lambda text: text[:8])
def test_long_texts_are_examined_in_one_pass(text: str) -> None:
    """A pattern that tries again from each of 120,000 letters would take hours."""
    find_credential(text)
    hide_credentials(text)
    redact(text, {text: "long enough"})


@pytest.mark.parametrize("command", [name for _, names in COMMANDS for name in names])
def test_no_command_takes_or_shows_a_credential(command: str) -> None:
    forms: list[Callable[[str], tuple[str, ...]]] = [
        lambda text: (text,),
        lambda text: ("data", text),
        lambda text: ("--location", f"mirror={text}"),
        lambda text: (f"--message={text}",),
    ]
    for text, form in zip(REFUSED, itertools.cycle(forms)):
        said = output_of(command, *form(text), code=2)
        assert CANARY not in said
        assert "not printed here" in said
