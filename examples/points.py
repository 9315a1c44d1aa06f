"""Arguments and data of the other examples: DATA with the fields `FIELDS`, or generated points without DATA."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np

import shardkit
from shardkit.errors import NotFoundError

FIELDS = {"x": "float32[8]", "y": "int64"}
OWN = Path("points")


def parse_arguments() -> argparse.Namespace:
    """Parse DATA (optional), RUN and --steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", nargs="?")
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    return parser.parse_args()


def open_points(data: str | None) -> shardkit.Dataset:
    """Open the dataset on this rank; without DATA, rank 0 first writes one in the working directory."""
    if data is None and int(os.environ.get("RANK", "0")) == 0 and not OWN.exists():
        make_points(OWN)
    ds = shardkit.open(data) if data is not None else _once_it_is_there()
    found = {name: str(kind) for name, kind in ds.schema.items()}
    if any(found.get(name) != kind for name, kind in FIELDS.items()):
        raise SystemExit(
            f"{data} has the fields {found}, this example takes {FIELDS}; leave DATA out to have some made"
        )
    return ds


def make_points(root: Path) -> None:
    """Write 800 points in eight dimensions; their class is the side of a plane on which they are."""
    numbers = np.random.default_rng(0)
    with shardkit.create(str(root), schema=FIELDS, format="arrow", block_size="1KiB") as writer:
        for x in numbers.normal(size=(800, 8)).astype(np.float32):
            writer.add({"x": x, "y": int(x.sum() > 0)})


def _once_it_is_there() -> shardkit.Dataset:
    deadline = time.monotonic() + 60
    while True:
        try:
            return shardkit.open(str(OWN))
        except NotFoundError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
