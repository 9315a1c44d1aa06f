"""Per-node block cache on a local disk, shared by all processes and evicted by the steps at which plans use blocks.

Blocks are verified when they are stored and whenever they are read. A cache may be deleted at any time. Eviction is
decided by pure functions, without file access.
"""
