"""Check that a local folder may become a dataset, a copy, a cache or a run, without mixing it with other files."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from typing import Final, Literal

from shardkit.credentials import redact
from shardkit.errors import UsageError
from shardkit.stores.store import place_text, scheme_of

Kind = Literal["dataset", "copy", "cache", "run"]

_DATASET_MARK: Final = "shardkit.json"
_DATASET: Final = frozenset(
    {_DATASET_MARK, "shardkit-copy.json", "objects", "log", "locations", "parity", "attest", "gc", "erasures"}
    | {"scratch", "probe", "tmp"}
)
_NAMES: Final[dict[Kind, frozenset[str]]] = {
    "dataset": _DATASET,
    "copy": _DATASET,
    "cache": frozenset({"blocks", "tmp", "futures", "users", "lock", "catalogue"}),
}
"""Names that may be in a folder of each kind before it has a mark."""

_RUN_FILES: Final = ("run.json", "run.toml", "journal", "ledger", "telemetry", "events.jsonl", "attest")
_MARKS: Final[dict[Kind, frozenset[str]]] = {
    "cache": frozenset({"shardkit-cache.json"}),
    "run": frozenset({*_RUN_FILES, "checkpoints", "lock"}),
}
"""Names that mark a folder as one of a kind; other files in it are left alone."""
_OUTER: Final[dict[Kind, tuple[Kind, str]]] = {
    "cache": ("run", os.path.join("journal", "*.cells")),
    "run": ("cache", "shardkit-cache.json"),
}
"""The kind inside which a folder of a kind may not be, and a pattern of its files; caches evict, runs are copied."""


_URL: Final = re.compile("[A-Za-z][A-Za-z0-9+.-]+:/")  # also of a `Path` made of a URL


def check_vacant(url: str | os.PathLike[str], kind: Kind) -> None:
    """Refuse a local folder that holds other files or is inside a dataset; caches and runs are not inside each other.

    Args:
        url: Path or URL of the folder; of URLs only is checked that a cache or run has none. A missing folder is
            vacant.
        kind: Intended use of the folder. A folder that is already of this kind is accepted.

    Raises:
        UsageError: The folder may not be used; the message names a file in it.
    """
    text = place_text(url, kind)
    if kind in _OUTER and _URL.match(text):
        raise UsageError(
            f"{kind} {redact(text)}: a {kind} is a folder of this machine; give "
            + (
                "a path such as runs/a, and copy it to the store afterwards"
                if kind == "run"
                else "a folder of its local disk"
            )
        )
    if scheme_of(text):
        return
    path = os.path.abspath(text)
    action = f"choose an empty folder for the {kind}"
    if kind in ("cache", "run") and os.path.lexists(os.path.join(path, _DATASET_MARK)):
        raise UsageError(f"{path} is a dataset and cannot be a {kind}; {action}")
    check_outside(path, action)
    if kind in _OUTER:
        outer, mark = _OUTER[kind]
        for folder in _parents(path):
            if glob.glob(os.path.join(glob.escape(folder), mark)):
                raise UsageError(f"{path} is inside the {outer} {folder} and cannot be a {kind}; {action}")
    try:
        found = sorted(name for name in os.listdir(path) if name != "lost+found")
    except OSError:
        return  # it does not exist, or its first use will raise
    is_marked = kind in _MARKS and not _MARKS[kind].isdisjoint(found)
    foreign = [] if is_marked else [name for name in found if name not in _NAMES.get(kind, ())]
    if foreign:
        raise UsageError(f"{path} holds other files, such as {foreign[0]!r}; {action}")


def check_outside(place: str | os.PathLike[str], action: str = "choose a place outside of it") -> None:
    """Refuse a path that is inside a dataset; `action` is the advice of the message."""
    path = os.path.abspath(place)
    for folder in _parents(path):
        if os.path.lexists(os.path.join(folder, _DATASET_MARK)):
            raise UsageError(f"{path} is inside the dataset {folder}; {action}")


def _parents(path: str) -> Iterator[str]:
    """Yield the folders that contain an absolute path, from the nearest on, without the file system's root."""
    outer = os.path.dirname(path)
    while outer != os.path.dirname(outer):
        yield outer
        outer = os.path.dirname(outer)
