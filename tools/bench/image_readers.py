"""Image loaders for tools/bench/images.py, each controlled over stdin and stdout in its own process.

    python image_readers.py NAME SCRATCH

A line "SET KIND THREADS" runs one epoch over the pictures in SCRATCH/SET. KIND is uint8 or float32 (normalised). Rows
are (3, 224, 224), made by a random resized crop with flip. The answer is {"cpu_s", "wall_s", "samples"}, measured over
all threads of this process from the request for the first batch to the end of the last.
"""

# mypy: ignore-errors
# the packages are optional
from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BATCH, SIZE = 32, 224
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def shardkit(folder: Path, kind: str, threads: int) -> Callable[[], Iterator[Any]]:
    """Load with shardkit and decode=images.random_resized_crop(224)."""
    import torch

    import shardkit as sk
    from shardkit import images

    torch.set_num_threads(1)
    normalise = None if kind == "uint8" else "imagenet"
    dataset = sk.open(str(folder / "shards"))
    loader = dataset.loader(
        dataset.plan(global_batch=BATCH), threads=threads,
        decode={"image": images.random_resized_crop(SIZE, normalise=normalise)},
    )  # fmt: skip
    return lambda: (batch["image"] for batch in loader)


def bare(folder: Path, kind: str, threads: int) -> Callable[[], Iterator[Any]]:
    """Run the same decoder in a loop over the same crops; the difference to `shardkit` is the loader's cost."""
    import numpy as np
    import torch

    import shardkit as sk
    from shardkit import images
    from shardkit.plan import Place

    torch.set_num_threads(1)
    decoder = images.random_resized_crop(SIZE, normalise=None if kind == "uint8" else "imagenet")
    dataset = sk.open(str(folder / "shards"))
    plan = dataset.plan(global_batch=BATCH)
    payloads = [dataset[row]["image"] for row in range(len(dataset))]
    rows, steps = np.empty((BATCH, *decoder.shape), decoder.dtype), iter(range(10**9))

    def epoch() -> Iterator[Any]:
        for step in (next(steps) for _ in range(plan.steps_per_epoch)):
            for slot, sample in enumerate(plan.step(step).ravel().tolist()):
                lane, place = divmod(slot, plan.cell_size)
                decoder(payloads[sample], place=Place(plan.settings.seed, step, lane, place), out=rows[slot])
            yield rows

    return epoch


def _pillow_recipe(kind: str) -> Any:
    from torchvision import transforms

    last = [transforms.PILToTensor()] if kind == "uint8" else [
        transforms.ToTensor(), transforms.Normalize(MEAN, DEVIATION)]  # fmt: skip
    return transforms.Compose([transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip(), *last])


def torchvision_pillow(folder: Path, kind: str, threads: int) -> Callable[[], Iterator[Any]]:
    """Load with ImageFolder, Pillow and the transforms of torchvision's old recipe."""
    import torch
    from torchvision.datasets import ImageFolder

    torch.set_num_threads(1)
    data = ImageFolder(str(folder / "pictures"), _pillow_recipe(kind))
    loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True, drop_last=True)
    return lambda: (pictures for pictures, _ in loader)


def torchvision_v2(folder: Path, kind: str, threads: int) -> Callable[[], Iterator[Any]]:
    """Load with decode_jpeg and v2 transforms on uint8, as in torchvision's reference training."""
    import torch
    from torchvision.datasets import ImageFolder
    from torchvision.io import ImageReadMode, decode_jpeg, read_file
    from torchvision.transforms import v2

    torch.set_num_threads(1)
    steps = [v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()]
    if kind == "float32":
        steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, DEVIATION)]
    data = ImageFolder(
        str(folder / "pictures"), v2.Compose(steps), loader=lambda path: decode_jpeg(read_file(path), ImageReadMode.RGB)
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(data, BATCH, shuffle=True, drop_last=True)
    return lambda: (pictures for pictures, _ in loader)


def webdataset(folder: Path, kind: str, threads: int) -> Callable[[], Iterator[Any]]:
    """Load a tar with a shuffle buffer of 1,000, Pillow and the same transforms."""
    import torch
    import webdataset as wds

    torch.set_num_threads(1)
    augment = _pillow_recipe(kind)

    def epoch() -> Iterator[Any]:
        data = wds.WebDataset(str(folder / "webdataset.tar"), shardshuffle=False, empty_check=False).shuffle(
            1000
        )
        data = data.decode("pil").to_tuple("jpg", "cls").map_tuple(augment, lambda label: label)
        loader = wds.WebLoader(data.batched(BATCH, partial=False), batch_size=None, num_workers=0)
        yield from (pictures for pictures, _ in loader)

    return epoch


def dali(folder: Path, kind: str, threads: int) -> Callable[[], Iterator[Any]]:
    """Load with fn.decoders.image_random_crop and an antialiased resize on the CPU.

    Nothing is prefetched, because an epoch would not count batches prepared before it.
    """
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(
        batch_size=BATCH,
        num_threads=threads,
        device_id=None,
        exec_async=False,
        exec_pipelined=False,
        prefetch_queue_depth=1,
    )
    def pipeline() -> Any:
        files, _ = fn.readers.file(file_root=str(folder / "pictures"), random_shuffle=True, name="reader")
        pictures = fn.decoders.image_random_crop(files, device="cpu", random_area=[0.08, 1.0])
        pictures = fn.resize(pictures, size=[SIZE, SIZE], antialias=True, interp_type=types.INTERP_LINEAR)
        mean, deviation = ([0.0] * 3, [1.0] * 3) if kind == "uint8" else (
            [255 * one for one in MEAN], [255 * one for one in DEVIATION])  # fmt: skip
        return fn.crop_mirror_normalize(
            pictures, mirror=fn.random.coin_flip(), mean=mean, std=deviation, output_layout="CHW",
            dtype=types.UINT8 if kind == "uint8" else types.FLOAT,
        )  # fmt: skip

    made = pipeline()
    made.build()
    batches = made.epoch_size("reader") // BATCH

    def epoch() -> Iterator[Any]:
        for _ in range(batches):
            yield made.run()[0].as_array()

    return epoch


def ffcv(folder: Path, kind: str, threads: int) -> Callable[[], Iterator[Any]]:
    """Load a .beton file of the same JPEGs with FFCV's crop (INTER_AREA), flip and normalising, compiled beforehand."""
    import numpy as np
    import torch
    from ffcv.fields import IntField, RGBImageField, rgb_image
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter
    from PIL import Image

    torch.set_num_threads(1)
    paths, file = sorted(folder.glob("pictures/*/*.jpg")), folder / f"{kind}.beton"

    class Pictures:
        def __len__(self) -> int:
            return len(paths)

        def __getitem__(self, number: int) -> Any:
            stored = np.fromfile(paths[number], np.uint8)
            rgb_image.encode_jpeg = lambda image, quality: stored  # store the file's own bytes
            return np.asarray(Image.open(paths[number]).convert("RGB")), number % 2

    fields = {"image": RGBImageField(write_mode="jpg"), "label": IntField()}
    DatasetWriter(str(file), fields, num_workers=1).from_indexed_dataset(Pictures())
    steps = [RandomResizedCropRGBImageDecoder((SIZE, SIZE)), RandomHorizontalFlip()]
    if kind == "float32":
        steps.append(NormalizeImage(255 * np.array(MEAN), 255 * np.array(DEVIATION), np.float32))
    steps += [ToTensor(), ToTorchImage(channels_last=False)]
    loader = Loader(
        str(file), batch_size=BATCH, num_workers=threads, order=OrderOption.RANDOM, drop_last=True,
        pipelines={"image": steps, "label": [IntDecoder(), ToTensor()]},
    )  # fmt: skip
    return lambda: (pictures for pictures, _ in loader)


def spdl(folder: Path, kind: str, threads: int) -> Callable[[], Iterator[Any]]:
    """Load with SPDL's threads: FFmpeg decodes, crops, resizes (bilinear) and mirrors; NumPy normalises."""
    import random

    import numpy as np
    import torch
    from spdl import io
    from spdl.pipeline import PipelineBuilder
    from torchvision.transforms import RandomResizedCrop

    paths, rng = sorted(folder.glob("pictures/*/*.jpg")), random.Random(0)
    mean, deviation = (255 * np.array(one, np.float32).reshape(3, 1, 1) for one in (MEAN, DEVIATION))

    def decode(path: Path) -> Any:
        packets = io.demux_image(str(path))
        like = torch.empty(1).expand(3, packets.codec.height, packets.codec.width)
        top, left, high, wide = RandomResizedCrop.get_params(like, [0.08, 1.0], [3 / 4, 4 / 3])
        flip = ",hflip" if rng.random() < 0.5 else ""
        steps = (
            f"crop={wide}:{high}:{left}:{top},scale={SIZE}:{SIZE}:flags=bilinear{flip},format=pix_fmts=rgb24"
        )
        return io.decode_packets(packets, filter_desc=steps)

    def finish(frames: list[Any]) -> Any:
        rows = np.ascontiguousarray(io.to_numpy(io.convert_frames(frames)).transpose(0, 3, 1, 2))
        return rows if kind == "uint8" else (rows - mean) / deviation

    def epoch() -> Iterator[Any]:
        rng.shuffle(paths)
        pipeline = (
            PipelineBuilder().add_source(list(paths)).pipe(decode, concurrency=threads)
            .aggregate(BATCH, drop_last=True).pipe(finish).add_sink(2).build(num_threads=threads)
        )  # fmt: skip
        with pipeline.auto_stop():
            yield from pipeline

    return epoch


READERS = {
    one.__name__: one
    for one in (shardkit, bare, torchvision_pillow, torchvision_v2, webdataset, dali, ffcv, spdl)
}


def main() -> None:
    warnings.filterwarnings("ignore")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to stderr
    make, scratch = READERS[sys.argv[1]], Path(sys.argv[2])
    epochs: dict[str, Any] = {}
    for line in sys.stdin:
        name, kind, threads = line.split()
        try:
            if line not in epochs:
                epochs[line] = make(scratch / name, kind, int(threads))
                sum(1 for _ in epochs[line]())  # loads libraries, and files into the page cache
            cpu, wall, samples = time.process_time(), time.perf_counter(), 0
            for rows in epochs[line]():
                assert tuple(rows.shape[1:]) == (3, SIZE, SIZE), rows.shape
                assert str(rows.dtype).endswith(kind), rows.dtype
                samples += len(rows)
            answer = {
                "cpu_s": time.process_time() - cpu,
                "wall_s": time.perf_counter() - wall,
                "samples": samples,
            }
        except Exception as error:  # noqa: BLE001  a reader that fails is a line of the result
            answer = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        out.write(json.dumps(answer) + "\n")
        out.flush()
    os._exit(0)  # some readers' threads never end


if __name__ == "__main__":
    main()
