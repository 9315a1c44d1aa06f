"""What `shardkit build` does to samples between the source and the shards.

What a transform does is a function of the sample and of what the recipe names: never of jobs or the machine.
"""

from __future__ import annotations

from shardkit_tools.transforms.applied import AppliedFunction, TextTokenizer, find_text_field
from shardkit_tools.transforms.transformed import TransformedImporter

__all__ = ["AppliedFunction", "TextTokenizer", "TransformedImporter", "find_text_field"]
