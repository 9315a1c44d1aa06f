"""The build engine: from an importer's tasks to a committed version, in parallel, in bounded memory, killable.

engines        who works off a list of tasks: the protocol, and processes that are not missed when they are killed
recipe         `build`: what is asked for, checked
build_run      one build: passes, plan, commit
passes         the work lists of the passes, each handed to an engine
build_plan     between the passes: all rows checked, and where each goes
free_space     whether a build will fit on its disks
outcome        what is asked of a build beside the bytes, and what it answers
job_directory  finished work of a build, kept where a killed build finds it again
job_folder     the same as workers see it: a folder, or objects of the root
reading        pass 1: a task of the source → encoded rows in scratch
page_cache     whether a source stays in memory, so that it can be read twice
source_digests SHA-256 of source files, made beside both passes
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
