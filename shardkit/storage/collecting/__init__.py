"""Collecting garbage: objects that nothing names any more, safe against commits that race (SPEC.md, "Garbage").

::

    documents.py   what was seen unreferenced, and when; what a collection takes away
    marking.py     what is live: refs, tags, recent history, parity, builds under way
    commits.py     the side of a commit: is anything that it names being collected?
    collecting.py  `collect`: two rounds, over all locations
"""

from shardkit.storage.collecting.collecting import Collection, collect
from shardkit.storage.collecting.marking import mark_live

__all__ = ["Collection", "collect", "mark_live"]
