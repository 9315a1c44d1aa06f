"""Measure versions of 10⁶ rows: append, find, merge, remove and erase; print a Markdown table.

    python tools/bench/versions.py [--rows 1000000] [--folder DIR]

Times are wall clock with a warm page cache; bytes are the sizes of new files. The payload of every row begins with a
unique text, so that a search of all bytes below the root shows whether the row is present.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import shardkit
from shardkit.copies.verify import verify
from shardkit.dataset.lookups import find_samples, hash_values
from shardkit.dataset.merging import merge_datasets
from shardkit.dataset.removing import erase, remove

SCHEMA = {"url": "str", "body": "bytes", "n": "int64"}
SETTINGS = {"format": "arrow", "shard_size": "16MiB", "stratify": "lang"}


def marker(number: int) -> bytes:
    return f"<<{number:08d}|{hashlib.sha256(str(number).encode()).hexdigest()[:24]}>>".encode()


def write(root: Path, numbers: range, body: int, *, append: bool = False, ref: str = "main") -> None:
    filler = random.Random(7).randbytes(1 << 20)
    schema = {**SCHEMA, "lang": "str"}
    lookup = "" if append else "key,url,body:sha256"
    with shardkit.create(root, schema, append=append, lookup=lookup, ref=ref, **SETTINGS) as writer:  # type: ignore[arg-type]
        for number in numbers:
            start = number * 7919 % (len(filler) - body)
            writer.add(
                {
                    "url": f"https://example.org/{number}/page.html",
                    "body": marker(number) + filler[start : start + body],
                    "n": number,
                    "lang": ("de", "en", "fr")[number % 3],
                },
                key=f"doc-{number:08d}",
            )


def sizes(root: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(root)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in root.rglob("*")
        if path.is_file()
    }


def holding(root: Path, texts: list[bytes]) -> list[str]:
    """Return the files that contain one of the texts; their common prefix finds all candidates in one pass."""
    wanted = set(texts)
    found = []
    for path in root.rglob("*"):
        if not path.is_file() or not path.stat().st_size:
            continue
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            place = data.find(b"<<")
            while place >= 0:
                if data[place : place + len(texts[0])] in wanted:
                    found.append(path.name)
                    break
                place = data.find(b"<<", place + 1)
    return found


class Table:
    def __init__(self) -> None:
        self.rows: list[tuple[str, float, int, str]] = []

    @contextmanager
    def time_row(self, what: str, root: Path, note: str = "") -> Iterator[list[str]]:
        before = sizes(root) if root.exists() else {}
        notes = [note] if note else []
        began = time.monotonic()
        yield notes
        took = time.monotonic() - began
        after = sizes(root)
        new = sum(size for name, (size, stamp) in after.items() if before.get(name) != (size, stamp))
        self.rows.append((what, took, new, "; ".join(notes)))
        print(f"{what}: {took:.2f} s, {new:,} bytes new; {'; '.join(notes)}", file=sys.stderr, flush=True)

    def print(self) -> None:
        print("| what | s | bytes written | |\n|---|---|---|---|")
        for what, took, new, note in self.rows:
            print(f"| {what} | {took:.2f} | {new:,} | {note} |")


def measure(folder: Path, rows: int, body: int) -> None:
    root, table, source = folder / "d", Table(), random.Random(1)
    more, asked, gone = max(1, rows // 100), min(rows, 10_000), min(rows // 10, 1_000)
    with table.time_row(f"create {rows:,} rows with look-ups of key, url, body:sha256", root):
        write(root, range(rows), body)
    base = sum(size for size, _ in sizes(root).values())
    with table.time_row(f"append {more:,} rows", root):
        write(root, range(rows, rows + more), body, append=True)
    notes_of = table.rows[-1]
    table.rows[-1] = (*notes_of[:3], f"{100 * notes_of[2] / base:.2f} % of the bytes before")
    with table.time_row("create the same rows again under another ref", root):
        write(root, range(rows), body, ref="twin")
    ds = shardkit.open(root)
    urls = [f"https://example.org/{source.randrange(rows + 2 * more)}/page.html" for _ in range(asked)]
    with table.time_row(f"find {asked:,} urls, in the process", root) as notes:
        field, hashes = hash_values(ds.schema, "url", urls)
        matches = find_samples(ds, field, hashes)
        notes.append(f"{len(matches.sample):,} samples found")
    check_found(ds, urls, matches.value.tolist(), matches.sample.tolist(), rows + more)
    listed = folder / "urls"
    listed.write_text("\n".join(urls) + "\n")
    with table.time_row(f"`shardkit find --field url --list` of {asked:,}, the whole command", root):
        command = [
            sys.executable,
            "-m",
            "shardkit_tools",
            "find",
            str(root),
            "--field",
            "url",
            "--list",
            str(listed),
        ]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    with table.time_row("merge with itself under two names", folder / "m"):
        merge_datasets({"a": root, "b": root}, folder / "m")
    keys = [f"doc-{number:08d}" for number in source.sample(range(rows), gone)]
    with table.time_row(f"remove {gone:,} rows (versions without them)", root):
        remove(str(root), keys=keys, reason="bench")
    victims = [f"doc-{number:08d}" for number in range(0, rows, max(1, rows // 20))][:20]
    texts = [marker(int(key[4:])) for key in victims]
    assert holding(root, texts), "the search finds what is there"
    held = [key for key in victims if key not in set(keys)]
    with table.time_row(f"remove --erase {len(held)} rows, all over the shards", root) as notes:
        report = erase(str(root), keys=held, reason="bench")
        notes.append(f"{report.rewritten} shards rewritten, {report.bytes:,} bytes deleted")
    began = time.monotonic()
    left = holding(root, [marker(int(key[4:])) for key in held])
    table.rows.append(
        ("byte search of the whole root for them", time.monotonic() - began, 0, f"{len(left)} files")
    )
    assert not left
    with table.time_row("verify --level read", root) as notes:
        notes.append("clean" if verify(root).exit_code == 0 else "DAMAGED")
    now = shardkit.open(root)
    notes_text = f"{len(now):,} samples, expected {rows + more - gone - len(held):,}"
    assert len(now) == rows + more - gone - len(held)
    table.rows.append(("samples left", 0.0, 0, notes_text))
    table.print()


def check_found(
    ds: shardkit.Dataset, urls: list[str], values: list[int], samples: list[int], rows: int
) -> None:
    expected = {place for place, url in enumerate(urls) if int(url.split("/")[3]) < rows}
    assert set(values) == expected
    for value, sample in random.Random(2).sample(list(zip(values, samples, strict=True)), 20):
        assert ds[sample]["url"] == urls[value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--body", type=int, default=400, help="bytes of a row's body")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy "
        f"{version('numpy')}, pyarrow {version('pyarrow')}; {given.rows:,} rows of {given.body} bytes and more\n"
    )
    folder = Path(tempfile.mkdtemp(prefix="versions-", dir=given.folder))
    try:
        measure(folder, given.rows, given.body)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
