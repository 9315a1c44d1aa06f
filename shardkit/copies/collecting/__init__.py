"""Collecting garbage: objects that nothing names any more, safe against commits that race (SPEC.md, "Garbage").

A collection marks in one round and deletes in a later one; a commit checks that nothing it names is being collected.
"""

from shardkit.copies.collecting.collecting import Collection, collect
from shardkit.copies.collecting.marking import mark_live

__all__ = ["Collection", "collect", "mark_live"]
