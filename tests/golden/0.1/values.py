"""Digests of what a dataset and a loader hand out: the same for `make.py`, which ran on 0.1, and the tests of today."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def digest_samples(samples: Iterable[Mapping[str, Any]]) -> str:
    """SHA-256 over samples in order: names, types and values of their fields."""
    digest = hashlib.sha256()
    for sample in samples:
        for name in sorted(sample):
            digest.update(_bytes_of(name) + _bytes_of(sample[name]))
        digest.update(b"\n")
    return digest.hexdigest()


def digest_batch(batch: Any) -> str:
    """SHA-256 of one batch, its step and sample numbers included."""
    return digest_samples([{name: batch[name] for name in batch}])


def digest_steps(plan: Any, steps: int) -> str:
    """SHA-256 over the sample numbers of the first steps."""
    return digest_samples({"rows": plan.step(step)} for step in range(steps))


def _bytes_of(value: Any) -> bytes:
    """Type, length and value; numbers and arrays alike whatever library holds them."""
    if hasattr(value, "numpy"):
        value = value.numpy()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        kind, data = f"{value.dtype.str}{value.shape}", np.ascontiguousarray(value).tobytes()
    elif isinstance(value, tuple):
        kind, data = "tuple", b"".join(map(_bytes_of, value))
    elif isinstance(value, list) and any(isinstance(one, bytes) for one in value):
        kind, data = "list", b"".join(map(_bytes_of, value))
    elif isinstance(value, bytes | bytearray | memoryview):
        kind, data = "bytes", bytes(value)
    else:
        kind, data = "json", json.dumps(value, sort_keys=True).encode()
    return f"{kind}:{len(data)}:".encode() + data
