"""What an earlier, killed run of the same build has left that is still good."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import xxhash

from shardkit.dataset.extents import file_state
from shardkit.dataset.scratch_reading import FilePart
from shardkit.errors import FormatError, StoreError
from shardkit_tools.building.job_directory import JobDirectory
from shardkit_tools.building.reading import TaskRows, decode_task, record_name
from shardkit_tools.building.source_digests import digest_record
from shardkit_tools.importers.protocol import SourceFile, SourceTask

__all__ = ["finished_rows", "finished_tasks"]


def finished_tasks(
    job: JobDirectory, tasks: Sequence[SourceTask], files: Iterable[SourceFile]
) -> dict[int, TaskRows]:
    """Tasks whose rows are in scratch, by number; everything else of pass 1 is removed from the directory.

    What was packed stays: its records are named by what they were made of. So do digests of ``files`` as they are now.
    """
    finished: dict[int, TaskRows] = {}
    keep = {"lock", "boot", *map(digest_record, files)}
    for number, task in enumerate(tasks):
        name = record_name(task)
        rows = finished_rows(job, number, name)
        if rows is not None and _is_watched_well(task, rows):
            finished[number] = rows
            keep |= {name, rows.facts.part}
    for name in job.names():
        packed = name.startswith("packed-") and not job.may_have_lost_pages
        if name not in keep and not packed and not name.endswith(".done"):
            job.remove(name)
    job.note_verified()  # only now: a kill before this must not pass unverified parts off as good
    return finished


def finished_rows(job: JobDirectory, number: int, name: str) -> TaskRows | None:
    """The rows that a record tells of; None where there is none, or its scratch file is not whole."""
    data = job.read(name)
    if data is None:
        return None
    try:
        rows = decode_task(number, data)
    except (FormatError, KeyError, TypeError, ValueError):
        return None  # of another release
    if job.size_of(rows.facts.part) != rows.facts.part_bytes:
        return None
    # The page cache survives the death of any process, but not of the machine.
    return rows if not job.may_have_lost_pages or _is_whole(job, rows) else None


def _is_whole(job: JobDirectory, rows: TaskRows) -> bool:
    part = FilePart(job.path, rows.facts.part)
    columns = rows.columns
    buffer = memoryview(bytearray(int(columns.length.max(initial=0))))
    try:
        for offset, length, check in zip(
            columns.offset.tolist(), columns.length.tolist(), columns.check.tolist(), strict=True
        ):
            part.read_into(offset, buffer[:length])
            if xxhash.xxh3_64_intdigest(buffer[:length]) != check:
                return False
    except StoreError:
        return False
    finally:
        part.close()
    return True


def _is_watched_well(task: SourceTask, rows: TaskRows) -> bool:
    """Whether the files that rows are still to be read from are what they were."""
    states = rows.facts.states
    return not states or states == tuple(file_state(file.path) for file in task.files)
