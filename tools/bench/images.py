"""Image pipelines: JPEGs decoded, cropped at random, flipped, normalised; shardkit beside torchvision and webdataset.

    python tools/bench/images.py --peers-python PATH --out tools/bench/results/images

The JPEGs are crops of photographs that scikit-learn and matplotlib bring along, each another one, of about 100 KB.
Every reader is a process of its own, has a copy of them in its own format, and decodes with Pillow. Epochs are
interleaved and left after `--seconds`: long ones, since what a reader prefetched by then counts in its CPU time.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import shutil
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.reading.contest import Entrant, first_batches, take_turns
from bench.reading.figures import of, rates, spread
from bench.reading.processes import Job, build_data
from bench.reading.samples import IMAGES
from shardkit_tools.benchmarks.suite import machine_facts, versions

PHOTOGRAPHS = {
    "sklearn": ("datasets/images/china.jpg", "datasets/images/flower.jpg"),
    "matplotlib": ("mpl-data/sample_data/grace_hopper.jpg",),
}
CLASSES = 10
SIZE = (600, 450)
CONTESTANTS = {  # reader → (its name, worker counts, peer)
    "images_shardkit": ("**shardkit**", {0: "1 thread", 2: "2 processes"}, False),
    "images_shardkit_threads": ("**shardkit**", {2: "2 threads"}, False),
    "images_torchvision": ("torchvision ImageFolder + DataLoader", {0: "none", 2: "2 processes"}, True),
    "images_webdataset": ("webdataset", {0: "none", 2: "2 processes"}, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peers-python", help="interpreter of an environment with torchvision and webdataset"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="share of the 2,000 pictures")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="longest timed epoch")
    parser.add_argument("--out", help="path without suffix for .md and .json")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    scratch = Path(tempfile.mkdtemp(prefix="images-bench-"))
    try:
        count, mean_bytes = make_pictures(scratch / "pictures", IMAGES.rows(options.scale))
        print(f"made {count} pictures of {mean_bytes / 1000:.0f} KB on average", flush=True)
        readers = measure(options, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    facts = {**machine_facts(), "pictures": count, "mean_bytes": mean_bytes, "load_before": load,
             "load_after": os.getloadavg()[0], "repeats": options.repeats, "seconds_per_epoch": options.seconds,
             "peer_versions": versions(options.peers_python) if options.peers_python else {}}  # fmt: skip
    text = report(facts, readers)
    if options.out:
        Path(options.out + ".md").write_text(text)
        Path(options.out + ".json").write_text(
            json.dumps({"facts": facts, "readers": readers}, indent=1) + "\n"
        )
    print(text)


def make_pictures(folder: Path, count: int) -> tuple[int, float]:
    """Write crops of photographs, folder by class; returns how many there are and their mean size."""
    from PIL import Image, ImageEnhance

    sources = []
    for package, paths in PHOTOGRAPHS.items():
        found = importlib.util.find_spec(package)
        if found is not None and found.submodule_search_locations:
            root = Path(found.submodule_search_locations[0])
            sources += [Image.open(root / path).convert("RGB") for path in paths if (root / path).exists()]
    if not sources:
        raise SystemExit("no photographs found; run: pip install scikit-learn")
    rng, total = np.random.default_rng(0), 0
    for number in range(count):
        source = sources[number % len(sources)]
        share = rng.uniform(0.5, 1.0)
        wide, high = int(source.width * share), int(source.height * share)
        left, top = int(rng.integers(source.width - wide + 1)), int(rng.integers(source.height - high + 1))
        picture = source.resize(SIZE, Image.Resampling.LANCZOS, box=(left, top, left + wide, top + high))
        picture = ImageEnhance.Brightness(picture).enhance(rng.uniform(0.8, 1.2))
        sink = io.BytesIO()
        picture.save(sink, "JPEG", quality=int(rng.integers(92, 97)))
        path = folder / f"{number % CLASSES}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sink.getvalue())
        total += len(sink.getvalue())
    return count, total / count


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """What every reader gave, by reader and workers."""
    jobs = {
        name: Job(
            reader=name,
            workload=IMAGES.name,
            scale=options.scale,
            directory=str(scratch / name),
            python=options.peers_python if peer else sys.executable,
        )
        for name, (_, _, peer) in CONTESTANTS.items()
        if options.peers_python or not peer
    }
    failed = build_data(jobs)
    found: dict[str, Any] = {}
    entrants = {}
    for name, job in jobs.items():
        for workers in CONTESTANTS[name][1]:
            key = f"{name}/{workers}"
            found[key] = {"epochs": {}, "first": []} | ({"error": failed[name]} if name in failed else {})
            entrants[key] = Entrant(key, replace(job, workers=workers), frozenset({"first"}))
    for repeat in range(options.repeats):
        print(f"repeat {repeat + 1} of {options.repeats}", flush=True)
        first_batches(entrants, found)
        take_turns(entrants, found, options, repeat, ["touched"])
    return found


def report(facts: dict[str, Any], readers: dict[str, Any]) -> str:
    """Markdown: one table."""
    listed = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    peers = ", ".join(f"{name} {version}" for name, version in facts["peer_versions"].items())
    head = (
        f"# Image pipelines, {facts['date']}\n\n{facts['cpus']} virtual cores ({facts['processor']}), load average "
        f"{facts['load_before']:.1f} before and {facts['load_after']:.1f} after: rates suffer from neighbours, CPU per "
        f"sample less. Python {facts['python']}.\n\nVersions: {listed}. Peers: {peers}.\n\n"
        f"{facts['pictures']:,} JPEGs of {SIZE[0]} × {SIZE[1]} pixels, {facts['mean_bytes'] / 1000:.0f} KB on average, "
        "crops of photographs. Decoded with Pillow by all; random resized crop to 224 × 224, flip, normalised to "
        f"float32, batches of {IMAGES.batch}, shuffled. {facts['repeats']} interleaved repeats, each one epoch of a "
        f"fresh process, of at most {facts['seconds_per_epoch']:g} s (¹: cut by that), warm page cache. First batch: "
        "of a fresh process, imports included. shardkit verifies every block and draws each sample's augmentation from "
        "its place in the plan.\n"
    )
    columns = (
        "reader",
        "workers",
        "samples/s, median (range)",
        "CPU ms per sample",
        "first batch, s",
        "peak MiB",
    )
    lines = [head, f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for key, one in readers.items():
        name, workers = key.split("/")
        label, kinds, _ = CONTESTANTS[name]
        row = f"| {label} | {kinds[int(workers)]} "
        answers, speed = of(one, "touched", 0), spread(rates(one, "touched", 0))
        if "error" in one or speed is None:
            lines.append(f"{row}| failed: {one.get('error', 'not measured')[:80]} | | | |")
            continue
        cpu = statistics.median(answer["cpu_s"] / answer["samples"] for answer in answers)
        lines.append(
            f"{row}| {speed.told()}{'' if all(answer['whole'] for answer in answers) else '¹'} | {cpu * 1e3:.2f} "
            f"| {statistics.median(one['first']):.2f} | {max(answer['peak'] for answer in answers) / 2**20:.0f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
