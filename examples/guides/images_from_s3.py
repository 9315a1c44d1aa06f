"""Images from S3: folders of pictures → shards in a bucket → batches, with each byte fetched once per node.

    python examples/guides/images_from_s3.py          # against a bucket that moto serves on this machine
    BUCKET=cats AWS_ENDPOINT_URL=http://localhost:4566 python examples/guides/images_from_s3.py     # LocalStack, S3

Credentials, region and endpoint come from the environment, a profile or the machine's role, as for every S3 client.
They are never part of a URL or of the dataset. ``gs://`` and ``az://`` work in the same way, with Google's and Azure's
own environment variables (``GOOGLE_APPLICATION_CREDENTIALS``, ``AZURE_STORAGE_ACCOUNT_NAME`` …).
``STORAGE_EMULATOR_HOST`` names an emulator of Google's storage.

What to know for real data:

* ``--stratify label`` balances every batch by class: with batches of 512 over ImageNet's 1,000 classes, no class is
  missing for long.
* ``--split train=0.95,val=0.05`` is by content: a picture stays in its split when the dataset is built again.
* The bytes of pictures are stored unchanged. The loader decodes, crops and flips them with draws from
  (seed, step, lane, slot), so a resumed run crops the same pixels: see training_on_images.py.
* ``cache=`` is a directory on the node's own disk that all ranks of the node share. Blocks are verified on arrival and
  whenever they are read again, and eviction follows the plan. If the cache has room for the node's share, small blocks
  are fetched together with their neighbours. Without a cache, use blocks of at least 256 KiB.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import boto3
import numpy as np
from moto.server import ThreadedMotoServer
from PIL import Image

import shardkit as sk
from guide_shell import shardkit, workplace
from shardkit import images

SIZE = 32


def make_photos(folder: Path) -> None:
    """Write 240 small pictures of three classes that differ in colour."""
    rng = np.random.default_rng(0)
    for number in range(240):
        kind = number % 3
        pixels = rng.integers(0, 120, (40, 40 + number % 5, 3), dtype=np.uint8)
        pixels[..., kind] += 100
        path = folder / ("red", "green", "blue")[kind] / f"{number:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)


@contextlib.contextmanager
def local_s3(bucket: str) -> Iterator[None]:
    """Serve an empty bucket on this machine, and set the environment of S3 clients to it."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # no line per request
    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "guide", "AWS_SECRET_ACCESS_KEY": "guide", "NO_PROXY": host}
    boto3.client("s3").create_bucket(Bucket=bucket)
    yield
    server.stop()


def main() -> None:
    with workplace(__doc__), contextlib.ExitStack() as stack:
        bucket, options = os.environ.get("BUCKET", "guide"), []
        if "AWS_ENDPOINT_URL" not in os.environ and "BUCKET" not in os.environ:
            stack.enter_context(local_s3(bucket))
            options = ["--single-writer"]  # moto does not order writers that race; S3 does
        make_photos(Path("photos"))
        root = f"s3://{bucket}/guide/photos"

        # Shards are stored under their SHA-256; the log entry that names the version is written last.
        shardkit(
            "build",
            "photos",
            root,
            "--stratify",
            "label",
            "--split",
            "train=0.9,val=0.1",
            "--jobs",
            1,
            *options,
        )
        shardkit("tag", f"{root}@train", "v1", "-m", "as trained on")
        shardkit("plan", f"{root}@v1", "--global-batch", 24, "--lanes", 4)

        dataset = sk.open(f"{root}@v1")
        print("classes:", ", ".join(dataset.classes))
        plan = dataset.plan(global_batch=24, lanes=4, seed=0)
        decode = {"image": images.random_resized_crop(SIZE, scale=(0.5, 1.0))}
        loader = stack.enter_context(
            dataset.loader(plan, decode=decode, cache="cache", cache_size="100MiB", tensors=False)
        )
        seen = []
        for epoch in (0, 1):
            for batch in loader:
                assert batch["image"].shape == (24, 3, SIZE, SIZE)
                counts = np.bincount(batch["label"], minlength=3)
                assert counts.max() - counts.min() <= 4, "every batch looks like the dataset"
                seen.append(batch["image"].mean())
            stats = loader.stats()
            print(f"after epoch {epoch}: {int(stats['bytes_from_root']):,} bytes came from the bucket")
        print(f"{len(seen)} batches; the second epoch was read from the cache and from memory")


if __name__ == "__main__":
    main()
