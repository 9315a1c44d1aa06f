"""The build engine: from an importer's tasks to a committed version, in parallel, in bounded memory, killable.

Two passes: the source is read into scratch, then shards are written from there. Both journal what is finished, so
that a killed build goes on; tasks are idempotent, so an engine may lose or repeat any. The manifest depends on source
and settings alone.
"""
