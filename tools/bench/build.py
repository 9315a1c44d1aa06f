"""Measure builds: limits of the machine, shardkit and its peers' writers in turns; medians and ranges.

    python tools/bench/build.py FOLDER --scale 0.25 --peers-python PATH --out tools/bench/results/build-peers

FOLDER must be on the disk to be measured, not in memory (tmpfs). All files created there are removed. The two
workloads have ``--scale`` times 1.6 GB: rows of 2,048 tokens from an ``.npy``, and files of 100 kB. All writers read
the same samples from the same warm page cache. shardkit and the limits sync their files; the peers do not.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

sys.path.insert(0, str(Path(__file__).parents[1]))
import shardkit
from bench.contests import Contest, ContestResults, Entry, Round, hold, time_round
from bench.machine import machine_facts
from bench.peer_versions import versions
from shardkit.errors import RunError
from shardkit_tools.building.build_run import build

PEERS = {
    "mds": "MosaicML MDSWriter (no hash, order of the source)",
    "mds-hashes": "MosaicML MDSWriter, SHA-256 and XXH3 of every shard",
    "litdata": "LitData optimize, 1 worker",
    "webdataset": "webdataset TarWriter",
    "grain": "Grain / ArrayRecord, group_size 1",
    "hf": "HF datasets from_generator",
    "lance": "Lance write_dataset (no shuffle, no hash)",
}
LIMIT = "write + SHA-256 + XXH3, synced"
FULL_MEGABYTES = 1600
PIECE = 1 << 20
BLOB_BYTES = 100_000
TOKENS = 2048


def make_tokens(path: Path, megabytes: int) -> int:
    """Write an ``.npy`` of int32[2048] rows; return the size of the tokens in bytes."""
    rows = max(1, megabytes * 1_000_000 // (4 * TOKENS))
    array = np.lib.format.open_memmap(path, "w+", np.int32, (rows, TOKENS))
    for start in range(0, rows, 4096):
        random = np.random.default_rng(start)
        array[start : start + 4096] = random.integers(0, 50_000, (min(4096, rows - start), TOKENS))
    array.flush()
    return rows * 4 * TOKENS


def write_limit(path: Path, size: int) -> Round:
    """Write ``size`` bytes with SHA-256 and XXH3, and sync them; the amount is in bytes."""
    piece = np.random.default_rng(2).bytes(PIECE)
    os.sync()  # earlier writes must not count

    def work() -> None:
        with path.open("wb") as stream:
            for first in range(0, size, PIECE):
                part = memoryview(piece)[: size - first]
                stream.write(part)
                hashlib.sha256(part).digest()
                xxhash.xxh3_64_intdigest(part)
            stream.flush()
            os.fsync(stream.fileno())

    try:
        return time_round(size, work)
    finally:
        path.unlink(missing_ok=True)


def build_round(source: Path, size: int, root: Path, form: str, jobs: int) -> Round:
    """Build a root and remove it; the amount is the size of the source in bytes."""
    os.sync()
    try:
        return time_round(size, lambda: build(str(source), root, format=form, jobs=jobs))
    finally:
        shutil.rmtree(root, ignore_errors=True)


def make_blobs(folder: Path, megabytes: int) -> int:
    """Write files of 100 kB; return their total size in bytes."""
    folder.mkdir()
    data = np.random.default_rng(1).bytes(BLOB_BYTES)
    count = max(1, megabytes * 1_000_000 // BLOB_BYTES)
    for n in range(count):
        (folder / f"{n:07d}.bin").write_bytes(n.to_bytes(8, "little") + data[8:])
    return count * BLOB_BYTES


def main() -> None:
    options = _options()
    Path(options.folder).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    megabytes = max(16, int(FULL_MEGABYTES * options.scale))
    facts = {
        **machine_facts(),
        "load_before": os.getloadavg(),
        "scale": options.scale,
        "repeats": options.repeats,
    }
    if options.peers_python:
        facts["peers"] = versions(options.peers_python)
    held: list[ContestResults] = []
    try:
        tokens, blobs = folder / "tokens.npy", folder / "blobs"
        for name, source, size in (
            ("8 KiB token rows", tokens, make_tokens(tokens, megabytes)),
            ("100 kB blobs", blobs, make_blobs(blobs, megabytes)),
        ):
            contest = Contest(name, {"bytes": size}, _entries(source, size, folder, options))
            held.append(hold(contest, options.repeats, lambda text: print(text, file=sys.stderr, flush=True)))
            facts["load_after"] = os.getloadavg()
            text = report(facts, held)
            if options.out:
                Path(f"{options.out}.json").write_text(
                    json.dumps(
                        {"facts": facts, "contests": [dataclasses.asdict(one) for one in held]}, indent=1
                    )
                    + "\n",
                    encoding="utf-8",
                )
                Path(f"{options.out}.md").write_text(text, encoding="utf-8")
        print(text)
    finally:
        shutil.rmtree(folder)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="on the disk to be measured")
    parser.add_argument("--scale", type=float, default=0.25, help="share of 1.6 GB per workload")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers-python", help="interpreter that has the peers' packages")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--out", help="write OUT.json and OUT.md")
    return parser.parse_args()


def _entries(source: Path, size: int, folder: Path, options: argparse.Namespace) -> list[Entry]:
    def building(form: str, jobs: int) -> Callable[[], Round]:
        return lambda: build_round(source, size, folder / "root", form, jobs)

    entries = [
        Entry("write, synced", "limit", lambda: _write(folder / "limit", size)),
        Entry("SHA-256", "limit", lambda: _hash_round(size, lambda piece: hashlib.sha256(piece).digest())),
        Entry("XXH3", "limit", lambda: _hash_round(size, xxhash.xxh3_64_intdigest)),
        Entry(LIMIT, "limit", lambda: write_limit(folder / "limit", size)),
        *(
            Entry(f"shardkit build, {form}, jobs {jobs}", "shardkit", building(form, jobs))
            for form in ("arrow", "tar")
            for jobs in (1, 2)
        ),
        Entry(
            "shardkit create, arrow, no shuffle", "shardkit", lambda: _create(source, size, folder / "root")
        ),
    ]
    if options.peers_python:
        turn = functools.partial(_peer, source=source, size=size, folder=folder, python=options.peers_python)
        entries += [Entry(PEERS[peer], "peer", functools.partial(turn, peer)) for peer in options.peers]
    return entries


def _write(path: Path, size: int) -> Round:
    piece = np.random.default_rng(2).bytes(PIECE)
    os.sync()

    def work() -> None:
        with path.open("wb") as stream:
            for first in range(0, size, PIECE):
                stream.write(memoryview(piece)[: size - first])
            stream.flush()
            os.fsync(stream.fileno())

    try:
        return time_round(size, work)
    finally:
        path.unlink(missing_ok=True)


def _hash_round(size: int, digest: Callable[[Any], object]) -> Round:
    piece = np.random.default_rng(2).bytes(PIECE)

    def work() -> None:
        for first in range(0, size, PIECE):
            digest(memoryview(piece)[: size - first])

    return time_round(size, work)


def _create(source: Path, size: int, root: Path) -> Round:
    is_tokens = source.suffix == ".npy"
    kind = "int32[2048]" if is_tokens else "bytes"
    rows = np.load(source, mmap_mode="r") if is_tokens else sorted(source.iterdir())
    os.sync()

    def work() -> None:
        with shardkit.create(root, {"value": kind}, format="arrow", shuffle=False) as writer:
            for row in rows:
                writer.add({"value": row if is_tokens else row.read_bytes()})

    try:
        return time_round(size, work)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _peer(peer: str, source: Path, size: int, folder: Path, python: str) -> Round:
    out = folder / "peer"
    program = Path(__file__).with_name("build_peers.py")
    os.sync()
    try:
        done = subprocess.run(
            [python, str(program), peer, str(source), str(out)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RunError(
                f"{peer}: {done.stderr.strip().splitlines()[-1][:200] if done.stderr.strip() else 'failed'}"
            )
        found = json.loads(done.stdout.strip().splitlines()[-1])
        return Round(size, found["seconds"], found["cpu_s"])
    finally:
        shutil.rmtree(out, ignore_errors=True)


def _list_rows(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())


def report(facts: dict[str, Any], held: list[ContestResults]) -> str:
    """Return the results in Markdown, with one table per workload."""
    peers = f"; peers: {_list_rows(facts['peers'])}" if "peers" in facts else ""
    before, after = facts["load_before"][0], facts["load_after"][0]
    lines = [
        f"# Building, {facts['date']}\n",
        (
            f"{facts['cpus']} virtual cores ({facts['processor']}), load average {before:.1f} before and "
            f"{after:.1f} after. Python {facts['python']}; scale {facts['scale']}, {facts['repeats']} "
            "rounds in turn after one that does not count; rates are medians (range) by the clock, and per CPU second, "
            "which hardly notices neighbours. shardkit and the limits sync what they write, the peers do not. shardkit "
            "shuffles globally (but for `create`), hashes the source (SHA-256), every block (SHA-256, XXH3) and every "
            "shard (SHA-256).\n"
        ),
        f"Versions: {_list_rows(facts['versions'])}{peers}",
    ]
    for one in held:
        lines += ["", f"## {one.name}, {one.conditions['bytes'] / 1e6:.0f} MB", ""]
        lines += [
            "| | MB/s, median (range) | of the limit | MB per CPU second | of the limit, by CPU |",
            "|---|---|---|---|---|",
        ]
        limit = one.rounds.get(LIMIT, [])
        for name, rounds in one.rounds.items():
            rates = [r.amount / 1e6 / r.seconds for r in rounds]
            cpu = statistics.median(r.amount / 1e6 / max(r.cpu_s, 1e-9) for r in rounds)
            clock_share = statistics.median(
                mark.seconds / mine.seconds for mine, mark in zip(rounds, limit, strict=True)
            )
            cpu_share = statistics.median(
                mark.cpu_s / max(mine.cpu_s, 1e-9) for mine, mark in zip(rounds, limit, strict=True)
            )
            shown = f"**{name}**" if one.kinds[name] == "shardkit" else name
            lines.append(
                f"| {shown} | {statistics.median(rates):.0f} ({min(rates):.0f}–{max(rates):.0f}) | {clock_share:.2f} | "
                f"{cpu:.0f} | {cpu_share:.2f} |"
            )
        lines += [f"| {name} | failed: {why} | | | |" for name, why in one.failures.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
