"""Texts without credentials, for what leaves the run directory (SPEC.md §7)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

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
# Words of this project that sound like secrets and are counts or settings.
_HARMLESS: Final = frozenset(
    {"tokens", "num_tokens", "token_budget", "tokenizer", "vocabulary", "author", "keys"}
)
_LEAST_VALUE: Final = 6


def redactor(environment: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """A function that redacts texts."""
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
    """A text without what looks like a credential."""
    return redactor(environment)(text)


def redact_document(value: Any, apply: Callable[[str], str], name: str = "") -> Any:
    """A JSON value without credentials: texts are redacted, so is what stands behind a name like a secret's."""
    if isinstance(value, Mapping):
        return {apply(str(key)): redact_document(one, apply, str(key)) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_document(one, apply, name) for one in value]
    if isinstance(value, str):
        return MARK if value and name not in _HARMLESS and _NAME.fullmatch(name) else apply(value)
    return value
