"""The build engine: from an importer's tasks to a committed version, in parallel, in bounded memory, killable.

workers        processes that work off a list of items, and are not missed when they are killed
recipe         `build`: what is asked for, checked
engine         the two passes and the commit
job_directory  finished work of a build, kept where a killed build finds it again
reading        pass 1: a task of the source → encoded rows in scratch
row_marks      what pass 1 notes of every row, and which rows are the first of their value
packing        between the passes: documents → rows of a fixed length
resuming       what an earlier, killed run has left
writing        pass 2: the rows of a shard → a published shard
progress       how far it is
"""

from __future__ import annotations

from shardkit_tools.building.recipe import (
    BuildResult,
    PackReport,
    Progress,
    ProgressCallback,
    SkippedRow,
    build,
)

__all__ = ["BuildResult", "PackReport", "Progress", "ProgressCallback", "SkippedRow", "build"]
