"""Samples of a plan for webdataset pipelines.

Example::

    pipeline = wds.DataPipeline(samples(ds, plan), wds.decode("rgb"), wds.to_tuple("jpg", "cls"), wds.batched(64))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset

from shardkit.dataset import Dataset
from shardkit.errors import UsageError
from shardkit.formats.schema import encode_value
from shardkit.formats.tar_members import member_extension, member_names, member_parts
from shardkit.loader import Batch
from shardkit.loader.transforms import row_reader
from shardkit.plan import Plan
from shardkit.torch import dataset

__all__ = ["PlanSamples", "samples"]


def samples(
    ds: Dataset, plan: Plan, *, names: Mapping[str, str] | None = None, **settings: Any
) -> PlanSamples:
    """Return the samples of this rank's steps, in the plan's order, as webdataset's tar reader would yield them.

    Each sample is a dict of ``__key__`` and the bytes of its members, named by their extensions: ``jpg``, ``cls``,
    ``txt``, ``json``, ``npy``. If several fields have one extension, names begin with the field: ``left.npy``. A field
    of a sample without a value is left out. Every block is verified when it is read.

    An iteration lasts for an epoch; the next one continues with the next epoch. In workers of a DataLoader each worker
    yields whole steps, so batch inside the pipeline: ``wds.batched(n)``, where n is the number of samples that this
    rank has in a step, keeps the order of the plan.

    Args:
        ds: an open dataset.
        plan: made by ``ds.plan(…)``.
        names: field → name of its member; by default its extension.
        settings: as for `shardkit.torch.dataset`, except ``tensors`` and what changes values: ``decode``,
            ``transform`` and ``batch_transform``, which are the pipeline's work.

    Raises:
        UsageError: a setting does not apply, or `names` has an unknown field.
    """
    for name in ("tensors", "decode", "transform", "batch_transform", "by_cell"):
        if name in settings:
            raise UsageError(f"{name}= is not for webdataset pipelines, which get the bytes of the members")
    return PlanSamples(ds, dataset(ds, plan, tensors=False, **settings), dict(names or {}))


class PlanSamples(IterableDataset[dict[str, Any]]):
    """The first stage of a pipeline; see `samples`.

    Attributes:
        data: the `shardkit.torch.PlanDataset` that is read; it has the position, ``set_epoch`` and the state.
    """

    def __init__(self, ds: Dataset, data: Any, names: dict[str, str]) -> None:
        self._ds, self.data, self._names = ds, data, names
        unknown = sorted(set(names) - set(ds.schema))
        if unknown:
            raise UsageError(f"names: {unknown[0]!r} is no field; the fields are {', '.join(ds.schema)}")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over the samples of an epoch."""
        for batch in self.data:
            yield from self._rows(batch)

    def _rows(self, batch: Batch) -> Iterator[dict[str, Any]]:
        schema = self._ds.schema
        fields = dict(zip(schema, member_names(schema), strict=True))
        readers = {name: row_reader(batch[name]) for name in schema}
        for row, number in enumerate(batch.samples.tolist()):
            key = self._ds.key(number)
            members = []
            for name, kind in schema.items():
                if name in batch.valid and not batch.valid[name][row]:
                    continue
                payload = encode_value(kind.required, readers[name](row), f"sample {key!r}", name)
                content = b"".join(map(bytes, member_parts(kind.required, payload)))
                members.append((name, member_extension(kind.required, payload), content))
            several = {one for one, count in Counter(one for _, one, _ in members).items() if count > 1}
            sample: dict[str, Any] = {"__key__": key, "__url__": self._ds.repository.url}
            for name, extension, content in members:
                by_default = f"{fields[name]}.{extension}" if extension in several else extension
                sample[self._names.get(name, by_default)] = content
            yield sample
