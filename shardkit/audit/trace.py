"""Trace samples: the steps that used a sample, the samples of a step, and the origin of a sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.audit.plans import Leg, RunPlan, leg_of, legs, pending_cells
from shardkit.audit.replay import stretches
from shardkit.audit.run_record import GridPlace, RunRecord
from shardkit.dataset import Dataset
from shardkit.dataset.about import unpack_sources
from shardkit.dataset.samples import numbers_in
from shardkit.errors import NotFoundError
from shardkit.plan import Plan
from shardkit.reading.inventory import read_root
from shardkit.repository.log import first_commit
from shardkit.repository.repository import Repository
from shardkit.repository.versions import Part

_MANY = 256
"""Number of samples from which one pass over the whole plan is faster than one search per sample."""
_SAMPLES_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Use:
    """One use of a sample by a run.

    Attributes:
        sample: number of the sample in the version that the step's plan reads.
        epoch: epoch of the plan; with explicit weights, the pass over the sample's stratum.
        step, lane, slot: place in the grid.
        ranks: ranks that received the sample; several if a restart repeated the step.
        checkpoint: name of the first checkpoint after the step; None if there is none.
        substitute_for: the planned sample that it replaced; None if it was planned.
        branch: False if the step was abandoned by a fork, or was never complete on all ranks.
    """

    sample: int
    epoch: int
    step: int
    lane: int
    slot: int
    ranks: tuple[int, ...]
    checkpoint: str | None
    substitute_for: int | None = None
    branch: bool = True


@dataclass(frozen=True)
class StepSample:
    """A sample of a step, with the location of its bytes and its source.

    Attributes:
        lane, slot: place in the step.
        sample: number of the sample in the dataset.
        key: key of the sample.
        shard: digest of the shard.
        row, block: row and block in the shard.
        source: (file, row) from which it was built or adopted; None if it is not recorded.
        substitute_for: as in `Use`.
    """

    lane: int
    slot: int
    sample: int
    key: str
    shard: str
    row: int
    block: int
    source: tuple[str, int] | None
    substitute_for: int | None = None


def uses_of(record: RunRecord, plans: dict[int, RunPlan], sample: int) -> list[Use]:
    """Return all uses of a sample by the run, in order.

    Raises:
        NotFoundError: the dataset has no such sample, or a plan cannot be rebuilt.
    """
    return uses_of_many(record, plans, [sample])


def uses_of_many(
    record: RunRecord, plans: dict[int, RunPlan], samples: Iterable[int] | Mapping[int, Iterable[int]]
) -> list[Use]:
    """Return all uses of the given samples, in order. If the audit passes, an empty list proves that none was used.

    Steps abandoned by a fork and cells of incomplete steps count as uses. If the plans of the run read several versions
    of the dataset, a sample has another number in each; it is found by its shard and row.

    Args:
        record: the run.
        plans: its plans, from `find_plans`.
        samples: numbers in the version of the first plan, or for each plan the numbers in its version.

    Raises:
        NotFoundError: that version has no such sample, or a plan cannot be rebuilt.
    """
    if isinstance(samples, Mapping):
        numbers = {number: np.unique(np.fromiter(own, dtype=np.int64)) for number, own in samples.items()}
    else:
        asked = np.unique(np.fromiter(samples, dtype=np.int64))
        numbers = {number: _numbers_in(plans, plan, asked) for number, plan in plans.items()}
    found: list[Use] = []
    for leg in legs(record, plans):
        plan, own = leg.known_plan.plan, numbers[leg.known_plan.number]
        replaced = leg.substitutions(leg.first, leg.end)
        for epoch, sample, place in _planned_places(plan, own, leg.first, leg.end):
            if place not in replaced:
                found.append(_use(record, sample, epoch, place, branch=leg.is_branch))
        for place, (original, by) in replaced.items():
            if by in own:
                found.append(_use(record, by, place[0] // _pass_steps(plan), place, original, leg.is_branch))
    found += _incomplete(record, plans, numbers)
    return sorted(found, key=lambda use: (use.step, use.lane, use.slot))


def _numbers_in(plans: dict[int, RunPlan], plan: RunPlan, asked: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers of samples of the first plan's version in the version of another plan, ascending."""
    first = plans[min(plans)].dataset
    rows = len(first)
    if len(asked) and not 0 <= asked[0] <= asked[-1] < rows:
        wrong = asked[0] if asked[0] < 0 else asked[-1]
        raise NotFoundError(f"sample {wrong} does not exist: this dataset has samples 0 to {rows - 1}")
    if plan.dataset.manifest.id == first.manifest.id:
        return asked
    found = numbers_in(first, plan.dataset, asked)
    return np.unique(found[found >= 0])


def _planned_places(
    plan: Plan, asked: NDArray[np.int64], first: int, last: int
) -> Iterator[tuple[int, int, GridPlace]]:
    """Yield (epoch or pass, sample, place) of samples in steps [first, last) of a plan."""
    if len(asked) < _MANY:
        for sample in asked.tolist():
            yield from ((epoch, sample, place) for epoch, place in _places(plan, sample, first, last))
        return
    member = np.zeros(plan.population.rows + 1, dtype=np.bool_)  # the last entry is for empty slots (-1)
    member[asked] = True
    size = max(1, _SAMPLES_AT_ONCE // plan.global_batch)
    for begin, end in stretches(plan, first, last):
        for at in range(begin, end, size):
            cells = plan.steps(at, min(end, at + size))
            for step, lane, slot in np.argwhere(member[cells]).tolist():
                place = (at + step, lane, slot)
                yield place[0] // _pass_steps(plan), int(cells[step, lane, slot]), place


def _pass_steps(plan: Plan) -> int:
    return plan.steps_per_pass or plan.loop_steps


def _incomplete(
    record: RunRecord, plans: dict[int, RunPlan], numbers: dict[int, NDArray[np.int64]]
) -> Iterator[Use]:
    """Yield the uses in recorded cells of steps that are not in the ledger."""
    for plan, step, lane, digest in pending_cells(record, plans):
        if lane >= plan.plan.lanes:
            continue
        cell, replaced = plan.plan.cell(step, lane).copy(), record.replaced.get((step, digest), {})
        for (_, _, slot), (_, by) in replaced.items():
            cell[slot] = by
        for slot in np.flatnonzero(np.isin(cell, numbers[plan.number])).tolist():
            place, sample = (step, lane, slot), int(cell[slot])
            original = replaced.get(place, (None, 0))[0]
            yield _use(record, sample, step // _pass_steps(plan.plan), place, original, False)


def samples_of_step(record: RunRecord, plans: dict[int, RunPlan], step: int) -> list[StepSample]:
    """Return the samples of a step of the branch in grid order, with their location and source.

    Raises:
        NotFoundError: the run did not consume this step.
    """
    return list(_describe_step(leg_of(record, plans, step), step))


def _describe_step(leg: Leg, step: int) -> Iterator[StepSample]:
    plan, replaced = leg.known_plan, leg.substitutions(step, step + 1)
    (cells,) = leg.consumed(step, step + 1)
    lanes, slots = np.nonzero(cells >= 0)
    samples = cells[lanes, slots]
    where = plan.dataset.rows.locate(samples)
    columns = zip(
        lanes.tolist(), slots.tolist(), samples.tolist(), where.shard.tolist(), where.row.tolist(),
        where.block.tolist(), strict=True,
    )  # fmt: skip
    for lane, slot, sample, shard, row, block in columns:
        index = plan.dataset.reader.index(shard)
        first_block = int(plan.dataset.rows.shard_first_block[shard])
        original = replaced.get((step, lane, slot), (None, None))[0]
        yield StepSample(
            lane, slot, sample, index.original_key(row), plan.dataset.table.digest_text(shard), row,
            block - first_block, plan.dataset.reader.source(shard, row), original,
        )  # fmt: skip


def _places(plan: Plan, sample: int, first: int, last: int) -> Iterator[tuple[int, GridPlace]]:
    """Yield (epoch or pass, place) of a sample in steps [first, last) of a plan."""
    length = plan.steps_per_pass
    if length is not None:
        for epoch in range(first // length, (last - 1) // length + 1):
            found = plan.locate(sample, epoch)
            if found is not None and first <= found[0] < last:
                yield epoch, found
        return
    turn = 0
    while (found := plan.locate(sample, turn)) is not None and found[0] < last:
        if found[0] >= first:
            yield turn, found
        turn += 1


def _use(
    record: RunRecord,
    sample: int,
    epoch: int,
    place: GridPlace,
    original: int | None = None,
    branch: bool = True,
) -> Use:
    step, lane, slot = place
    after = (one.name for one in record.checkpoints if one.step > step)
    return Use(
        sample, epoch, step, lane, slot, _ranks(record, step, lane), next(after, None) if branch else None, original,
        branch,
    )  # fmt: skip


def _ranks(record: RunRecord, step: int, lane: int) -> tuple[int, ...]:
    """Return the ranks that received a cell, over all starts of the run."""
    reached: list[int] = record.ledger.state.start.reached if record.ledger is not None else []
    starts = {event["start"]: event["step"] for event in record.events if event["kind"] == "start"}
    found: dict[int, int] = {}
    for event in record.events:
        if event["kind"] != "assignment" or event["step"] > step:
            continue
        start = event["start"]
        if start not in starts or not starts[start] <= step < (reached[start] if start < len(reached) else 0):
            continue
        for rank, first, count in event["lanes"]:
            if first <= lane < first + count:
                found[start] = rank
    return tuple(dict.fromkeys(found[start] for start in sorted(found)))


def version_lineage(dataset: Dataset) -> dict[str, Any]:
    """Return the origin of a version: each part with its ancestors, build settings, sources and first commit."""
    parts = dataset.version.parts
    return {"id": dataset.manifest.id, "parts": [_part_lineage(part) for part in parts]}


def sample_lineage(dataset: Dataset, sample: int) -> dict[str, Any]:
    """Return the origin of a sample, from its source to its shard.

    Returns:
        ``sample``, ``key``, ``stored_key``; ``shard`` with digest, object name, row, block and the block's offset and
        size in bytes; ``source`` with file name, row and the file's SHA-256, or None if the build did not record it;
        ``version`` as in `version_lineage`, with the sample's part only.

    Raises:
        NotFoundError: the dataset has no such sample.
    """
    if not 0 <= sample < len(dataset):
        raise NotFoundError(
            f"sample {sample} does not exist: this dataset has samples 0 to {len(dataset) - 1}"
        )
    where = dataset.rows.locate(np.array([sample], dtype=np.int64))
    shard, row = int(where.shard[0]), int(where.row[0])
    index, part = dataset.reader.index(shard), dataset.version.part_of(shard)
    block, _ = index.block_of(row)
    source, lineage = dataset.reader.source(shard, row), _part_lineage(part)
    files = {one["name"]: one["sha256"] for one in (lineage["sources"] or {"files": ()})["files"]}
    return {
        "sample": sample,
        "key": index.original_key(row),
        "stored_key": index.key(row),
        "shard": {
            "digest": dataset.table.digest_text(shard),
            "name": dataset.reader.shard_name(shard),
            "row": row,
            "block": block,
            "offset": int(index.block_offset[block]),
            "size": int(index.block_size[block]),
        },
        "source": None
        if source is None
        else {"name": source[0], "row": source[1], "sha256": files.get(source[0])},
        "version": {"id": dataset.manifest.id, "parts": [lineage]},
    }


def _part_lineage(part: Part) -> dict[str, Any]:
    manifest, repository = part.manifest, part.repository
    ancestors: list[dict[str, Any]] = []
    parent = manifest.parent
    while parent is not None and len(ancestors) < 1000:
        try:
            root = read_root(repository.store, parent)
        except NotFoundError:
            ancestors.append({"id": parent, "missing": True})
            break
        ancestors.append(
            {"id": parent, "samples": root.selected, "build": dict(root.build), "sources": root.sources}
        )
        parent = root.parent
    return {
        "name": part.name,
        "id": manifest.id,
        "build": dict(manifest.build),
        "sources": _sources(part),
        "commit": _commit(repository, manifest.id),
        "ancestors": ancestors,
    }


def _sources(part: Part) -> dict[str, Any] | None:
    if part.manifest.sources is None:
        return None
    found = unpack_sources(part.repository.get_object(part.manifest.sources, "sources"))
    files = [{"name": one.name, "size": one.size, "sha256": one.sha256} for one in found.files]
    return {"digest": part.manifest.sources, "files": files, "rows_left_out": len(found.skipped)}


def _commit(repository: Repository, manifest_id: str) -> dict[str, Any] | None:
    """Return the first commit that named the manifest, including its software versions, or None."""
    entry = first_commit(repository.log(), manifest_id)
    names = ("n", "time", "author", "message", "software")
    return None if entry is None else {name: getattr(entry, name) for name in names}
