"""Steps of a loader, over the ends of epochs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def batches_until(loader: Any, stop: int) -> Iterator[Any]:
    """Yield what a loader hands out, from its position to the step before `stop`."""
    while loader.handed_out < stop:
        for batch in loader:
            yield batch
            first = batch[0] if isinstance(batch, list) else batch
            if first.step == stop - 1:
                return
