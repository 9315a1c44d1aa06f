"""The build engine: from an importer's tasks to a committed version, in parallel and bounded memory (SPEC.md).

Two passes: the source is read into scratch, then shards are written from scratch. Both journal finished work,
so that a killed build continues; tasks are idempotent, so an engine may lose or repeat any. The manifest
depends only on source and settings.
"""
