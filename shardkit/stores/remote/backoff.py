"""How long to try again, and how long to pause between: exponential, with full jitter, until a deadline.

Full jitter (Brooker, "Exponential Backoff and Jitter", 2015): a pause is uniform in [0, bound), and the bound
doubles. Many clients that failed at once then do not come back at once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from shardkit.errors import ConfigurationError

# Forked processes must not draw the same pauses, hence the system's own source.
_JITTER: Final = random.SystemRandom()


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How long one operation of a store may take.

    Attributes:
        deadline_s: all attempts together.
        attempt_s: one request without any byte arriving, or one connection.
        first_pause_s: bound of the first pause; each next one is twice as long.
        longest_pause_s: largest bound.
    """

    deadline_s: float = 120.0
    attempt_s: float = 30.0
    first_pause_s: float = 0.05
    longest_pause_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("attempt_s", "first_pause_s", "longest_pause_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name}={getattr(self, name)}: more than 0 seconds are expected")
        if self.deadline_s < 0:
            raise ConfigurationError(f"deadline_s={self.deadline_s}: 0 or more seconds are expected")


def pauses(retry: RetryPolicy) -> Iterator[float]:
    """Yield the number of seconds slept before each further attempt; ends at the deadline.

    A `for` loop over it is a retry loop: its first turn comes at once.
    """
    started = time.monotonic()
    bound = retry.first_pause_s
    yield 0.0
    while True:
        pause = _JITTER.uniform(0, bound)
        if time.monotonic() + pause - started > retry.deadline_s:
            return
        time.sleep(pause)
        yield pause
        bound = min(retry.longest_pause_s, bound * 2)
