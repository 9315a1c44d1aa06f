"""Measure the CPU time per picture of image loaders: shardkit, torchvision, DALI, FFCV and others.

    python tools/bench/images.py --peers-python PATH [--dali-python PATH] [--ffcv-python PATH] [--spdl-python PATH]
        [--quick] --out tools/bench/results/images

Every loader runs in its own process with one decoding thread. All make random resized crops of 224 with flip of the
same JPEGs, and take turns epoch by epoch. The figure is the CPU time of the whole process, because other load on the
machine disturbs it less than rates. The pictures are cut from the photographs in scikit-learn and matplotlib.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import shardkit
from bench.machine import machine_facts
from bench.peer_versions import versions

PHOTOGRAPHS: Final = {
    "sklearn": ("datasets/images/china.jpg", "datasets/images/flower.jpg"),
    "matplotlib": ("mpl-data/sample_data/grace_hopper.jpg",),
}
SETS: Final = {  # name → (width, height, progressive, number of pictures)
    "500x375": (500, 375, False, 256),
    "600x450": (600, 450, False, 256),
    "600x450-progressive": (600, 450, True, 256),
    "2000x1500": (2000, 1500, False, 64),
    "2000x1500-progressive": (2000, 1500, True, 64),
}
LABELS: Final = {
    "shardkit": "**shardkit**",
    "bare": "its decoder alone, in a loop",
    "torchvision_v2": "torchvision decode_jpeg + v2",
    "torchvision_pillow": "torchvision ImageFolder + Pillow",
    "webdataset": "webdataset + Pillow",
    "dali": "DALI on the CPU",
    "ffcv": "FFCV",
    "spdl": "SPDL",
}
OWN_PYTHON: Final = ("dali", "ffcv", "spdl")  # their requirements conflict
KINDS: Final = ("uint8", "float32")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers-python", help="interpreter with torchvision and webdataset")
    for name in OWN_PYTHON:
        parser.add_argument(
            f"--{name}-python", help=f"interpreter with {LABELS[name]}, torch and torchvision"
        )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="two rounds of a quarter of the pictures")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--out", help="path without suffix for .md and .json")
    options = parser.parse_args()
    load, scratch = os.getloadavg()[0], Path(tempfile.mkdtemp(prefix="images-bench-"))
    pythons = {name: vars(options)[f"{name if name in OWN_PYTHON else 'peers'}_python"] for name in LABELS}
    pythons |= {"shardkit": sys.executable, "bare": sys.executable}
    readers, rounds = {}, 2 if options.quick else options.rounds
    try:
        sizes = {name: make_pictures(scratch / name, name, options.quick) for name in options.sets.split(",")}
        readers = {name: Reader(name, python, scratch) for name, python in pythons.items() if python}
        found = measure(readers, list(sizes), rounds)
    finally:
        for reader in readers.values():
            reader.close()
        shutil.rmtree(scratch, ignore_errors=True)
    peers = versions(options.peers_python) if options.peers_python else {}
    peers |= {
        name: _version(python, package)
        for name, package in (("dali", "nvidia-dali-cuda120"), ("ffcv", "ffcv"), ("spdl", "spdl-io"))
        if (python := pythons[name])
    }
    facts = {
        **machine_facts(),
        "bytes": sizes,
        "load": [load, os.getloadavg()[0]],
        "rounds": rounds,
        "peers": peers,
    }
    text = report(facts, found)
    if options.out:
        Path(options.out + ".md").write_text(text)
        Path(options.out + ".json").write_text(json.dumps({"facts": facts, "found": found}, indent=1) + "\n")
    print(text)


def _version(python: str, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()


class Reader:
    """A loader in its own process."""

    def __init__(self, name: str, python: str, scratch: Path) -> None:
        script = str(Path(__file__).with_name("image_readers.py"))
        self._process = subprocess.Popen(
            [python, script, name, str(scratch)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def epoch(self, pictures: str, kind: str, threads: int = 1) -> dict[str, Any]:
        """Run one epoch; image_readers.py describes the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{pictures} {kind} {threads}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        return dict(json.loads(line)) if line else {"error": f"ended with {self._process.wait()}"}

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()


def make_pictures(folder: Path, name: str, quick: bool = False) -> int:
    """Write JPEGs in two classes as files, shards and a tar; return their mean size in bytes."""
    from PIL import Image, ImageEnhance

    width, height, progressive, count = SETS[name]
    count = max(32, count // 4) if quick else count
    sources = []
    for package, paths in PHOTOGRAPHS.items():
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            root = Path(spec.submodule_search_locations[0])
            sources += [Image.open(root / path).convert("RGB") for path in paths if (root / path).exists()]
    if not sources:
        raise SystemExit("no photographs found; run: pip install scikit-learn")
    rng, total = np.random.default_rng(0), 0
    with (
        shardkit.create(str(folder / "shards"), schema={"image": "bytes", "label": "int64"}) as writer,
        tarfile.open(folder / "webdataset.tar", "w") as tar,
    ):
        for number in range(count):
            source = sources[number % len(sources)]
            wide = source.width * rng.uniform(0.5, 1.0)
            high = min(source.height, wide * height / width)
            left, top = rng.uniform(0, source.width - wide), rng.uniform(0, source.height - high)
            cut = source.resize(
                (width, height), Image.Resampling.LANCZOS, box=(left, top, left + wide, top + high)
            )
            sink = io.BytesIO()
            ImageEnhance.Brightness(cut).enhance(rng.uniform(0.8, 1.2)).save(
                sink, "JPEG", quality=int(rng.integers(90, 96)), progressive=progressive
            )
            payload = sink.getvalue()
            path = folder / "pictures" / str(number % 2) / f"{number:05d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(payload)
            writer.add({"image": payload, "label": number % 2})
            for suffix, content in (("jpg", payload), ("cls", str(number % 2).encode())):
                member = tarfile.TarInfo(f"{number:05d}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            total += len(payload)
    return total // count


def measure(readers: dict[str, Reader], sets: list[str], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Run the readers in turns; return "set kind threads reader" → answers of its epochs."""
    found: dict[str, list[dict[str, Any]]] = {}
    for number in range(rounds):
        for pictures in sets:
            print(f"round {number + 1} of {rounds}: {pictures}, load {os.getloadavg()[0]:.1f}", flush=True)
            for kind in KINDS:
                for name, reader in readers.items():
                    for threads in (1, 2) if name == "shardkit" and kind == "uint8" else (1,):
                        answer = reader.epoch(pictures, kind, threads)
                        found.setdefault(f"{pictures} {kind} {threads} {name}", []).append(answer)
    return found


def _cpu_ms(answers: list[dict[str, Any]]) -> list[float]:
    return [1e3 * one["cpu_s"] / one["samples"] for one in answers if one.get("samples")]


def report(facts: dict[str, Any], found: dict[str, list[dict[str, Any]]]) -> str:
    """Return the results in Markdown: tables of CPU time, ratios and threads."""
    own = ", ".join(f"{name} {one}" for name, one in facts["versions"].items())
    peers = ", ".join(f"{name} {one}" for name, one in facts["peers"].items())
    head = (
        f"# Pictures into batches, {facts['date']}\n\n{facts['cpus']} virtual cores ({facts['processor']}), Python "
        f"{facts['python']}, load average {facts['load'][0]:.1f} before and {facts['load'][1]:.1f} after: other "
        "programs ran on the same cores, so CPU time is the figure, and rates are left out.\n\n"
        f"Versions: {own}. Peers: {peers}.\n\nWhole loaders, one decoding thread each, batches of 32, random resized "
        f"crop to 224 and flip, (3, 224, 224). {facts['rounds']} rounds, in turns. CPU ms per picture of the whole "
        "process: median (lowest).\n"
    )
    lines = [head]
    sets = list(facts["bytes"])
    for kind in KINDS:
        lines.append(f"\n## {kind}{' (normalised)' * (kind == 'float32')}\n")
        lines.append(
            "| loader | " + " | ".join(f"{one}, {facts['bytes'][one] // 1000} KB" for one in sets) + " |"
        )
        lines.append("|---" * (len(sets) + 1) + "|")
        for name, label in LABELS.items():
            cells = []
            for one in sets:
                answers = found.get(f"{one} {kind} 1 {name}", [])
                cpu = _cpu_ms(answers)
                failed = next((answer["error"] for answer in answers if "error" in answer), "not measured")
                cells.append(f"{statistics.median(cpu):.2f} ({min(cpu):.2f})" if cpu else failed[:60])
            lines.append(f"| {label} | {' | '.join(cells)} |")
        lines.append("\nTimes shardkit's CPU, of medians (of lowest):\n")
        lines += ["| loader | " + " | ".join(sets) + " |", "|---" * (len(sets) + 1) + "|"]
        for name, label in LABELS.items():
            cells = []
            for one in sets:
                mine, other = (_cpu_ms(found.get(f"{one} {kind} 1 {who}", [])) for who in ("shardkit", name))
                told = mine and other and name != "shardkit"
                cells.append(
                    f"{statistics.median(other) / statistics.median(mine):.2f} ({min(other) / min(mine):.2f})"
                    if told else ""
                )  # fmt: skip
            if any(cells):
                lines.append(f"| {label} | {' | '.join(cells)} |")
    lines += [
        "\n## Two threads\n",
        "| pictures | wall, one ÷ two, best of rounds | CPU, two ÷ one, lowest |",
        "|---" * 3 + "|",
    ]
    for one in sets:
        first, second = (
            [a for a in found.get(f"{one} uint8 {n} shardkit", []) if a.get("samples")] for n in (1, 2)
        )
        if first and second:
            wall = min(a["wall_s"] for a in first) / min(a["wall_s"] for a in second)
            lines.append(f"| {one} | {wall:.2f} | {min(_cpu_ms(second)) / min(_cpu_ms(first)):.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
