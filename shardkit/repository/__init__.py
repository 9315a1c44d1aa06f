"""What a root holds: its layout, the log of commits that names versions, and collecting what nothing names.

A version exists once the log names it. SPEC.md says the layout, the order of writes, and what is promised when. Imports
reading, whose locations it reads through; who copies is known to the hooks alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

CommitHook = Callable[[Any, Any, Sequence[str]], Callable[[], None]]
"""(the `Repository`, its `LocationTable`, versions that a commit is to name) → what follows once it stands.

Raises where it must not be."""

COMMIT_HOOKS: Final[list[CommitHook]] = []
"""Called in this order. `shardkit/__init__.py` adds the one that makes copies: whoever imports anything has it."""
