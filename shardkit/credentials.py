"""Find credentials in URLs and texts, and remove them from texts.

`find_credential` checks every command line, dataset URL, location, source and ``about.toml``, because all of them are
printed, logged and recorded. `redact` removes possible credentials from texts of other programs before printing.

A text may be long and hostile, so every scan is linear: a pattern begins where its run of characters begins, or is
bounded.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

from shardkit.errors import UsageError

MARK: Final = "[redacted]"
_LEAST_VALUE: Final = 6

# Names of values, compared in lower case without anything but letters and digits.
_WORDS: Final = (
    "secret", "password", "passwd", "passphrase", "token", "credential", "apikey", "accesskey", "privatekey",
    "accountkey", "sharedkey", "sessionkey", "signingkey", "storagekey", "authoriz", "authoris", "authentic",
    "signature", "cookie",
)  # fmt: skip
_PARTS: Final = frozenset({"auth", "oauth", "sas", "pwd"})
"""Words that are sensitive only as a whole part of a name: ``x-auth`` is, ``disaster`` is not."""
_PARAMETERS: Final = frozenset(
    {"sig", "hmac", "jwt", "code", "pass", "pat", "pw", "sid", "session", "sessionid", "jsessionid", "phpsessid",
     "googleaccessid", "awsaccesskeyid", "bearer", "delegation"}
)  # fmt: skip
"""Names that are sensitive in a URL only; elsewhere they are words of every day."""
_HARMLESS: Final = frozenset({"tokens", "numtokens", "maxtokens", "tokenbudget"})
"""Names of this project that are counts."""

# Parts of URLs.
_SCHEME: Final = r"(?<![A-Za-z0-9+.-])([A-Za-z][A-Za-z0-9+.-]*+)"
_AUTHORITY: Final = re.compile(rf"(?:{_SCHEME}:|(?<![^\s=\"'(,:]))(/+)([^/?#]*)")
_WITHOUT_SLASHES: Final = re.compile(
    r"(?<![A-Za-z0-9+.-])(?:https?|ftps?|sftp|s3a?|gs|gcs|az|azure|abfss?|hf):[^/?#]{0,500}@", re.IGNORECASE
)
_PARAMETER: Final = re.compile(r"[?&;#=]\s*+([^?&;#=]*+)(?==)")
_PROTOCOL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*+")
_HOST: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]*\]?|[^:@]*)(?::[0-9]*)?")
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{2,62}")
_REPOSITORY: Final = re.compile(r"[A-Za-z0-9-]{1,39}:[A-Za-z0-9._-]{1,100}@[A-Za-z0-9._-]{1,100}")
"""Organisation, repository and version of fsspec's ``github://``; tokens of a known form are found elsewhere."""
_END_OF_SENTENCE: Final = "\"'`<>()[]{}.,:;!"
_USER_SCHEMES: Final = frozenset({"sftp", "ssh", "hdfs", "webhdfs", "smb"})
"""Schemes in which a user name alone is not a secret."""
_ROOT_SCHEMES: Final = frozenset({"s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss"})
"""Schemes in which ``bucket@ref`` is a dataset at the root of a bucket, and ``container@account`` a container."""
_PATH_SCHEMES: Final = frozenset({"file", "local", "memory"})
"""Schemes whose URLs may have three slashes, and no host."""
_DECODINGS: Final = 6
"""Times that a text is decoded from percent-encoding; one that still changes is refused."""

_TOKEN: Final = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|(?<![A-Za-z0-9_-])(?:(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,}"
    r"|hf_[A-Za-z0-9]{30,}|glpat-[A-Za-z0-9_-]{20,}|xox[abprs]-[A-Za-z0-9-]{20,}|sk-[A-Za-z0-9_-]{40,}"
    r"|AIza[A-Za-z0-9_-]{35}|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+)"
)
_WORD: Final = re.compile(r"\S+")
_WIDE_USER: Final = re.compile(r"[^/?#\n@]*+@\S*+")


def find_credential(text: str) -> str | None:
    """Return a description of the first credential in a text, without quoting it; None if there is none.

    Credentials are users and passwords in URLs, also in URLs that are chained (``protocol::url``), misspelled, encoded
    or parameters of others; signatures and tokens in parameters; and tokens of a known form.
    """
    text = unicodedata.normalize("NFKC", text)
    for match in _WORD.finditer(text):
        is_value = match.start() == 0 or "=" in match[0].partition("//")[0]  # no URL in a sentence
        word = text[match.start() : _end_of_url(text, match)] if is_value else match[0]
        found = _in_word(word)
        if found is not None:
            return found
    return "a token" if _TOKEN.search(text) or _TOKEN.search(unquote(text)) else None


def _end_of_url(text: str, word: re.Match[str]) -> int:
    """Return where a URL ends that begins with this word: later than the word if its user or password has blanks."""
    if word[0][-1] in _END_OF_SENTENCE or _AUTHORITY.search(word[0]) is None:
        return word.end()
    wide = _WIDE_USER.match(text, word.end())
    return word.end() if wide is None else wide.end()


def _in_word(word: str) -> str | None:
    """Examine a text without blanks in every spelling that decoding gives."""
    if not any(sign in word for sign in ("/", "\\", "%", ":")):
        return None
    for _ in range(_DECODINGS):
        for link in _links_of_chain(word.replace("\\", "/")):
            found = _in_link(link)
            if found is not None:
                return found
        plain = unicodedata.normalize("NFKC", unquote(word))
        if plain == word:
            return None
        word = plain
    return "a text that is percent-encoded many times"


def _links_of_chain(word: str) -> Iterator[str]:
    """Yield the links of a chained URL from last to first.

    A link is a URL, or the name of a protocol before another link; any other ``::`` belongs to the text around it, such
    as the password ``:C`` in ``https://user::C@host``.
    """
    parts = word.split("::")
    end = len(parts)
    for number in range(end - 1, 0, -1):
        protocol = _PROTOCOL.match(parts[number])
        if protocol is None:
            continue
        is_name = protocol.end() == len(parts[number]) and number + 1 == end < len(parts)
        if is_name or parts[number].startswith("://", protocol.end()):
            yield "::".join(parts[number:end])
            end = number
    yield "::".join(parts[:end])


def _in_link(link: str) -> str | None:
    if _WITHOUT_SLASHES.search(link) is not None:
        return "a user name or password"
    is_url = False
    for match in _AUTHORITY.finditer(link):
        scheme, slashes, authority = (match[1] or "").lower(), len(match[2]), match[3]
        if (slashes == 1 and scheme in {"", *_PATH_SCHEMES}) or (len(scheme) == 1 and slashes < 2):
            continue  # a path, or a drive
        is_url = is_url or bool(scheme)
        found = _in_authority(scheme, slashes, authority)
        if found is not None:
            return found
    if is_url and any(_is_sensitive_parameter(name) for name in _PARAMETER.findall(link)):
        return "a signature or token in its parameters"
    return None


def _in_authority(scheme: str, slashes: int, authority: str) -> str | None:
    user, at, host = authority.rpartition("@")
    if scheme == "github" and _REPOSITORY.fullmatch(authority):
        return None
    if at and ":" in user:
        return "a password"
    if scheme in _PATH_SCHEMES and slashes > 2:
        return None
    if at and scheme in _ROOT_SCHEMES and _BUCKET.fullmatch(user):
        return None
    if at and scheme not in _USER_SCHEMES:
        return "a user name or token"
    if (
        scheme
        and _HOST.fullmatch(host.split(maxsplit=1)[0].rstrip(_END_OF_SENTENCE) if host.strip() else "")
        is None
    ):
        return "a password"
    return None


def _is_sensitive(name: str) -> bool:
    """Return whether a value of this name is a credential, by the name alone."""
    parts = re.findall(r"[a-z0-9]+", name.lower())
    letters = "".join(parts)
    if letters in _HARMLESS:
        return False
    letters = letters.replace("tokeniz", "").replace("tokenis", "")
    return any(word in letters for word in _WORDS) or not _PARTS.isdisjoint(parts)


def _is_sensitive_parameter(name: str) -> bool:
    letters = re.sub(r"[^a-z0-9]+", "", name.lower())
    return letters in _PARAMETERS or letters.endswith("key") or _is_sensitive(name)


def hide_credentials(text: str) -> str:
    """Return a text with URLs that contain a credential reduced to their scheme, and without tokens."""
    shown, end = [], 0
    for match in _WORD.finditer(text):
        if match.start() < end:
            continue
        stop = _end_of_url(text, match)
        word = text[match.start() : stop]
        if _in_word(unicodedata.normalize("NFKC", word)) is not None:
            scheme = word.partition("://")[0]
            shown += [text[end : match.start()], f"{scheme}://" if _PROTOCOL.fullmatch(scheme) else "", MARK]
            end = stop
    return _TOKEN.sub(MARK, "".join(shown) + text[end:])


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


_REDACTED_URL: Final = re.compile(
    r"([A-Za-z][A-Za-z0-9+.-]{0,40}://)([^/\s\"']*@)?([^\s\"'?]*)(\?[^\s\"']+)?"
)
_REDACTED_FORMS: Final = (
    (
        re.compile(
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
        ),
        MARK,
    ),
    (re.compile(r"(?i)\b(bearer|basic)\s++[A-Za-z0-9._~+/=-]{6,}"), rf"\1 {MARK}"),
    (re.compile(r"(?<![A-Za-z0-9_-])(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}"), MARK),
    (
        re.compile(
            r"(?<![A-Za-z0-9_-])(?:gh[pousr]_|github_pat_|hf_|sk-|xox[abprs]-|glpat-|AIza|ya29\.)[A-Za-z0-9_\-.]{10,}"
        ),
        MARK,
    ),
    (re.compile(r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"), MARK),
)
_NAME: Final = re.compile(r"(?<![\w.-])([\w.-]++)[\"']?\s*+[=:]\s*+")
_VALUE: Final = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'|[^\s,;&}\]\"']+")


def _redact_values(text: str) -> str:
    """Replace the values of sensitive names, such as ``password=…`` and ``"token": "…"``."""
    shown, end = [], 0
    for match in _NAME.finditer(text):
        if match.start() < end or not _is_sensitive(match[1]):
            continue
        value = _VALUE.match(text, match.end())
        if value is not None:
            shown += [text[end : match.end()], MARK]
            end = value.end()
    return "".join(shown) + text[end:]


def redactor(environment: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """Return a function that redacts texts.

    Args:
        environment: Variables whose values are redacted if their names are sensitive. None: `os.environ`.
    """
    environment = os.environ if environment is None else environment
    values = sorted(
        (value for name, value in environment.items() if _is_sensitive(name) and len(value) >= _LEAST_VALUE),
        key=len, reverse=True,
    )  # fmt: skip

    def url(match: re.Match[str]) -> str:
        user, query = (MARK + "@") if match[2] else "", f"?{MARK}" if match[4] else ""
        return f"{match[1]}{user}{match[3]}{query}"

    def apply(text: str) -> str:
        for value in values:
            text = text.replace(value, MARK)
        text = _REDACTED_URL.sub(url, text)
        for pattern, replacement in _REDACTED_FORMS:
            text = pattern.sub(replacement, text)
        return _redact_values(text)

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
        return MARK if value and _is_sensitive(name) else apply(value)
    return value
