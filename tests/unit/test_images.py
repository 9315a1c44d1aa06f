"""shardkit.images: what Pillow would have made of a picture, in the row of the batch, equal wherever it is made."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import sysconfig
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageOps

import shardkit
from shardkit import images
from shardkit.errors import ConfigurationError, FormatError, RunError
from shardkit.images.decoding import PictureReader, decode_picture
from shardkit.images.framing import CenterCrop, RandomCrop
from shardkit.plan import Place, draw, draws
from tests.pictures import encoded, photograph

ANY: Any = "WHC"
# simplejpeg has no wheel for free-threaded Python
DECODERS = ["pillow"] if sysconfig.get_config_var("Py_GIL_DISABLED") else ["simplejpeg", "pillow"]
PLACES = [Place(7, step, 1, slot) for step in range(2) for slot in range(4)]


def _files() -> dict[str, bytes]:
    """One of each kind that Pillow and libjpeg treat in their own way."""
    small, other = photograph(0, 300, 225), photograph(1, 260, 340)
    return {
        "baseline": encoded(small, quality=92), "progressive": encoded(small, quality=85, progressive=True),
        "4:4:4": encoded(other, subsampling=0), "4:2:2": encoded(other, subsampling=1),
        "grey": encoded(other.convert("L")), "RGB inside": encoded(small, keep_rgb=True),
        "CMYK": encoded(small.convert("CMYK")), "turned by EXIF": encoded(small, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01"
        b"\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"),
        "PNG": encoded(other, "PNG"), "RGBA": encoded(small.convert("RGBA"), "PNG"),
        "palette": encoded(small.quantize(64), "PNG"), "WebP": encoded(other, "WEBP", quality=90),
        "16 bits": encoded(Image.fromarray(np.asarray(small.convert("L"), np.uint16) * 256), "PNG"),
        "GIF": encoded(other, "GIF"), "large": encoded(photograph(1, 1300, 1100), quality=90),
    }  # fmt: skip


FILES = _files()


def _whole(payload: bytes) -> Image.Image:
    """Pillow's, except that grey levels of 16 bits keep their upper 8, where Pillow makes all from 255 on white."""
    image: Image.Image = Image.open(io.BytesIO(payload))
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def _reference(payload: bytes, view: Any, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Pillow's: crop, antialiased resize, cut, flip."""
    image = _whole(payload)
    left, top, wide, high = view[:4]
    seen = image.crop((left, top, left + wide, top + high)).resize(
        view.resized[::-1], Image.Resampling.BILINEAR
    )
    down, right = view.cut
    seen = seen.crop((right, down, right + size[1], down + size[0]))
    return np.asarray(seen.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if view.flip else seen)


def _psnr(one: NDArray[Any], other: NDArray[Any]) -> float:
    error = float(np.mean((one.astype(float) - other.astype(float)) ** 2))
    return float("inf") if error == 0 else 10 * float(np.log10(255**2 / error))


def _decoded(decoder: Any, payload: bytes, place: Place = PLACES[0]) -> NDArray[Any]:
    out = np.full(decoder.shape, 77, decoder.dtype)
    decoder(payload, place=place, out=out)
    return out


@pytest.mark.parametrize(("decoder", "resizer"), [(DECODERS[0], "torch"), ("pillow", "pillow")])
@pytest.mark.parametrize("name", FILES)
def test_every_picture_is_pillows(name: str, decoder: str, resizer: str) -> None:
    payload = FILES[name]
    for made in (images.random_resized_crop(64), images.resize_center_crop(72, 64), images.resize((48, 80))):
        made = replace(made, decoder=decoder, resizer=resizer, layout="HWC")
        for place in PLACES[:3]:
            reader = PictureReader(payload)
            wanted = _reference(payload, made.frame(reader.height, reader.width, place), made.size)
            assert _psnr(_decoded(made, payload, place), wanted) >= 50


@pytest.mark.parametrize("slot", range(4))
def test_scaled_pictures_of_every_kind_are_pillows(slot: int) -> None:
    noise = np.random.default_rng(slot).normal(0, 8, (1100, 1400, 3))
    noisy = np.clip(np.asarray(photograph(slot + 4, 1400, 1100)) + noise, 0, 255).astype(np.uint8)
    for payload in (
        encoded(photograph(slot, 1400, 1100), quality=92, progressive=True),
        encoded(Image.fromarray(noisy), quality=80),
    ):
        for size in (48, 90, 150):
            made = images.random_resized_crop(size, scale=(0.5, 1.0), layout="HWC")
            view = made.frame(1100, 1400, PLACES[slot])
            assert view.shrink in ((1, 2, 4) if size == 48 else (1, 2))
            assert _psnr(_decoded(made, payload, PLACES[slot]), _reference(payload, view, made.size)) >= 50


@pytest.mark.parametrize(
    "name", ["baseline", "progressive", "4:4:4", "4:2:2", "grey", "RGB inside", "restarts"]
)
def test_rows_below_what_is_seen_are_left_out_and_the_others_are_the_same(name: str) -> None:
    payload = FILES.get(name) or encoded(photograph(0, 300, 225), restart_marker_rows=1)
    height = PictureReader(payload).height
    for shrink in (1, 2, 4, 8):
        whole = PictureReader(payload).pixels(shrink=shrink, own=True)
        for bottom in (shrink, 8 * shrink, 104, 120, height - height % shrink):
            found = PictureReader(payload).pixels(shrink=shrink, bottom=bottom)
            assert (found[: bottom // shrink] == whole[: bottom // shrink]).all()
            if DECODERS[0] == "simplejpeg":
                assert len(found) == min(len(whole), bottom // shrink + 2)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_damage_is_pillows_to_judge_where_rows_are_left_out_too(data: st.DataObject) -> None:
    payload = bytearray(FILES[data.draw(st.sampled_from(["baseline", "progressive", "4:4:4"]))])
    begin = payload.index(b"\xff\xda")
    changed = data.draw(st.lists(st.integers(begin + 20, len(payload) - 3), max_size=6))
    for at in changed:
        payload[at] = data.draw(st.integers(0, 254))
    if data.draw(st.booleans()):
        end = data.draw(st.sampled_from([len(payload), len(payload) - 1, len(payload) - 2]))
        del payload[data.draw(st.integers(begin, len(payload) - 3)) : end]
    results: list[NDArray[np.uint8] | None] = []
    for decoder in DECODERS:
        try:
            results.append(PictureReader(bytes(payload), decoder).pixels(bottom=100)[:100].copy())
        except FormatError:
            results.append(None)
    mine, pillow = results[0], results[-1]
    if not changed:  # what is below the hundredth row may be damaged as Pillow does not like it
        assert (mine is None) == (pillow is None)
    if mine is not None and pillow is not None:
        # rows that lack a scan are smoothed by those around them
        rows = slice(64 if b"\xff\xc2" in payload[:begin] else 100)
        assert (mine[rows] == pillow[rows]).all()


def test_layout_and_normalising_are_those_of_the_bytes() -> None:
    pixels = _decoded(images.random_resized_crop(32, layout="HWC"), FILES["baseline"])
    planes = _decoded(images.random_resized_crop(32), FILES["baseline"])
    assert (planes == pixels.transpose(2, 0, 1)).all()
    for layout in ("CHW", "HWC"):
        made = images.random_resized_crop(32, layout=layout, normalise="imagenet")
        found = _decoded(made, FILES["baseline"])
        found = found if layout == "HWC" else found.transpose(1, 2, 0)
        wanted = (pixels / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@given(
    height=st.integers(1, 3000), width=st.integers(1, 3000), slot=st.integers(0, 10**6),
    least=st.integers(1, 100), size=st.integers(1, 300),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_boxes_lie_inside_and_are_what_was_asked_for(
    height: int, width: int, slot: int, least: int, size: int
) -> None:
    scale = (least / 100, 1.0)
    view = RandomCrop((size, size), scale, (3 / 4, 4 / 3), 0.5)(height, width, Place(1, 2, 3, slot))
    assert 0 <= view.left <= view.left + view.width <= width
    assert 0 <= view.top <= view.top + view.height <= height
    assert all(edge % view.shrink == 0 for edge in view[:4])
    whole = CenterCrop(300, (size, size))(height, width, PLACES[0])
    assert min(whole.resized) == 300
    assert all(0 <= cut <= long - size for cut, long in zip(whole.cut, whole.resized, strict=True))


def test_draws_are_integers_of_the_place_and_the_name() -> None:
    """Pinned: they decide what a model sees, on every machine and in every release."""
    place = Place(1, 2, 3, 4)
    assert draws(place, "random_resized_crop", 3) == PINNED_DRAWS
    assert draws(place, "random_resized_crop", 2, first=1) == PINNED_DRAWS[1:]
    boxes = [
        tuple(RandomCrop((224, 224), (0.08, 1), (3 / 4, 4 / 3), 0.5)(375, 500, one))[:4] for one in PLACES[:3]
    ]
    assert boxes == PINNED_BOXES
    assert len({tuple(draws(place._replace(**{f: 9}), n, 2)) for f in place._fields for n in "ab"}) == 8
    numbers = np.array([draw(draws(Place(0, 0, 0, slot), "x", 1)[0], 10) for slot in range(2000)])
    assert np.bincount(numbers, minlength=10).min() > 150


PINNED_DRAWS = [7209827758686420961, 5319620601378602731, 11684103136713388797]
PINNED_BOXES = [(307, 144, 164, 160), (57, 55, 291, 297), (200, 184, 246, 186)]


def test_crops_are_distributed_as_asked() -> None:
    crop = RandomCrop((224, 224), (0.25, 1.0), (3 / 4, 4 / 3), 0.3)
    views = [crop(400, 500, Place(5, step, 0, 0)) for step in range(2000)]
    share = np.array([view.width * view.height / 200_000 for view in views])
    assert 0.24 <= share.min() <= 0.27
    assert (
        0.5 < np.median(share) < 0.6
    )  # 0.62 of what is drawn; the largest often do not fit and are tried again
    assert abs(np.mean([view.flip for view in views]) - 0.3) < 0.03


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: images.random_resized_crop(0), "size=0"),
        (lambda: images.random_resized_crop(8, scale=(0.5, 0.2)), "scale="),
        (lambda: images.random_resized_crop(8, ratio=(0.0, 1.0)), "ratio="),
        (lambda: images.random_resized_crop(8, flip=2), "flip=2"),
        (lambda: images.random_resized_crop(8, layout=ANY), "layout='WHC'"),
        (lambda: images.random_resized_crop(8, normalise=((1, 2), (3, 4))), "normalise="),
        (lambda: images.resize(8, max_pixels=0), "max_pixels=0"),
        (lambda: images.resize_center_crop(200, 224), "larger than the resized picture"),
    ],
)
def test_what_cannot_be_is_refused(call: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        call()


def test_pictures_of_too_many_pixels_are_refused_before_they_are_decoded() -> None:
    made = images.resize(8, max_pixels=300 * 225 - 1)
    for name in ("baseline", "RGBA"):
        with pytest.raises(FormatError, match="300 × 225 pixels; at most 67,499"):
            _decoded(made, FILES[name])
    bomb = bytearray(encoded(photograph(0, 64, 64)))
    at = bomb.index(b"\xff\xc0") + 5
    bomb[at : at + 4] = b"\xff\xff\xff\xff"
    for decode in (decode_picture, lambda payload: _decoded(images.resize(8), payload)):
        with pytest.raises(FormatError, match=r"65535 × 65535|DecompressionBomb"):
            decode(bytes(bomb))


@pytest.mark.parametrize("name", ["baseline", "progressive", "PNG", "WebP"])
def test_files_cut_short_are_errors_as_in_pillow(name: str) -> None:
    with pytest.raises(FormatError, match="cannot be decoded"):
        decode_picture(FILES[name][: len(FILES[name]) // 2])
    with pytest.raises(FormatError, match="cannot be decoded"):
        decode_picture(FILES[name][:20])


def test_whole_pictures_are_pillows_to_the_bit() -> None:
    for name, payload in FILES.items():
        for mode in ("RGB", "L"):
            with Image.open(io.BytesIO(payload)) as image:
                image.draft(mode, None)
                wanted = np.asarray((_whole(payload) if name == "16 bits" else image).convert(mode))
            assert (decode_picture(payload, mode) == wanted).all(), (name, mode)


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_grey_levels_of_16_bits_are_scaled(form: str) -> None:
    levels = np.random.default_rng(0).integers(0, 2**16, (24, 32), np.uint16)
    assert (decode_picture(encoded(Image.fromarray(levels), form), "L") == levels >> 8).all()


# ---- in the loader


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("images") / "data"
    schema = {"image": "bytes", "label": "int64", "other": "bytes?"}
    with shardkit.create(str(root), schema=schema, block_size="64KiB") as writer:
        for number in range(72):
            payload = encoded(photograph(number % 6, 90 + number, 80), quality=90)
            row: dict[str, Any] = {"image": payload, "label": number}
            writer.add(row | ({"other": payload} if number % 3 else {"other": None}))
    return shardkit.open(str(root))


MADE = images.random_resized_crop(32)


def _seen(loader: Any) -> dict[tuple[int, int], bytes]:
    """(step, slot) → the row of pixels."""
    found = {}
    with loader:
        for batch in loader:
            assert batch["image"].dtype == np.uint8
            assert batch["image"].flags.c_contiguous
            for slot, row in zip(batch.slots.tolist(), batch["image"], strict=True):
                found[batch.step, slot] = row.tobytes()
    return found


@pytest.mark.slow
def test_pixels_are_equal_on_every_rank_thread_worker_and_after_resumption(dataset: Any) -> None:
    plan = dataset.plan(global_batch=12, lanes=6, seed=3)
    settings: dict[str, Any] = {"decode": {"image": MADE}, "tensors": False, "fields": ["image", "label"]}
    wanted = _seen(dataset.loader(plan, threads=1, **settings))
    assert len(wanted) == 72
    for world in (2, 3):
        parts = [
            _seen(dataset.loader(plan, rank=rank, world=world, threads=3, **settings))
            for rank in range(world)
        ]
        assert {place: row for part in parts for place, row in part.items()} == wanted
    assert _seen(dataset.loader(plan, prefetch=0, **settings)) == wanted
    with dataset.loader(plan, **settings) as loader:
        first = iter(loader)
        for _ in range(3):
            last = next(first)
        state = loader.state_dict(after=last)
    resumed = dataset.loader(plan, **settings)
    resumed.load_state_dict(state)
    assert _seen(resumed) == {place: row for place, row in wanted.items() if place[0] >= 3}
    with dataset.loader(plan, by_cell=True, **settings) as loader:
        cells = [cell for step in loader for cell in step]
    rows = {
        (c.step, s): r.tobytes() for c in cells for s, r in zip(c.slots.tolist(), c["image"], strict=True)
    }
    assert rows == wanted


def test_transforms_come_after_and_rows_without_a_value_are_zeros(dataset: Any) -> None:
    plan = dataset.plan(global_batch=12, lanes=6, seed=3)
    decode = {"image": MADE, "other": MADE}
    with dataset.loader(plan, decode=decode, tensors=False) as loader:
        plain = list(loader)
    for batch in plain:
        assert batch["other"].shape == batch["image"].shape == (12, 3, 32, 32)
        assert not batch["other"][~batch.valid["other"]].any()
        assert (batch["other"][batch.valid["other"]] == batch["image"][batch.valid["other"]]).all()

    def turned(sample: dict[str, Any], rng: Any) -> dict[str, Any]:
        return {**sample, "image": 255 - sample["image"]}

    with dataset.loader(plan, decode=decode, transform=turned, tensors=False) as loader:
        for batch, before in zip(loader, plain, strict=True):
            assert (batch["image"] == 255 - before["image"]).all()


def test_memory_of_dropped_batches_is_taken_again_and_that_of_kept_ones_is_not(dataset: Any) -> None:
    plan = dataset.plan(global_batch=36, seed=3)
    with dataset.loader(plan, decode={"image": MADE}, fields=["image"], tensors=False, prefetch=1) as loader:
        places = [batch["image"].ctypes.data for _ in range(8) for batch in loader]
        assert len(set(places)) < len(places) == 16
        kept, seen = [], []
        for _ in range(8):
            for batch in loader:
                kept.append(batch["image"][3:5])  # a view keeps all of it
                seen.append(kept[-1].tobytes())
    assert len({view.ctypes.data for view in kept}) == 16
    assert [view.tobytes() for view in kept] == seen


@pytest.mark.slow
def test_what_does_not_decode_is_replaced_in_its_row(tmp_path: Path) -> None:
    payloads = [encoded(photograph(number, 80, 60)) for number in range(24)]
    payloads[5] = payloads[5][: len(payloads[5]) // 2]
    with shardkit.create(str(tmp_path / "d"), schema={"image": "bytes"}) as writer:
        for payload in payloads:
            writer.add({"image": payload})
    data = shardkit.open(str(tmp_path / "d"))
    plan = data.plan(global_batch=8)
    how: dict[str, Any] = {"decode": {"image": MADE}, "tensors": False, "threads": 1}
    with (
        data.loader(plan, **how) as loader,
        pytest.raises(RunError, match=r"sample \d+ .*'image': FormatError"),
    ):
        list(loader)
    for workers in ("threads", "processes"):
        rows = {}
        with data.loader(plan, on_error="substitute", workers=workers, **how) as loader:
            for batch in loader:
                for slot, sample, row in zip(batch.slots, batch.samples, batch["image"], strict=True):
                    rows[batch.step, int(slot)] = int(sample), row
        assert len(rows) == 24
        for (step, slot), (sample, row) in rows.items():
            lane, place = divmod(slot, plan.cell_size)
            wanted = _decoded(MADE, data[sample]["image"], Place(plan.settings.seed, step, lane, place))
            assert (row == wanted).all()


def test_the_run_records_what_decoded(dataset: Any, tmp_path: Path) -> None:
    from shardkit.ledger.merging import merge_journals

    plan = dataset.plan(global_batch=12, lanes=6)
    with dataset.loader(plan, decode={"image": MADE}, tensors=False, run=tmp_path / "run") as loader:
        list(loader)
    events = merge_journals(tmp_path / "run")[0].event_documents()
    (told,) = [event["made_by"] for event in events if event["kind"] == "decoders"]
    assert told == {"image": MADE.made_by}
    assert f"pillow {version('pillow')}" in MADE.made_by


def test_decoders_pickle_and_decode_alike() -> None:
    again = pickle.loads(pickle.dumps(MADE))
    assert (_decoded(again, FILES["baseline"]) == _decoded(MADE, FILES["baseline"])).all()


def test_importing_does_not_import_torch() -> None:
    code = "import sys, shardkit.images as i; i.resize(8); sys.exit('torch' in sys.modules or 'PIL' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("orientation", range(9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_pictures_are_turned_as_exif_says(orientation: int, form: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    payload = encoded(photograph(1, 120, 70), form, exif=exif.tobytes())
    for make in (images.resize(48, orient=True), images.random_resized_crop(32, orient=True)):
        with Image.open(io.BytesIO(payload)) as image:
            turned = ImageOps.exif_transpose(image)
            assert (turned.size == (70, 120)) == (orientation >= 5)
        expected = _decoded(replace(make, orient=False), encoded(turned, "PNG"))
        assert _psnr(_decoded(make, payload), expected) > 45
    if orientation > 1:
        assert (
            _decoded(images.resize(48), payload).tobytes()
            != _decoded(images.resize(48, orient=True), payload).tobytes()
        )


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_damaged_exif_does_not_cost_the_picture() -> None:
    payload = bytearray(encoded(photograph(0, 40, 40), exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff"))
    assert _decoded(images.resize(8, orient=True), bytes(payload)).shape == (3, 8, 8)
