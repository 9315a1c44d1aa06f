"""The per-node cache: blocks on a local disk, shared by all processes, evicted by what the plan knows.

Blocks are verified when they enter and whenever they are read; a cache may be deleted at any time. Which block goes
is decided without files, from the steps at which live processes need it.
"""
