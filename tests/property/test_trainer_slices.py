"""Flat slices against brute force: every element in exactly one slice, every slice the union of its boxes."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

from shardkit.torch.checkpointing import FlatSlice, rectangles
from shardkit_trainer.optimizer import ALIGNMENT, FlatLayout

shapes = st.lists(st.integers(0, 5), min_size=0, max_size=4)


@given(shapes, st.data())
def test_boxes_cover_the_run_in_order(shape: list[int], data: st.DataObject) -> None:
    size = int(np.prod(shape, dtype=np.int64))
    low = data.draw(st.integers(0, size))
    high = data.draw(st.integers(low, size))
    numbers = np.arange(size).reshape(shape)
    found: list[int] = []
    boxes = rectangles(shape, low, high)
    for offsets, sizes in boxes:
        part = numbers[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        assert list(part.shape) == sizes
        found += part.reshape(-1).tolist()
    assert found == list(range(low, high))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(shapes.filter(lambda s: 0 not in s), st.data())
def test_a_slice_hands_out_views_of_its_run(shape: list[int], data: st.DataObject) -> None:
    size = int(np.prod(shape, dtype=np.int64))
    low = data.draw(st.integers(0, size))
    high = data.draw(st.integers(low, size))
    whole = torch.arange(size, dtype=torch.float32).reshape(shape)
    run = whole.reshape(-1)[low:high].clone()
    described = FlatSlice(run, shape, low)
    assert described.size() == whole.size()
    for item in described.__create_write_items__("x", described):
        assert item.tensor_data is not None
        assert item.index.offset is not None
        offsets, sizes = item.index.offset, item.tensor_data.chunk.sizes
        part = described.__get_tensor_shard__(MetadataIndex("x", offsets))
        box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        assert torch.equal(part, whole[box])
        part.zero_()
    assert not run.any()


@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.integers(1, 7))
def test_every_element_has_one_owner_and_cuts_are_aligned(lengths: list[int], shards: int) -> None:
    parameters = [torch.empty(n) for n in lengths]
    layout = FlatLayout.of(parameters, shards)
    owners = [np.zeros(n, dtype=int) for n in lengths]
    for shard in range(shards):
        for index, low, high in layout.owned(shard):
            owners[index][low:high] += 1
            assert low % ALIGNMENT == 0
            assert high % ALIGNMENT == 0 or high == lengths[index]
    assert all((counts == 1).all() for counts in owners)
    assert layout.share * shards == layout.total
    assert layout.total < sum(lengths) + ALIGNMENT * (len(lengths) + shards)
