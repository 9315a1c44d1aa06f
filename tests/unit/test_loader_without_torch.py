"""A process that has not imported torch gets numpy arrays, epoch after epoch, and torch stays away."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np

import shardkit

PROGRAM = """
    import sys
    import numpy as np
    import shardkit

    ds = shardkit.open(sys.argv[1])
    loader = ds.loader(ds.plan(global_batch=10, lanes=2))
    epochs = lambda: ({"x": batch["x"], "y": batch["y"]} for batch in loader)  # what from_generator calls
    first, second = list(epochs()), list(epochs())
    for batches in (first, second):
        assert all(type(batch["x"]) is np.ndarray and batch["x"].dtype == np.float32 for batch in batches)
        assert sorted(np.concatenate([batch["y"] for batch in batches]).tolist()) == list(range(40))
    assert [b["y"].tolist() for b in first] != [b["y"].tolist() for b in second]
    assert "torch" not in sys.modules
    loader.close()
"""


def test_numpy_without_torch(tmp_path: Path) -> None:
    root = str(tmp_path / "points")
    with shardkit.create(root, schema={"x": "float32[8]", "y": "int64"}) as writer:
        for n in range(40):
            writer.add({"x": np.full(8, n, dtype=np.float32), "y": n})
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), root], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
