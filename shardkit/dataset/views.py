"""Make a view of a dataset durable as a version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shardkit.dataset.dataset import Dataset
from shardkit.dataset.selecting import put_selected, select_rows
from shardkit.errors import UsageError
from shardkit.manifest import Manifest
from shardkit.repository.repository import Repository


def put_version(repository: Repository, dataset: Dataset, view: Dataset, note: Mapping[str, Any]) -> Manifest:
    """Make the version durable that has the samples of a view of a dataset; a commit may name it.

    Args:
        repository: the dataset's repository, open for writing.
        dataset: the dataset, not merged.
        view: result of `Dataset.select`.
        note: how the samples were chosen, for the manifest.

    Raises:
        UsageError: the dataset is merged.
    """
    if dataset.manifest.parts:
        names = ", ".join(name for name, _ in dataset.manifest.parts)
        raise UsageError(
            f"{dataset.manifest.id[:19]}… is merged; select from its parts ({names}), then merge those versions"
        )
    masks = {}
    for shard in range(len(view.table)):
        masks[shard] = np.zeros(int(view.table.rows[shard]), dtype=np.bool_)
        masks[shard][view.rows.rows_of_shard(shard)] = True
    manifest, table, selections = select_rows(
        dataset.manifest, dataset.table, masks, row_strata=dataset.row_strata, build={"select": dict(note)}
    )
    put_selected(repository, manifest, table, selections)
    return manifest
