"""The standard library's source text as JSON lines: real text that lies on every machine with Python."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

__all__ = ["write_stdlib_lines"]

# Not the library itself: tests, the packages of others, generated tables.
_LEFT_OUT = {
    "site-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "__pycache__",
    "ensurepip",
    "lib-dynload",
}
_PIECE = 2048  # characters; a piece ends at a line


def write_stdlib_lines(path: Path, limit_bytes: int) -> int:
    """Write ``{"text": …, "package": …}`` lines to `path`; gives their number.

    Args:
        path: is replaced.
        limit_bytes: stops taking files once so much text is in it; packages are taken round robin, so that a
        small
            limit still has all of them.
    """
    rows = 0
    written = 0
    with path.open("w", encoding="utf-8") as out:
        for package, text in _round_robin(_packages()):
            for piece in _pieces(text):
                out.write(json.dumps({"text": piece, "package": package}, ensure_ascii=False) + "\n")
                rows += 1
                written += len(piece)
            if written >= limit_bytes:
                break
    return rows


def _packages() -> dict[str, list[Path]]:
    """Files by top-level package; single modules together are the package "modules"."""
    root = Path(sysconfig.get_path("stdlib"))
    packages: dict[str, list[Path]] = {"modules": sorted(root.glob("*.py"))}
    for folder in sorted(
        p for p in root.iterdir() if p.is_dir() and p.name not in _LEFT_OUT and p.name.isidentifier()
    ):
        files = [f for f in sorted(folder.rglob("*.py")) if not _LEFT_OUT & set(f.relative_to(folder).parts)]
        if files:
            packages[folder.name] = files
    return packages


def _round_robin(packages: dict[str, list[Path]]) -> Iterator[tuple[str, str]]:
    queues = {name: iter(files) for name, files in packages.items()}
    while queues:
        for name in list(queues):
            file = next(queues[name], None)
            if file is None:
                del queues[name]
                continue
            text = file.read_text(encoding="utf-8", errors="replace")
            if text.strip():
                yield name, text


def _pieces(text: str) -> Iterator[str]:
    piece: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        if piece and size + len(line) > _PIECE:
            yield "".join(piece)
            piece, size = [], 0
        piece.append(line)
        size += len(line)
    if piece:
        yield "".join(piece)
