"""Signed results, verified by an implementation of DSSE that is not ours."""

from __future__ import annotations

import base64
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from shardkit.audit import Audit, make_statement, sign_statement, verify_envelope
from shardkit.errors import ConfigurationError, FormatError, IntegrityError

pytest.importorskip("cryptography", reason="signatures need the extra `audit`")
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PEM = serialization.Encoding.PEM
PRIVATE = serialization.PrivateFormat.PKCS8
PUBLIC = serialization.PublicFormat.SubjectPublicKeyInfo


def keys(folder: Path, name: str) -> tuple[Path, Path]:
    key = Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(PEM, PRIVATE, serialization.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(PEM, PUBLIC))
    return private, public


@pytest.fixture
def audit() -> Audit:
    head = {"steps": {"first": 0, "size": 7, "root": "ab" * 32}, "events": {"size": 3, "root": "cd" * 32}}
    return Audit("run", manifest="sha256:" + "12" * 32, plan="34" * 32, steps=7, samples=70, head=head,
                 software={"torch": "2.9 “naïve”"})  # fmt: skip


def test_the_envelope_is_verified_by_securesystemslib(audit: Audit, tmp_path: Path) -> None:
    pytest.importorskip(
        "securesystemslib", reason="securesystemslib is not installed: pip install securesystemslib"
    )
    Envelope: Any = import_module("securesystemslib.dsse").Envelope
    VerificationError: Any = import_module("securesystemslib.exceptions").VerificationError
    SSlibKey: Any = import_module("securesystemslib.signer").SSlibKey

    private, public = keys(tmp_path, "a")
    lock = tmp_path / "constraints.txt"
    lock.write_text("numpy==2.0\n")
    document = json.loads(sign_statement(make_statement(audit, lock=lock), private))
    envelope = Envelope.from_dict(json.loads(json.dumps(document)))
    keyid = document["signatures"][0]["keyid"]

    def trusted(path: Path) -> Any:
        return SSlibKey.from_crypto(serialization.load_pem_public_key(path.read_bytes()), keyid=keyid)

    accepted = envelope.verify([trusted(public)], 1)
    assert list(accepted) == [keyid]
    with pytest.raises(VerificationError):
        envelope.verify([trusted(keys(tmp_path, "b")[1])], 1)
    statement = json.loads(envelope.payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    subjects = {one["name"]: one["digest"]["sha256"] for one in statement["subject"]}
    assert subjects["manifest"] == "12" * 32
    assert subjects["plan"] == "34" * 32
    assert subjects["ledger/steps"] == "ab" * 32
    assert {"ledger/events", "code", "lock/constraints.txt"} < set(subjects)
    assert statement["predicate"]["software"]["run"] == audit.software


def test_what_was_signed_comes_back_and_nothing_else_does(audit: Audit, tmp_path: Path) -> None:
    private, public = keys(tmp_path, "a")
    statement = make_statement(audit)
    data = sign_statement(statement, private)
    assert verify_envelope(data, public) == json.loads(json.dumps(statement))
    document = json.loads(data)
    payload = base64.b64decode(document["payload"])
    forged = {**document, "payload": base64.b64encode(payload.replace(b'"size":7', b'"size":8')).decode()}
    assert forged != document
    for bad in (forged, {**document, "payloadType": "text/plain"}, {**document, "signatures": []}):
        with pytest.raises(IntegrityError, match="no signature in it"):
            verify_envelope(json.dumps(bad).encode(), public)
    with pytest.raises(IntegrityError, match="no signature in it"):
        verify_envelope(data, keys(tmp_path, "b")[1])
    for garbage in (b"", b"[]", b"{}", b'{"payload":"*","payloadType":"x","signatures":[]}'):
        with pytest.raises(FormatError, match="no DSSE envelope"):
            verify_envelope(garbage, public)


def test_other_keys_are_refused_with_what_to_do(audit: Audit, tmp_path: Path) -> None:
    _, public = keys(tmp_path, "a")
    other = tmp_path / "other.pem"
    other.write_bytes(
        generate_private_key(SECP256R1()).private_bytes(PEM, PRIVATE, serialization.NoEncryption())
    )
    for path in (public, other):
        with pytest.raises(ConfigurationError, match="openssl genpkey -algorithm ed25519"):
            sign_statement(make_statement(audit), path)
    with pytest.raises(ConfigurationError, match="openssl pkey"):
        verify_envelope(b"{}", other)
