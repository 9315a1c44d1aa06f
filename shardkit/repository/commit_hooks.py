"""What a commit waits for where a root has other locations: hooks, so that a repository does not know who copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

CommitHook = Callable[[Any, Any, Sequence[str]], Callable[[], None]]
"""(the `Repository`, its `LocationTable`, versions that a commit is to name) → what follows once it stands.

Raises where it must not be."""

COMMIT_HOOKS: Final[list[CommitHook]] = []
"""Called in this order. `shardkit/__init__.py` adds the one that makes copies: whoever imports anything has it."""
