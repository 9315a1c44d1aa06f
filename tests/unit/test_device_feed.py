"""Batches on a device, with a stand-in for streams: in order, as far ahead as was said, held until copied."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

import shardkit
from shardkit import images
from shardkit.errors import ConfigurationError
from shardkit.loader.batch import Batch, StepBatches
from shardkit.loader.device import DeviceFeed
from tests.pictures import encoded, photograph

torch = pytest.importorskip("torch")


class Stream:
    """Copies nothing; keeps what was asked of it, and is done when it is told."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.sends = self.finished = 0
        self.inside = False

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False

    def sent(self) -> int:
        self.log.append(f"sent {self.sends}")
        self.sends += 1
        return self.sends - 1

    def receive(self, event: int, tensors: list[Any]) -> None:
        assert len(tensors) == 2, "the field and its sample numbers"
        self.log.append(f"received {event}")

    def is_done(self, event: int) -> bool:
        return event < self.finished


def _steps(count: int, fails: bool = False) -> Iterator[StepBatches]:
    for number in range(count):
        samples = np.arange(2)
        fields = {"x": torch.full((2,), number), "samples": torch.from_numpy(samples)}
        batch = Batch(fields, step=number, lane=-1, samples=samples, slots=samples, weight=1.0)
        batch["samples"] = fields["samples"]
        yield StepBatches(number, [batch], samples, np.array([2]), [])
    if fails:
        raise ValueError("the fourth")


def _feed(stream: Stream | None, steps: Iterator[StepBatches], ready: int, ahead: int = 2) -> DeviceFeed:
    def finish(rows: Any) -> Any:
        assert stream is None or stream.inside, "work on the device belongs to the side stream"
        return rows * 10

    return DeviceFeed(steps, lambda: ready, torch.device("cpu"), ahead, {"x": finish}, cast(Any, stream))


def test_finished_steps_are_sent_ahead_and_each_is_waited_for() -> None:
    stream = Stream()
    feed = _feed(stream, _steps(5), ready=1)
    first = next(feed)
    assert stream.log == ["sent 0", "sent 1", "sent 2", "received 0"]
    rest = [first, *feed]
    assert [int(one.batches[0]["x"][0]) for one in rest] == [0, 10, 20, 30, 40]
    assert [one.step for one in rest] == list(range(5))
    assert isinstance(rest[0].batches[0].samples, np.ndarray)


def test_it_waits_for_no_step_while_one_is_there() -> None:
    stream = Stream()
    feed = _feed(stream, _steps(5), ready=0)
    next(feed)
    assert stream.log == ["sent 0", "received 0"]


def test_host_memory_is_held_until_it_was_copied() -> None:
    stream = Stream()
    feed = _feed(stream, _steps(6), ready=1)
    next(feed), next(feed)
    assert len(feed._held) == 4
    stream.finished = 3
    next(feed)
    assert [event for _, event in feed._held] == [3, 4]


def test_an_error_comes_after_the_steps_before_it_and_again() -> None:
    feed = _feed(Stream(), _steps(3, fails=True), ready=1, ahead=9)
    assert len([next(feed) for _ in range(3)]) == 3
    for _ in range(2):
        with pytest.raises(ValueError, match="the fourth"):
            next(feed)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = str(tmp_path_factory.mktemp("device") / "d")
    with shardkit.create(root, schema={"image": "bytes", "label": "int64"}) as writer:
        for number in range(48):
            writer.add({"image": encoded(photograph(number % 4, 60, 50)), "label": number})
    return shardkit.open(root)


def test_batches_are_those_of_the_host_and_state_counts_what_was_handed_out(dataset: Any) -> None:
    plan = dataset.plan(global_batch=8, seed=2)
    decode = {"image": images.random_resized_crop(24, normalise="imagenet")}
    with dataset.loader(plan, decode=decode) as loader:
        wanted = list(loader)
    for more in ({}, {"batch_transform": lambda fields, rngs: fields}):
        with dataset.loader(plan, decode=decode, device="cpu", device_prefetch=3, **more) as loader:
            loop = iter(loader)
            for step in range(2):
                batch = next(loop)
                assert loader.state_dict()["step"] == batch.step + 1 == step + 1
            assert torch.equal(loader.peek()["image"], wanted[2]["image"])
            state = loader.state_dict()
        with dataset.loader(plan, decode=decode, device="cpu", **more) as resumed:
            resumed.load_state_dict(state)
            found = list(resumed)
        assert [one.step for one in found] == [2, 3, 4, 5]
        for one, other in zip(found, wanted[2:], strict=True):
            assert one["image"].dtype == torch.float32
            assert torch.equal(one["image"], other["image"])
            assert torch.equal(one["label"], other["label"])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"device": "tpu"}, "device='tpu'"),
        ({"device": "meta"}, "'cuda', 'cuda:N' or 'cpu' is expected"),
        ({"device": "cpu", "tensors": False}, "leave out stride= and tensors=False"),
        ({"device": "cpu", "stride": 2}, "leave out stride="),
        ({"device": "cpu", "device_prefetch": 0}, "device_prefetch"),
    ],
)
def test_what_cannot_be_is_refused(dataset: Any, settings: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        dataset.loader(dataset.plan(global_batch=8), **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_named(dataset: Any) -> None:
    with pytest.raises(ConfigurationError, match="sees no CUDA device"):
        dataset.loader(dataset.plan(global_batch=8), device="cuda")
