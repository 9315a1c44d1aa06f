"""A bounded memory of made values, safe under concurrent callers without a lock."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["Recent"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Keeps the last ``limit`` values made.

    Values are immutable and making one twice is harmless, so two threads that miss together both make it and
    one of the equal values stays. Single dict operations are atomic; nothing iterates over the dict while it
    may change.
    """

    def __init__(self, limit: int) -> None:
        self._limit = max(1, limit)
        self._values: dict[K, V] = {}

    def get(self, key: K, make: Callable[[K], V]) -> V:
        """The value of ``key``, made by ``make(key)`` where it is not kept."""
        try:
            return self._values[key]
        except KeyError:
            pass
        value = make(key)
        values = self._values
        values[key] = value
        if len(values) > self._limit:
            for old in list(values)[: len(values) - self._limit]:
                values.pop(old, None)
        return value

    def __contains__(self, key: K) -> bool:
        """Whether a value is kept."""
        return key in self._values

    def clear(self) -> None:
        """Forget all."""
        self._values = {}

    def __len__(self) -> int:
        return len(self._values)
