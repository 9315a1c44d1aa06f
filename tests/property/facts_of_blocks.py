"""Facts of blocks as a window holds them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardkit.loader.gather import GatherColumns


def table(blocks: Sequence[GatherColumns]) -> NDArray[np.int64]:
    """One row for each block; the blocks must outlive its use."""
    return np.frombuffer(b"".join(one.facts for one in blocks), np.int64).reshape(len(blocks), -1)
