"""Find credentials in URLs and texts, and remove them from texts.

`find_credential` checks every command line, dataset URL, location, source and ``about.toml``, because all of them are
printed, logged and recorded. `redact` removes possible credentials from texts of other programs before printing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import unquote

from shardkit.errors import UsageError

MARK: Final = "[redacted]"
_SENSITIVE_NAME: Final = (
    r"(?:[\w.-]*(?:secret|passw(?:or)?d|passphrase|passwd|token|credential|api[_-]?key|access[_-]?key|private[_-]?key|"
    r"account[_-]?key|auth(?:orization)?|signature|sas|cookie|session[_-]?key)[\w.-]*)"
)
_NAMED_VALUE: Final = (
    rf"(?i)([\"']?\b(?!(?:num_)?tokens\b|tokeni[sz]er)(?=\w){_SENSITIVE_NAME}[\"']?\s*[=:]\s*)"
    r"(\"[^\"\n]*\"|'[^'\n]*'|[^\s,;&}\]\"']+)"
)
_RULES: Final = tuple(
    (re.compile(pattern, re.DOTALL), replacement)
    for pattern, replacement in (
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", MARK),
        (r"([A-Za-z][A-Za-z0-9+.-]*://)[^/\s\"'@]*@", rf"\1{MARK}@"),
        (r"([A-Za-z][A-Za-z0-9+.-]*://[^\s\"'?]*\?)[^\s\"']+", rf"\1{MARK}"),
        (r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}", rf"\1 {MARK}"),
        (_NAMED_VALUE, rf"\1{MARK}"),
        (r"\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}\b", MARK),
        (r"\b(?:gh[pousr]_|github_pat_|hf_|sk-|xox[abprs]-|glpat-|AIza|ya29\.)[A-Za-z0-9_\-.]{10,}", MARK),
        (r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*", MARK),
    )
)
_NAME: Final = re.compile(rf"(?i){_SENSITIVE_NAME}")
# Names in this project that match the patterns but are counts or settings.
_HARMLESS: Final = frozenset(
    {"tokens", "num_tokens", "token_budget", "tokenizer", "vocabulary", "author", "authors", "keys"}
)
_LEAST_VALUE: Final = 6

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,40})://([^\s\"'<>`]*)")
_USER_SCHEMES: Final = frozenset({"sftp", "ssh", "hdfs", "webhdfs", "smb"})
"""Schemes in which a user name alone is not a secret."""
_ROOT_SCHEMES: Final = frozenset({"s3", "s3a", "gs", "gcs", "az", "azure", "abfs"})
"""Schemes in which ``bucket@ref`` is a dataset at the root of a bucket."""
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{2,62}")
_HOST: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]*\]?|[^:@]*)(?::[0-9]*)?")
_PARAMETER: Final = re.compile(r"(?:^|[&;#?])([^=&;#?]+)=")
_SIGNATURE_NAMES: Final = frozenset(
    {"sig", "key", "jwt", "code", "pwd", "pass", "awsaccesskeyid", "googleaccessid"}
)
_TOKEN: Final = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|\b(?:(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,}|hf_[A-Za-z0-9]{30,}"
    r"|glpat-[A-Za-z0-9_-]{20,}|xox[abprs]-[A-Za-z0-9-]{20,}|sk-[A-Za-z0-9_-]{40,}|AIza[A-Za-z0-9_-]{35}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+)"
)


def find_credential(text: str) -> str | None:
    """Return a description of the first credential in a text, without quoting it; None if there is none.

    Credentials are users and passwords in URLs, including chained URLs (``protocol::url``), signatures and tokens in
    queries and fragments of URLs, and tokens of a known form.
    """
    for part in text.split("::"):  # each link of a chained URL may contain one
        for match in _URL.finditer(part):
            found = _in_url(match[1].lower(), match[2])
            if found is not None:
                return found
    return "a token" if _TOKEN.search(text) else None


def _in_url(scheme: str, rest: str) -> str | None:
    authority = re.split(r"[/?#\\]", rest, maxsplit=1)[0]
    for spelling in (authority, unquote(authority)):
        user, at, host = spelling.rpartition("@")
        is_ref = scheme in _ROOT_SCHEMES and _BUCKET.fullmatch(user) is not None
        if at and ":" in user:
            return "a password"
        if at and scheme not in _USER_SCHEMES and not is_ref:
            return "a user name or token"
        if not is_ref and _HOST.fullmatch(host) is None:
            return "a password"
    for parameters in re.split(r"[?#]", rest)[1:]:
        for name in _PARAMETER.findall(unquote(parameters)):
            name = name.strip().lower()
            if name in _SIGNATURE_NAMES or (name not in _HARMLESS and _NAME.fullmatch(name)):
                return "a signature or token in its query"
    return None


def hide_credentials(text: str) -> str:
    """Return a text with URLs that contain a credential reduced to their scheme, and without tokens."""

    def shown(match: re.Match[str]) -> str:
        return match[0] if _in_url(match[1].lower(), match[2]) is None else f"{match[1]}://{MARK}"

    parts = text.split("::")
    return _TOKEN.sub(MARK, "::".join(_URL.sub(shown, part) for part in parts))


def refuse_credentials(text: str, what: str) -> None:
    """Raise an error if a text contains a credential; the message quotes nothing of the text.

    Args:
        text: Text that may be printed, logged or recorded later.
        what: Name of the text in the message.

    Raises:
        UsageError: `find_credential` finds a credential.
    """
    found = find_credential(text)
    if found is not None:
        raise UsageError(
            f"{what} holds {found} (not printed here); put credentials into the environment or into the "
            "configuration of the client, and leave them out of URLs and texts"
        )


def redactor(environment: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """Return a function that redacts texts.

    Args:
        environment: Variables whose values are redacted if their names are sensitive. None: `os.environ`.
    """
    environment = os.environ if environment is None else environment
    values = sorted(
        (value for name, value in environment.items() if _NAME.fullmatch(name) and len(value) >= _LEAST_VALUE),
        key=len, reverse=True,
    )  # fmt: skip

    def apply(text: str) -> str:
        for value in values:
            text = text.replace(value, MARK)
        for pattern, replacement in _RULES:
            text = pattern.sub(replacement, text)
        return text

    return apply


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return a text with everything that looks like a credential replaced by `MARK`; see `redactor`."""
    return redactor(environment)(text)


def redact_document(value: Any, apply: Callable[[str], str], name: str = "") -> Any:
    """Return a JSON value with texts redacted by `apply`, and all texts under a sensitive name replaced by `MARK`."""
    if isinstance(value, Mapping):
        return {apply(str(key)): redact_document(one, apply, str(key)) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_document(one, apply, name) for one in value]
    if isinstance(value, str):
        return MARK if value and name not in _HARMLESS and _NAME.fullmatch(name) else apply(value)
    return value
