"""Measure reading: shardkit, the limits of the machine and peers, each in its own process, in turns.

    python tools/bench/read.py                        # shardkit, limits, the memory map; writes results/read.*
    python tools/bench/read.py --peers-python PATH    # and the peers of that environment
    python tools/bench/read.py --quick                # smoke test: figures are meaningless; writes nothing

A repeat starts every reader afresh, then asks each in turn for one epoch: the first, second and third touched, then
read once, then only delivered. The last epoch runs in a new process with the page cache dropped. The part `workers`
reads tokens with two DataLoader workers. The part `s3` reads a LocalStack bucket and compares with obstore, which
fetches the same ranges. The part `pictures` reads one epoch from a bucket that answers 10 ms late.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the test servers
sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.machine import machine_facts
from bench.peer_versions import versions
from bench.reading import bucket, contest, pictures
from bench.reading.processes import PEERS, interpreter
from bench.reading.report import report
from bench.reading.workloads import WORKLOADS

RESULTS = Path(__file__).with_name("results") / "read"
PARTS = (*WORKLOADS, "workers", "s3", "pictures")
QUICK = {"scale": 0.02, "epochs": 2, "repeats": 1, "seconds": 1.0}
FULL = {"scale": 1.0, "epochs": 3, "repeats": 3, "seconds": 5.0}


def main() -> None:
    options = _options()
    load, started = os.getloadavg()[0], time.time()
    results: dict[str, Any] = {}
    for part in options.workloads:
        print(part, flush=True)
        scratch = Path(tempfile.mkdtemp(prefix="read-bench-", dir=options.scratch))
        begun = time.time()
        try:
            results[part] = _measure(part, options, scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        results[part]["part_s"] = round(time.time() - begun)
        text = _write(options, results, load, started)  # saves results before a later part can hang
    print(text)


def _measure(part: str, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    if part == "s3":
        return bucket.measure(options, scratch)
    if part == "pictures":
        return pictures.measure(options, scratch)
    if part == "workers":
        return contest.measure(WORKLOADS["tokens"], options, scratch, workers=2)
    return contest.measure(WORKLOADS[part], options, scratch)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--readers", nargs="*", help="only these modules of tools/bench/reading/readers")
    parser.add_argument("--epochs", type=int, help="touched, of each process; 3")
    parser.add_argument("--scale", type=float, help="share of the stated row counts; 1")
    parser.add_argument("--repeats", type=int, help="fresh processes of each reader; 3")
    parser.add_argument("--seconds", type=float, help="longest epoch, its rate is that of what was read; 5")
    parser.add_argument(
        "--peers-python",
        help="interpreter of an environment with the peers, or the folder of those of bench/interruptions",
    )
    parser.add_argument("--scratch", help="folder on the disk to be measured; default: that of /tmp")
    parser.add_argument("--out", type=Path, help="path without suffix for .md and .json")
    parser.add_argument("--quick", action="store_true", help="little of everything")
    options = parser.parse_args()
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.out is None and not options.quick:
        options.out = RESULTS
    return options


def _write(options: argparse.Namespace, results: dict[str, Any], load: float, started: float) -> str:
    facts = {
        **machine_facts(),
        **{name: getattr(options, name) for name in ("scale", "epochs", "repeats", "seconds")},
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "took_s": round(time.time() - started),
        "peer_versions": _peer_versions(options.peers_python),
    }
    text = report(facts, results)
    if options.out:
        options.out.with_suffix(".md").write_text(text)
        options.out.with_suffix(".json").write_text(_lines({"facts": facts, "results": results}))
    return text


def _peer_versions(peers: str | None) -> dict[str, str]:
    """Return the versions of the packages in all environments of the peers."""
    pythons = {interpreter(peers, reader) for reader in PEERS} - {sys.executable} if peers else set()
    return {name: found for python in sorted(pythons) for name, found in versions(python).items()}


def _lines(document: dict[str, Any]) -> str:
    """Return the results as JSON with one line per reader of each part."""
    parts = []
    for part, result in document["results"].items():
        readers = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in result["readers"].items())
        rest = json.dumps({name: value for name, value in result.items() if name != "readers"})
        parts.append(f' {json.dumps(part)}: {rest[:-1]}, "readers": {{\n{readers}}}}}')
    return f'{{"facts": {json.dumps(document["facts"])},\n"results": {{\n' + ",\n".join(parts) + "}}\n"


if __name__ == "__main__":
    main()
