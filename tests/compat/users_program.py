"""What a user types, and which types it has: `mypy --strict` reads it in lint, `test_dataset_tables` runs it.

A type that is not the asserted one, and a mistake that mypy does not find, are errors there.
"""

from __future__ import annotations

import contextlib
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import shardkit
from shardkit.errors import UsageError
from shardkit.loader import Batch
from shardkit.plan import Plan


def my_images() -> list[tuple[bytes, int]]:
    return [(bytes([n]), n % 3) for n in range(100)]


schema = {"image": "bytes", "label": "int64", "tokens": "int32[4]"}
with shardkit.create("data", schema, stratify="label") as writer:
    for jpeg, label in my_images():
        writer.add({"image": jpeg, "label": label, "tokens": [label] * 4})
print(writer.manifest.id)


def loss(tokens: NDArray[np.int32], weight: float) -> float:
    return float(tokens.mean()) * weight


ds = shardkit.open("data")
assert_type(ds[0], dict[str, Any])
assert_type(ds[[3, 5]], list[dict[str, Any]])
plan = ds.plan(global_batch=8, seed=0)
assert_type(plan, Plan)
with ds.loader(plan, rank=0, world=1, tensors=False) as loader:
    ahead: Batch = loader.peek()
    for batch in loader:
        assert_type(batch, Batch)
        assert_type(batch.array("tokens"), NDArray[Any])
        assert_type(batch.samples, NDArray[np.int64])
        assert_type(batch.step, int)
        state = loader.state_dict(after=batch)
        print(loss(batch.array("tokens"), batch.weight), batch["image"][0][:1])
with contextlib.suppress(UsageError):
    ds.loader(512)  # type: ignore[arg-type]
