"""Sign audits: an in-toto Statement v1 about a run in a DSSE v1.0.2 envelope, signed with Ed25519.

Any software that reads these formats can verify the envelopes. Only signing and verifying need `cryptography`.
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

import shardkit
from shardkit.audit.result import Audit
from shardkit.documents import convert, decoder_of, encode, parse_digest
from shardkit.errors import ConfigurationError, FormatError, IntegrityError, MissingDependency, NotFoundError
from shardkit.extras import install_command
from shardkit.ledger.events import Head, Hex

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "urn:shardkit:audit:1"
PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
_MAX_ENVELOPE: Final = 1 << 24
_GET_KEY = "get it with: openssl pkey -in key.pem -pubout -out key.pub"
_MAKE_KEY = "make one with: openssl genpkey -algorithm ed25519 -out key.pem"


class _Subject(msgspec.Struct):
    name: str
    digest: dict[str, Hex]


class _Predicate(msgspec.Struct):
    verdict: str
    head: Head


class _Signature(msgspec.Struct):
    sig: bytes


class _Envelope(msgspec.Struct):
    """A DSSE envelope; msgspec decodes base64 to bytes."""

    payload: bytes
    kind: str = msgspec.field(name="payloadType")
    signatures: list[_Signature]


class _Statement(msgspec.Struct):
    subject: list[_Subject]
    predicate: _Predicate


def make_statement(audit: Audit, *, lock: Path | None = None) -> dict[str, Any]:
    """Return the in-toto Statement of an audit. Its subjects can be recomputed by others.

    The digest of `lock`, the lock file of the run's environment, becomes a subject.
    """
    steps, events = audit.head["steps"], audit.head["events"]
    subjects = [("manifest", parse_digest(audit.manifest)), ("plan", audit.plan), ("ledger/steps", steps["root"]),
                ("ledger/events", events["root"]), ("code", code_digest())]  # fmt: skip
    if audit.losses:
        subjects.append(("losses", audit.losses))
    if lock is not None:
        subjects.append((f"lock/{lock.name}", hashlib.sha256(_read(lock, "lock file")).hexdigest()))
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in subjects],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "verdict": audit.verdict,
            "exit_code": int(audit.exit_code),
            "steps": {
                "first": audit.first,
                "end": audit.steps,
                "samples": audit.samples,
                "recomputed": audit.checked,
            },
            "head": audit.head,
            "epochs": [
                {"epoch": one.epoch, "whole": one.is_whole, "exact": one.is_exact, "samples": one.distinct}
                for one in audit.coverage
            ],
            "events": audit.event_counts,
            "data": audit.verified or {},
            "findings": [[one.severity, one.kind, one.subject, one.text] for one in audit.findings],
            "software": {
                "auditor": metadata.version("shardkit"),
                "environment": environment_digest(),
                "run": audit.software,
            },
        },
    }


def code_digest() -> str:
    """Return the SHA-256 over the names and digests of shardkit's Python files, in hex."""
    root = Path(shardkit.__file__).parent
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(root).as_posix()}\n"
        for path in sorted(root.rglob("*.py"))
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def environment_digest() -> str:
    """Return the SHA-256 over the sorted ``name==version`` lines of the installed distributions, in hex."""
    lines = {f"{one.metadata['Name']}=={one.version}\n".lower() for one in metadata.distributions()}
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def sign_statement(statement: dict[str, Any], key: Path) -> bytes:
    """Return a signed DSSE envelope of a statement, as JSON.

    Args:
        statement: from `make_statement`.
        key: file with an unencrypted Ed25519 private key, PEM, PKCS #8.

    Raises:
        ConfigurationError: the file does not hold such a key.
        MissingDependency: `cryptography` is not installed.
    """
    private: Ed25519PrivateKey = _key(key, private=True)
    payload = encode(statement)
    signature = private.sign(_encode(PAYLOAD_TYPE, payload))
    key_id = hashlib.sha256(private.public_key().public_bytes_raw()).hexdigest()
    envelope = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [{"keyid": key_id, "sig": base64.b64encode(signature).decode()}],
    }
    return json.dumps(envelope, indent=1).encode() + b"\n"


def read_envelope(path: Path) -> bytes:
    """Return the bytes of an envelope file.

    Raises:
        NotFoundError: the file cannot be read.
        FormatError: the file is too large.
    """
    data = _read(path, "signed statement")
    if len(data) > _MAX_ENVELOPE:
        raise FormatError(f"{path}: {len(data)} bytes, expected at most {_MAX_ENVELOPE}")
    return data


def verify_envelope(data: bytes, key: Path) -> dict[str, Any]:
    """Verify an envelope with a public key (PEM file) and return its statement.

    Raises:
        IntegrityError: the envelope has no valid signature by this key.
        FormatError: the envelope or its statement is not of the form that `sign_statement` writes.
        ConfigurationError: the file does not hold an Ed25519 public key.
        MissingDependency: `cryptography` is not installed.
    """
    public: Ed25519PublicKey = _key(key, private=False)
    try:
        envelope: _Envelope = decoder_of(_Envelope).decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise FormatError(f"signed statement: no DSSE envelope: {error}") from None
    payload, kind = envelope.payload, envelope.kind
    if not any(_is_signed(public, one.sig, _encode(kind, payload)) for one in envelope.signatures):
        raise IntegrityError(
            f"signed statement: no signature in it is by the key {key}: it was changed, or is of another"
        )
    if kind != PAYLOAD_TYPE:
        raise FormatError(f"signed statement: payload type {kind!r}, expected {PAYLOAD_TYPE}")
    try:
        statement = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"signed statement: no JSON: {error}") from None
    if not isinstance(statement, dict) or statement.get("predicateType") != PREDICATE_TYPE:
        raise FormatError(
            f"signed statement: not about an audit (predicate type {PREDICATE_TYPE} is expected)"
        )
    convert(_Statement, statement, "signed statement")
    return statement


def _encode(kind: str, payload: bytes) -> bytes:
    """Return the signed bytes: DSSE's pre-authentication encoding (PAE), which separates type and payload."""
    return b"DSSEv1 %d %s %d %s" % (len(kind.encode()), kind.encode(), len(payload), payload)


def _is_signed(public: Ed25519PublicKey, signature: bytes, data: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        public.verify(signature, data)
    except InvalidSignature:
        return False
    return True


def _key(path: Path, *, private: bool) -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise MissingDependency(f"signatures need cryptography; run: {install_command('audit')}") from error
    kind: type[Any] = ed25519.Ed25519PublicKey
    what, advice = "public", _GET_KEY
    if private:
        kind, what, advice = ed25519.Ed25519PrivateKey, "private", _MAKE_KEY
    data = _read(path, "key")
    try:
        key = (
            serialization.load_pem_private_key(data, None)
            if private
            else serialization.load_pem_public_key(data)
        )
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"{path} holds no {what} key in PEM ({error}); {advice}") from error
    if not isinstance(key, kind):
        raise ConfigurationError(f"{path} is no Ed25519 key; {advice}")
    return key


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise NotFoundError(f"{what} {path}: {error.strerror}; name a file that can be read") from error
