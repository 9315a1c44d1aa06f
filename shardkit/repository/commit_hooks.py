"""What else a commit waits for: hooks, so that a repository need not know who copies what it commits.

`shardkit/__init__.py` adds the one that makes copies; whoever imports anything of shardkit has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

__all__ = ["CommitHook", "add_commit_hook", "commit_hooks"]

CommitHook = Callable[[Any, Sequence[str]], Callable[[], None]]
"""(the `Repository`, versions that a commit is to name) → what follows once it stands; raises where it must not be."""

_HOOKS: Final[list[CommitHook]] = []


def add_commit_hook(hook: CommitHook) -> None:
    """Call `hook` before every commit from now on."""
    _HOOKS.append(hook)


def commit_hooks() -> tuple[CommitHook, ...]:
    """All hooks, in the order in which they are called."""
    return tuple(_HOOKS)
