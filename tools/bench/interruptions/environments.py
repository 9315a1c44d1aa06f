"""One virtual environment for each library, at its current version."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Environment:
    """Where an adapter runs."""

    name: str  # of the folder; empty: the environment of shardkit
    packages: tuple[str, ...]
    for_buckets: tuple[str, ...] = ()  # which tools/bench/read.py needs besides, to read from a bucket


_GRAIN = Environment("grain", ("grain", "array-record"))
_DATASETS = Environment("datasets", ("datasets", "torchdata"), ("s3fs",))
_LANCE = Environment("lancedb", ("lancedb", "pylance"))
_WEBDATASET = Environment("webdataset", ("webdataset",))
_OWN = Environment("", ("shardkit",))
ENVIRONMENTS = {
    "shardkit_loader": _OWN,
    "shardkit_torch": _OWN,
    "mosaicml": Environment("mosaicml_streaming", ("mosaicml-streaming",)),
    "grain_elastic": _GRAIN,
    "lancedb_streaming": _LANCE,
    "lancedb_workers": _LANCE,
    "energon": Environment("megatron_energon", ("megatron-energon",), ("boto3",)),
    "litdata_streaming": Environment("litdata", ("litdata",)),
    "grain_dataloader": _GRAIN,
    "hf_map": _DATASETS,
    "hf_iterable": _DATASETS,
    "hf_iterable_plain": _DATASETS,
    "torchdata_map": Environment("torchdata", ("torchdata",)),
    "wds_split": _WEBDATASET,
    "wds_resampled": _WEBDATASET,
    "broken": _OWN,
}
"""Environment of each adapter, in the order of the page."""


def python_of(adapter: str, folder: Path) -> str:
    """Return the interpreter of an adapter's environment. Make the environment if there is none."""
    environment = ENVIRONMENTS[adapter]
    if not environment.name:
        return sys.executable
    python = folder / environment.name / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
    packages = [*environment.packages, *environment.for_buckets, "torch"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--upgrade", *packages], check=True)
    return str(python)
