"""Sizes as people write them; see `shardkit.formats.sizes`."""

from shardkit.formats.sizes import parse_size

__all__ = ["parse_size"]
