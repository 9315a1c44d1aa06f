"""Names of files that other programs write next to samples, and of tables whose files are not all current."""

from __future__ import annotations

import re
from collections.abc import Iterable

from shardkit.errors import SourceError

DEBRIS = "what other programs write next to samples"
"""Reason why a file is left out."""

# Markers and summaries of Spark, Hive and Databricks; thumbnails and settings of Windows; results cached by datasets
_FILES = re.compile(
    r"_SUCCESS|_metadata|_common_metadata|_(?:committed|started)_\w+|Thumbs\.db|desktop\.ini|"
    r"cache-[0-9a-f]{16}\w*\.arrow"
)
_FOLDERS = frozenset(["__MACOSX", "_temporary", "lost+found", "$RECYCLE.BIN", "System Volume Information"])
_LOGS = {
    re.compile(r"(?:^|/)_delta_log(?:/|$)"): "Delta Lake",
    re.compile(r"(?:^|/)\.hoodie(?:/|$)"): "Hudi",
    re.compile(r"(?:^|/)metadata/[^/]+\.metadata\.json$"): "Iceberg",
    re.compile(r"(?:^|/)_versions/[^/]+\.manifest$"): "Lance",
}


def is_debris(name: str) -> bool:
    """Return True for a path relative to the source that no program reads as a sample."""
    *folders, base = name.split("/")
    return not _FOLDERS.isdisjoint(folders) or base in _FOLDERS or _FILES.fullmatch(base) is not None


def refuse_table(names: Iterable[str], given: str) -> None:
    """Refuse the folder of a table with a log of its current files, because other files hold removed rows.

    Raises:
        SourceError: One of the paths belongs to such a log.
    """
    for name in names:
        for log, table in _LOGS.items():
            if log.search(name):
                raise SourceError(
                    f"{given}: a {table} table ({name}), whose files may hold removed and replaced rows; write the "
                    "current rows to Parquet with a reader of such tables, or name the files with a glob to take all"
                )
