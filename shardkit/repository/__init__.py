"""Layout of a root, the log of commits that names versions, and the deletion of garbage (SPEC.md).

A version exists once the log names it. SPEC.md states the layout, the order of writes, and the guarantees. Locations
are read through `shardkit.reading`. Copies are made by `shardkit.copies`.
"""
