"""Failures of remote stores, classified by what helps against them.

Clients quote requests, headers and answers in their errors, and an S3 answer may contain the access key and the signed
string. So only the HTTP status and the error code of an error are passed on.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator
from typing import Final, Literal

Kind = Literal[
    "absent",
    "exists",
    "conflict",
    "throttled",
    "no-answer",
    "expired",
    "denied",
    "clock",
    "archived",
    "full",
    "range",
    "unsupported",
    "refused",
]

_STATUS: Final = re.compile(r"status code: (\d{3})|\b(?:HTTPStatusCode|status)['\"]?: (\d{3})")
_CODE: Final = re.compile(r"<Code>([A-Za-z.]{1,60})</Code>|An error occurred \(([A-Za-z0-9.]{1,60})\)")
_BY_CODE: Final[dict[str, Kind]] = {
    "NoSuchBucket": "refused",
    "ContainerNotFound": "refused",
    "ExpiredToken": "expired",
    "ExpiredTokenException": "expired",
    "TokenRefreshRequired": "expired",
    "RequestExpired": "expired",
    "AccessDenied": "denied",
    "InvalidAccessKeyId": "denied",
    "SignatureDoesNotMatch": "denied",
    "AllAccessDisabled": "denied",
    "SlowDown": "throttled",
    "RequestLimitExceeded": "throttled",
    "ThrottlingException": "throttled",
    "TooManyRequests": "throttled",
    "RequestTimeTooSkewed": "clock",
    "InvalidObjectState": "archived",
    "QuotaExceeded": "full",
    "XMinioAdminBucketQuotaExceeded": "full",
    "XMinioStorageFull": "full",
}
_BY_NAME: Final[dict[str, Kind]] = {
    "FileNotFoundError": "absent",
    "AlreadyExistsError": "exists",
    "FileExistsError": "exists",
    "PermissionDeniedError": "denied",
    "UnauthenticatedError": "denied",
    "PermissionError": "denied",
    "ProfileNotFound": "refused",
    "ConfigParseError": "refused",
    "InvalidConfigError": "refused",
    "JSONDecodeError": "refused",
    "PartialCredentialsError": "refused",
    "CredentialRetrievalError": "expired",
    "SSOTokenLoadError": "expired",
    "TokenRetrievalError": "expired",
    "UnauthorizedSSOTokenError": "expired",
}
_BY_STATUS: Final[dict[int, Kind]] = {
    401: "denied",
    403: "denied",
    404: "absent",
    408: "no-answer",
    409: "conflict",
    412: "exists",
    416: "range",
    429: "throttled",
    501: "unsupported",
    503: "throttled",
    507: "full",
}
_PAST_THE_END: Final = "Wanted range starting at"
"""Text of obstore's error if the server answers a range request with bytes from another offset (Azure)."""
_REDIRECT: Final = "Received redirect without LOCATION"
"""Text of obstore's error for a bucket of another region, without the status (301 or 307)."""
_ADVICE: Final[dict[Kind, str]] = {
    "throttled": "it asks for fewer requests; lower the concurrency or wait",
    "no-answer": "look at the network and the endpoint, then run it again",
    "expired": "the credentials expired and could not be renewed; renew them, then run it again",
    "denied": "get the right, or set other credentials in the environment",
    "clock": "this machine's clock is wrong; set it, then run it again",
    "archived": "the object is archived; restore it, then run it again",
    "full": "no room is left; make room or raise the quota, then run it again: what was published is kept",
    "unsupported": "the server lacks this request; use a store that keeps If-None-Match, or promise one writer at a "
    "time: single_writer=True (shardkit build --single-writer)",
    "conflict": "another writer is at the same name; run it again",
}


class Failure(Exception):
    """One failed request.

    Attributes:
        kind: "absent" (no such object), "exists" (put-if-absent found one), "conflict" (another put is running),
            "throttled", "no-answer" (unknown whether it was carried out), "expired" (credentials), "denied",
            "clock" (of this machine), "archived" (must be restored first), "full", "range" (past the end),
            "unsupported" (the server lacks the request), "refused" (any other error that would recur).
        reason: text for messages, without credentials.
    """

    def __init__(self, kind: Kind, reason: str) -> None:
        super().__init__(kind, reason)
        self.kind: Kind = kind
        self.reason = reason

    @property
    def passing(self) -> bool:
        """True if the same request may succeed if repeated."""
        return self.kind in ("throttled", "no-answer", "conflict", "expired")

    @property
    def advice(self) -> str:
        """Next action, for messages."""
        return _ADVICE.get(self.kind, "check bucket, endpoint, region and credentials, then run it again")


def classify(error: BaseException) -> Failure:
    """Return the failure that a client's exception means. Drop the exception: its text may contain credentials."""
    text = str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
        # A file of this machine, such as a token or a program that issues credentials. An error of the same class for
        # an absent object has no number.
        return Failure("refused", "a file that the environment or configuration names cannot be read")
    status_match, code_match = _STATUS.search(text), _CODE.search(text)
    # botocore has the status in an attribute too; the answer to a HEAD has no body, so no code
    answer = getattr(error, "response", None)
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(answer, dict) else None
    if status_match:
        status = int(next(filter(None, status_match.groups())))
    elif _REDIRECT in text:
        status = 301
    code = next(filter(None, code_match.groups())) if code_match else ""
    if status is None and _PAST_THE_END in text:
        return Failure("range", "past the end")
    reason = " ".join(filter(None, (f"HTTP {status}" if status else "", code))) or _short(error, text)
    return Failure(_kind(type(error).__name__, status, code), reason)


@contextlib.contextmanager
def classified() -> Iterator[None]:
    """Turn any exception of a client into a `Failure`; also a decorator."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 (whatever the client raises)
        raise classify(error) from None


def _kind(name: str, status: int | None, code: str) -> Kind:
    if code in _BY_CODE:
        return _BY_CODE[code]
    if name == "UnauthenticatedError" and status is None:
        return "expired"  # boto3 gave obstore no credentials
    if name in _BY_NAME:
        return _BY_NAME[name]
    if code in ("NoSuchKey", "404"):
        return "absent"
    if status is None:
        return "no-answer"
    return _BY_STATUS.get(status, "no-answer" if status >= 500 else "refused")


def _short(error: BaseException, text: str) -> str:
    """Describe an error without status and code, which means that the request got no answer."""
    lowered = text.lower()
    for word, meaning in (
        ("referenced in the profile", "an AWS profile names another one that does not exist"),
        ("sso", "the SSO session has no valid token"),
        ("credential provider", "the service that issues credentials gave none"),
        ("retrieving credentials", "the service that issues credentials gave none"),
        ("config profile", "there is no such AWS profile (AWS_PROFILE)"),
        ("config file", "the AWS configuration file is unusable"),
        ("non-partial", "the server sends whole objects where a range is asked for"),
        ("timed out", "timed out"),
        ("kind: timeout", "timed out"),
        ("read timeout", "timed out"),
        ("connect", "no connection"),
        ("reset", "connection reset"),
        ("decod", "broken answer"),
        ("body", "broken answer"),
    ):
        if word in lowered:
            return meaning
    name = type(error).__name__
    return f"{'unusable configuration' if _BY_NAME.get(name) == 'refused' else 'no answer'} ({name})"
