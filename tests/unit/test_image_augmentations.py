"""Augmentations behind the crop: keyed by place and name, alike on any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import shardkit
from shardkit import images
from shardkit.errors import ConfigurationError
from shardkit.plan import Place
from tests.pictures import encoded, photograph

PAYLOAD = encoded(photograph(0, 96, 72))
PLACES = [Place(3, step, lane, slot) for step in range(10) for lane in (0, 5) for slot in range(10)]
ALL = [images.color_jitter(0.4, 0.4, 0.4, 0.1), images.trivial_augment(), images.random_erasing(0.5)]


def _rows(augment: Any, places: list[Place] = PLACES) -> list[bytes]:
    made = images.resize(32, augment=augment)
    rows = []
    for place in places:
        out = np.empty(made.shape, made.dtype)
        made(PAYLOAD, place=place, out=out)
        rows.append(out.tobytes())
    return rows


def test_each_place_has_a_picture_of_its_own_always_the_same() -> None:
    for augment in ([ALL[0]], ALL):
        rows = _rows(augment)
        assert rows == _rows(augment)
        assert len(set(rows)) > 0.9 * len(rows)
    assert 20 < len(set(_rows([ALL[1]]))) <= len(PLACES)


def test_one_more_augmentation_changes_no_other() -> None:
    """Draws have a name: what is erased is erased whatever was done to the colours before."""
    erasing = images.random_erasing(1.0, value=(255, 0, 255))

    def erased(rows: list[bytes]) -> list[bytes]:
        pictures = [np.frombuffer(row, np.uint8).reshape(3, 32, 32) for row in rows]
        return [(p == np.array([255, 0, 255])[:, None, None]).all(axis=0).tobytes() for p in pictures]

    alone, behind = erased(_rows([erasing])), erased(_rows([ALL[0], erasing]))
    assert alone == behind
    assert len(set(alone)) > 150


def test_erasing_takes_the_share_that_was_asked_for() -> None:
    erasing = images.random_erasing(0.3, scale=(0.1, 0.2), value=(1, 2, 3))
    grey = np.full((60, 80, 3), 9, np.uint8)
    lost = [float((erasing(grey, place) != grey).all(axis=2).mean()) for place in PLACES]
    assert 0.2 < np.mean([share > 0 for share in lost]) < 0.4
    assert all(share == 0 or 0.09 < share < 0.21 for share in lost)
    assert (grey == 9).all()


def test_no_strength_is_no_change() -> None:
    assert set(_rows([images.color_jitter()])) == set(_rows([]))
    assert len(set(_rows([images.color_jitter(hue=0.5)]))) > 100


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: images.color_jitter(2.0), "brightness=2"),
        (lambda: images.color_jitter(hue=0.6), "hue=0.6"),
        (lambda: images.random_erasing(1.5), "probability=1.5"),
        (lambda: images.random_erasing(value=(1, 2, 300)), "value="),
        (lambda: images.mixup(classes=0), "classes=0"),
        (lambda: images.cutmix(classes=2, alpha=0.0), "alpha=0"),
    ],
)
def test_what_cannot_be_is_refused(call: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        call()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Pictures of one colour: red is the row's number, so that a mix says of whom it is."""
    root = tmp_path_factory.mktemp("images") / "data"
    with shardkit.create(str(root), schema={"image": "bytes", "label": "int64"}) as writer:
        for number in range(48):
            flat = np.zeros((20, 20, 3), np.uint8)
            flat[..., 0] = 5 * number
            writer.add({"image": encoded(_picture(flat), "PNG"), "label": number})
    return shardkit.open(str(root))


def _picture(pixels: NDArray[np.uint8]) -> Any:
    from PIL import Image

    return Image.fromarray(pixels)


@pytest.mark.parametrize("mix", [images.mixup(classes=48, alpha=0.4), images.cutmix(classes=48)])
@pytest.mark.parametrize("normalise", [None, ((0, 0, 0), (1 / 255, 1 / 255, 1 / 255))])
def test_mixes_are_inside_the_cell_and_equal_on_any_number_of_ranks(
    dataset: Any, mix: Any, normalise: Any
) -> None:
    plan = dataset.plan(global_batch=24, lanes=6, seed=1)
    decode = {"image": images.resize(16, normalise=normalise)}
    found: list[dict[tuple[int, int], tuple[bytes, bytes]]] = []
    for world in (1, 2, 3):
        rows = {}
        for rank in range(world):
            with dataset.loader(
                plan, rank=rank, world=world, decode=decode, batch_transform=mix, tensors=False
            ) as loader:
                for batch in loader:
                    assert batch["label"].shape == (24 // world, 48)
                    np.testing.assert_allclose(batch["label"].sum(axis=1), 1, atol=1e-6)
                    red = batch["image"][:, 0].astype(float).mean(axis=(1, 2))
                    np.testing.assert_allclose(red, batch["label"] @ (5.0 * np.arange(48)), atol=0.6)
                    for slot, image, label in zip(
                        batch.slots.tolist(), batch["image"], batch["label"], strict=True
                    ):
                        rows[batch.step, slot] = image.tobytes(), label.tobytes()
        found.append(rows)
    assert found[0] == found[1] == found[2]
    mixed = [np.count_nonzero(np.frombuffer(label, np.float32)) == 2 for _, label in found[0].values()]
    assert np.mean(mixed) > 0.5


def test_cells_of_one_have_nobody_to_mix_and_labels_must_fit(dataset: Any) -> None:
    decode = {"image": images.resize(8)}
    for lanes, classes, says in ((24, 48, "cells of one sample"), (6, 9, "classes=9")):
        plan = dataset.plan(global_batch=24, lanes=lanes)
        with (
            dataset.loader(
                plan, decode=decode, batch_transform=images.mixup(classes=classes), tensors=False
            ) as loader,
            pytest.raises(ConfigurationError, match=says),
        ):
            list(loader)
