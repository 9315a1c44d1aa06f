"""What an audit says: findings, what they add up to; all of it as one HTML file, and signed.

Signed is an in-toto Statement about a run in a DSSE envelope, Ed25519. Formats: in-toto Attestation Framework,
Statement v1; DSSE v1.0.2, "Pre-Authentication Encoding". Anything that reads these can verify what is written here;
`cryptography` is needed only to sign and to verify.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import shardkit
from shardkit.errors import ConfigurationError, FormatError, IntegrityError, MissingDependency, NotFoundError
from shardkit.exit_codes import ExitCode
from shardkit.formats.canonical_json import dumps, parse_digest
from shardkit.notebook import table

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

Severity = Literal["violated", "unknown", "explained", "note"]
"""violated: what the run consumed is not what the plan says, or the record of it was changed;
unknown: could not be checked; explained: another sample than planned was consumed, and the ledger says why;
note: good to know, and no reason to doubt the run (restarts, other ranks, torn tails)."""


@dataclass(frozen=True)
class Finding:
    """One thing that an audit saw.

    Attributes:
        severity: see `Severity`.
        kind: a stable word, such as "ledger", "step", "plan", "manifest", "shard", "checkpoint", "coverage".
        subject: what it is about: a file, a step, a checkpoint.
        text: what was expected, what was found, and what to do.
    """

    severity: Severity
    kind: str
    subject: str
    text: str


Worst = Literal["clean", "explained", "unknown", "violated"]
"""Of all findings."""

Report = Callable[[str, int, int], None]
"""Called with (what, done, of)."""


@dataclass(frozen=True)
class Coverage:
    """What a run consumed of one epoch.

    Attributes:
        epoch: its number.
        first, last: steps [first, last) of it were replayed, of [begin, end).
        drawn: samples of these steps.
        distinct: different ones among them.
        rows: samples of the dataset.
        remainder: how many of them a whole epoch leaves out; -1 where that depends on more than their number (grouped
            or joined rows), and is not checked.
    """

    epoch: int
    first: int
    last: int
    begin: int
    end: int
    drawn: int
    distinct: int
    rows: int
    remainder: int

    def __str__(self) -> str:
        part = "" if self.is_whole else f"steps {self.first:,} to {self.last - 1:,} of it: "
        if not self.is_exact:
            return f"{part}NOT exact: {self.drawn:,} drawn, {self.distinct:,} different"
        left = f"; {self.remainder:,} left out, in turn" if self.remainder > 0 and self.is_whole else ""
        return f"{part}{self.distinct:,} samples of {self.rows:,}, each once{left}"

    @property
    def is_whole(self) -> bool:
        """Whether every step of the epoch is in it."""
        return (self.first, self.last) == (self.begin, self.end)

    @property
    def is_exact(self) -> bool:
        """No sample twice, and of a whole epoch none missing but the remainder."""
        return self.drawn == self.distinct and (
            not self.is_whole or self.remainder < 0 or self.rows - self.distinct == self.remainder
        )


@dataclass
class Audit:
    """What an audit found.

    Attributes:
        run: the run directory.
        worst: what the findings come to.
        exit_code: by `ExitCode`: deviations that the ledger explains are no failure.
        manifest, plan: of the last step.
        first, steps: the run consumed steps [first, steps).
        samples: that they hold.
        checked: steps whose digest was recomputed from the plan.
        replay_s: how long that took.
        head: heads of both trees.
        coverage: per epoch.
        starts: the launches of the run: start, step, ranks, repeats.
        event_counts: events by kind.
        checkpoints: (name, step, whether its head is one of the ledger's; None: it has none).
        bound_checkpoints: how many of them the ledger records as they are.
        tensors: tensor objects of checkpoints that were checked.
        verified: what the check of the shards saw; None where it was not asked for.
        findings: everything else.
        software: versions that run.json recorded.
    """

    run: str
    manifest: str = ""
    plan: str = ""
    first: int = 0
    steps: int = 0
    samples: int = 0
    checked: int = 0
    replay_s: float = 0.0
    head: dict[str, Any] = field(default_factory=dict)
    coverage: list[Coverage] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    event_counts: dict[str, int] = field(default_factory=dict)
    checkpoints: list[tuple[str, int, bool | None]] = field(default_factory=list)
    bound_checkpoints: int = 0
    tensors: int = 0
    verified: dict[str, Any] | None = None
    findings: list[Finding] = field(default_factory=list)
    software: dict[str, str] = field(default_factory=dict)

    @property
    def worst(self) -> Worst:
        kinds = {finding.severity for finding in self.findings}
        ordered: tuple[Worst, ...] = ("violated", "unknown", "explained")
        return next((kind for kind in ordered if kind in kinds), "clean")

    @property
    def exit_code(self) -> ExitCode:
        return {"violated": ExitCode.DAMAGED, "unknown": ExitCode.UNCHECKED}.get(self.worst, ExitCode.DONE)

    @property
    def verdict(self) -> str:
        return {
            "clean": "clean: the run consumed exactly what its plan says",
            "explained": "explained: the run consumed what its plan says, but for the deviations listed",
            "violated": "violated",
            "unknown": "could not be checked in full",
        }[self.worst]


def facts_of(audit: Audit, epochs: int | None = None) -> list[tuple[str, str]]:
    """(name, value) of what was found, for people; at most so many epochs, all of them by default."""
    last, shown = max(audit.first, audit.steps - 1), audit.coverage[:epochs]
    fitting = sum(fits is True for _, _, fits in audit.checkpoints)
    unseen = len(audit.coverage) - len(shown)
    events = ", ".join(f"{number} {kind}" for kind, number in audit.event_counts.items())
    found = [
        ("steps", f"{audit.first:,} to {last:,}"),
        ("samples", f"{audit.samples:,}"),
        ("recomputed", f"{audit.checked:,} steps from the plan, in {audit.replay_s:.1f} s"),
        ("manifest", audit.manifest),
        ("plan", audit.plan),
        *((f"tree of {name}", f"{one['size']:,} leaves, root {one['root']}") for name, one in audit.head.items()),
        *((f"epoch {one.epoch}", str(one)) for one in shown),
        *([("", f"and {unseen:,} epochs more (--json lists all)")] if unseen else []),
        ("checkpoints", f"{fitting} of {len(audit.checkpoints)} hold a head of this ledger"),
        ("starts", f"{len(audit.starts)}; events: {events}"),
    ]  # fmt: skip
    if (seen := audit.verified) is not None:
        shards = f"{seen['shards_seen']:,} of {seen['shards']:,} shards checked"
        found.append(("data", f"{shards}, level {seen['level']}, {seen['stored_bytes']:,} bytes read"))
    return found


HEADINGS: Final[dict[Severity, str]] = {
    "violated": "Violated",
    "unknown": "Could not check",
    "explained": "Deviations, with their reasons",
    "note": "Good to know",
}
"""Of the findings, the worst first."""

_COLOURS = {"clean": "#1a7f4b", "explained": "#946200", "violated": "#b3261e", "unknown": "#6b4fa0"}
_STYLE = """
:root{color-scheme:light dark;--ink:#1c1e21;--soft:#5f6670;--line:#d9dce1;--paper:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e7e9ec;--soft:#9aa2ad;--line:#363b43;--paper:#16181b}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:62rem;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem;margin:0}h2{font-size:1.05rem;margin:2rem 0 .5rem}
.verdict{color:#fff;padding:.7rem 1rem;border-radius:.4rem;margin:1rem 0;font-weight:600}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.3rem .8rem .3rem 0;
border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:500;white-space:nowrap}td.n{text-align:right;font-variant-numeric:tabular-nums}
code{font:13px ui-monospace,monospace;overflow-wrap:anywhere}.soft{color:var(--soft)}
"""


def html_report(audit: Audit) -> str:
    """The audit as one HTML file: no script, nothing loaded from elsewhere, everything escaped."""
    run, verdict = escape(audit.run), escape(audit.verdict)
    software = [(f"software: {name}", value) for name, value in sorted(audit.software.items())]
    facts = [*facts_of(audit), *software]
    parts = [table(["", ""], facts, len(facts))]
    for severity, heading in HEADINGS.items():
        rows = [(one.kind, one.subject, one.text) for one in audit.findings if one.severity == severity]
        if rows:
            parts += [f"<h2>{heading}: {len(rows)}</h2>", table(["kind", "where", "what"], rows, len(rows))]
    columns = ("start", "step", "ranks", "repeats")
    words = {True: "its head is one of the ledger's", False: "does NOT fit the ledger", None: "holds no head"}
    starts = [[one.get(name, "") for name in columns] for one in audit.starts]
    checkpoints = [(name, step, words[fits]) for name, step, fits in audit.checkpoints]
    parts += ["<h2>Starts</h2>", table(columns, starts, len(starts))]
    parts += ["<h2>Checkpoints</h2>", table(["name", "after step", ""], checkpoints, len(checkpoints))]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>Audit: {verdict}</title><style>{_STYLE}</style></head>\n<body>\n"
        f'<h1>Audit of a training run</h1><p class="soft"><code>{run}</code></p>'
        f'<div class="verdict" style="background:{_COLOURS[audit.worst]}">{verdict.capitalize()}</div>\n'
        + "\n".join(parts)
        + f"<h2>How to check this yourself</h2><p><code>shardkit audit {run}</code> computes every figure above again, "
        "from the ledger, the manifest and the plan's settings alone. The trees are those of RFC 6962.</p>"
        "\n</body></html>\n"
    )


# ---- signed

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "urn:shardkit:audit:1"
PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
_MAX_ENVELOPE: Final = 1 << 24
_GET_KEY = "get it with: openssl pkey -in key.pem -pubout -out key.pub"
_MAKE_KEY = "make one with: openssl genpkey -algorithm ed25519 -out key.pem"


def make_statement(audit: Audit, *, lock: Path | None = None) -> dict[str, Any]:
    """The in-toto Statement of an audit: its subjects are what an outsider can recompute.

    Args:
        audit: the result to state.
        lock: the lock file of the environment that ran, whose digest is stated too.
    """
    steps, events = audit.head["steps"], audit.head["events"]
    subjects = [("manifest", parse_digest(audit.manifest)), ("plan", audit.plan), ("ledger/steps", steps["root"]),
                ("ledger/events", events["root"]), ("code", code_digest())]  # fmt: skip
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
    """SHA-256 over the names and digests of shardkit's own source files, in hex."""
    root = Path(shardkit.__file__).parent
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(root).as_posix()}\n"
        for path in sorted(root.rglob("*.py"))
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def environment_digest() -> str:
    """SHA-256 over the sorted ``name==version`` lines of the installed distributions, in hex."""
    lines = {f"{one.metadata['Name']}=={one.version}\n".lower() for one in metadata.distributions()}
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def sign_statement(statement: dict[str, Any], key: Path) -> bytes:
    """A DSSE envelope around the statement.

    Args:
        statement: from `make_statement`.
        key: an Ed25519 private key, PEM, PKCS #8, not encrypted.

    Raises:
        ConfigurationError: not such a key.
        MissingDependency: `cryptography` is not installed.
    """
    private: Ed25519PrivateKey = _key(key, private=True)
    payload = dumps(statement)
    signature = private.sign(_encode(PAYLOAD_TYPE, payload))
    envelope = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [{"keyid": _key_id(private.public_key()), "sig": base64.b64encode(signature).decode()}],
    }
    return json.dumps(envelope, indent=1).encode() + b"\n"


def read_envelope(path: Path) -> bytes:
    """The envelope's bytes.

    Raises:
        NotFoundError: there is none.
    """
    data = _read(path, "signed statement")
    if len(data) > _MAX_ENVELOPE:
        raise FormatError(f"{path}: {len(data)} bytes, expected at most {_MAX_ENVELOPE}")
    return data


def verify_envelope(data: bytes, key: Path) -> dict[str, Any]:
    """The statement in an envelope whose signature by `key` (public, PEM) is good.

    Raises:
        IntegrityError: no signature by this key, or it does not fit.
        FormatError: the envelope, or what is in it, is not what `sign_statement` writes.
        MissingDependency: `cryptography` is not installed.
    """
    public: Ed25519PublicKey = _key(key, private=False)
    try:
        envelope = json.loads(data)
        payload = base64.b64decode(envelope["payload"], validate=True)
        kind = str(envelope["payloadType"])
        signatures = [base64.b64decode(one["sig"], validate=True) for one in envelope["signatures"]]
    except (ValueError, KeyError, RecursionError, TypeError, binascii.Error) as error:
        raise FormatError(f"signed statement: no DSSE envelope: {error!r}") from error
    if not any(_is_signed(public, signature, _encode(kind, payload)) for signature in signatures):
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
    return statement


def _encode(kind: str, payload: bytes) -> bytes:
    """PAE of DSSE: what is signed, so that neither type nor payload can be taken for the other."""
    return b"DSSEv1 %d %s %d %s" % (len(kind.encode()), kind.encode(), len(payload), payload)


def _is_signed(public: Ed25519PublicKey, signature: bytes, data: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        public.verify(signature, data)
    except InvalidSignature:
        return False
    return True


def _key_id(public: Ed25519PublicKey) -> str:
    return hashlib.sha256(public.public_bytes_raw()).hexdigest()


def _key(path: Path, *, private: bool) -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise MissingDependency('signatures need cryptography; run: pip install "shardkit[audit]"') from error
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
