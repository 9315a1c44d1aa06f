"""Transforms of samples in `shardkit build`, between the source and the shards.

Their result depends only on the sample and on what the recipe names, not on jobs or the machine.
"""

from __future__ import annotations

from shardkit_tools.transforms.applied import AppliedFunction, TextTokenizer, find_text_field
from shardkit_tools.transforms.transformed import TransformedImporter

__all__ = ["AppliedFunction", "TextTokenizer", "TransformedImporter", "find_text_field"]
