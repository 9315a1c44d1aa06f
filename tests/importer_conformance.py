"""What every importer must keep, as a function that a test calls on an importer over a small source."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence

from shardkit.formats import Schema
from shardkit_tools.importers.protocol import Importer, SourceFailure, SourceSample, SourceTask

__all__ = ["check_importer", "read_all"]


def read_all(importer: Importer) -> list[SourceSample]:
    """Every sample of a source, task by task, in source order.

    Raises:
        ShardkitError: the first failure, whether raised or yielded.
    """
    samples: list[SourceSample] = []
    for task in importer.tasks():
        for row in importer.read(task):
            if isinstance(row, SourceFailure):
                raise row.error
            samples.append(row)
    return samples


def check_importer(importer: Importer) -> list[SourceSample]:
    """Check an importer against the protocol and return its samples.

    Tasks read the same after pickling and in reverse order; files are sorted, unique and those of the tasks;
    rows ascend within a file; keys are unique; every sample fits the schema; the recipe is JSON without a
    path.

    Raises:
        AssertionError: what does not hold.
    """
    samples = read_all(importer)
    encoded = [
        importer.schema.encode(row.sample, where=f"{row.source_name}:{row.source_row}") for row in samples
    ]
    files = importer.files()
    names = [file.name for file in files]
    assert names == sorted(set(names)), "files are not sorted, or not unique"
    tasks = importer.tasks()
    assert {file.name for task in tasks for file in task.files} == set(names), (
        "tasks read other files than `files`"
    )
    assert len({task.name for task in tasks}) == len(tasks), "task names are not unique"
    _check_rows(samples, set(names))
    copy = pickle.loads(pickle.dumps(importer))
    _check_repeatable(copy, pickle.loads(pickle.dumps(tasks)), importer.schema, encoded)
    recipe = json.dumps(importer.describe())
    assert not any(file.path in recipe for file in files if "/" in file.path), "the recipe holds a path"
    return samples


def _check_rows(samples: list[SourceSample], names: set[str]) -> None:
    keys = [row.key for row in samples if row.key is not None]
    assert len(set(keys)) == len(keys), "keys are not unique"
    last: dict[str, int] = {}
    for row in samples:
        assert row.source_name in names, f"{row.source_name} is not a file of the source"
        assert row.source_row > last.get(row.source_name, -1), "rows of a file do not ascend"
        last[row.source_name] = row.source_row


def _check_repeatable(
    importer: Importer, tasks: Sequence[SourceTask], schema: Schema, encoded: list[tuple[bytes, ...]]
) -> None:
    backwards: list[list[tuple[bytes, ...]]] = []
    for task in reversed(tasks):
        rows = importer.read(task)
        backwards.append(
            [schema.encode(row.sample, where="again") for row in rows if isinstance(row, SourceSample)]
        )
    assert [row for part in reversed(backwards) for row in part] == encoded, "a task reads differently again"
