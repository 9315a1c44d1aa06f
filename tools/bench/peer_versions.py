"""Find the versions of shardkit and its peers in the environment of another interpreter."""

from __future__ import annotations

import json
import subprocess

PACKAGES = ("shardkit", "torch", "numpy", "pyarrow", "zstandard", "mosaicml-streaming", "litdata", "webdataset",
            "datasets", "grain", "array-record", "pylance", "lancedb", "megatron-energon", "spdl", "ffcv",
            "torchvision", "pillow")  # fmt: skip
_PROGRAM = """
import importlib.metadata as m, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def versions(python: str) -> dict[str, str]:
    """Return package → version of the installed packages.

    Raises:
        OSError, subprocess.CalledProcessError: ``python`` is not a Python interpreter.
    """
    done = subprocess.run([python, "-c", _PROGRAM, *PACKAGES], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))
