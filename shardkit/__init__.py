"""shardkit: from source files to optimizer step, with the same data always and proof of it.

::

    tools/shardkit_tools   the `shardkit` command
    trainer/…_trainer      the bundled trainer
    shardkit
      ├── audit            proofs
      ├── torch            DataLoader datasets and checkpoint plug-ins
      ├── dataset          open, create: the public face
      ├── loader           batches
      ├── ledger           what was consumed
      ├── images           pictures into rows of batches
      ├── plan             who reads what, when (pure)
      ├── copies           placement, parity, replicating, repairing
      ├── reading          verified blocks from several places; the cache
      ├── repository       objects, commits, locations and policy
      ├── stores           places of bytes: folders, buckets, fsspec
      ├── manifest         one version of a dataset
      ├── formats          shards, indexes, schema, digests
      ├── telemetry        counters and events
      └── errors           one tree

`import shardkit` is light: numpy, pyarrow and the rest are imported when something is opened or written.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardkit.dataset import Dataset, Writer, create
    from shardkit.dataset import open_dataset as open  # noqa: A004  the name that users type

__version__ = "0.3.0"
"""Of the distribution: its release number."""

__all__ = ["Dataset", "Writer", "__version__", "create", "open"]

_PUBLIC = {"open": "opening", "create": "creating", "Dataset": "dataset", "Writer": "creating"}


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        module = importlib.import_module(f"shardkit.dataset.{_PUBLIC[name]}")
        value = getattr(module, "open_dataset" if name == "open" else name)
        globals()[name] = value  # found without this function from now on
        return value
    raise AttributeError(f"module 'shardkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
