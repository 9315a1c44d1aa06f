"""Credentials do not leave: every known shape, every name that sounds like one; and what is none stays readable."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.telemetry.redaction import MARK, redact, redact_document, redactor

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
