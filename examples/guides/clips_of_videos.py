"""Clips of videos: torchcodec decodes seeded clips of verified bytes directly into the rows of a batch.

    pip install torchcodec    # and FFmpeg 4 to 8, as apt-get install ffmpeg brings
    python examples/guides/clips_of_videos.py

shardkit decodes neither video nor sound. A decoder that declares its shape and dtype connects any library that does::

    ds = shardkit.open("data/videos")
    loader = ds.loader(ds.plan(global_batch=32, seed=0), decode={"video": RandomClip(16, 224, 224)})
    for batch in loader:
        loss = model(batch["video"])  # (32, 16, 3, 224, 224) uint8

What to know:

* Random draws depend on the sample's place (seed, step, lane, slot), so clips do not depend on ranks, threads or
  restarts.
* Videos are decoded in threads (``threads=``, one per processor by default), so each FFmpeg decoder gets one thread.
* A broken or short video is a decoding error, which ``on_error`` handles.
* The run's ledger records ``made_by``. Ranks with different values are refused, since other versions may give other
  pixels.
* The builds of torchcodec and torch must match. From 0.14 on, PyPI's builds are for CUDA: with a CPU build of torch
  take ``"torchcodec<0.14"``, or PyTorch's own index.
* Sound works in the same way, with `AudioDecoder` and ``get_samples_played_in_range``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchcodec
from numpy.typing import NDArray
from torchcodec.decoders import VideoDecoder
from torchcodec.encoders import VideoEncoder
from torchcodec.transforms import Resize

import shardkit as sk
from guide_shell import shardkit, workplace
from shardkit.plan import Place, draw, draws


@dataclass(frozen=True)
class RandomClip:
    """Decodes consecutive frames from a random start: (frames, 3, height, width) uint8."""

    frames: int
    height: int
    width: int

    dtype = np.dtype(np.uint8)
    made_by = f"torchcodec {torchcodec.__version__}, FFmpeg {torchcodec.ffmpeg_major_version}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.frames, 3, self.height, self.width

    def __call__(self, video: bytes, /, *, place: Place, out: NDArray[np.uint8]) -> None:
        """Decode a clip into `out`."""
        decoder = VideoDecoder(video, num_ffmpeg_threads=1, transforms=[Resize((self.height, self.width))])
        if len(decoder) < self.frames:
            raise ValueError(f"a video of {len(decoder)} frames; {self.frames} are wanted")
        (bits,) = draws(place, "random clip", 1)
        first = draw(bits, len(decoder) - self.frames + 1)
        out[...] = decoder.get_frames_in_range(first, first + self.frames).data.numpy()


def make_videos(folder: Path) -> None:
    """Write 24 videos of 40 frames; each frame is a little brighter than the frame before."""
    folder.mkdir()
    for number in range(24):
        frames = torch.full((40, 3, 48, 64), 40, dtype=torch.uint8)
        frames += 4 * torch.arange(40, dtype=torch.uint8).reshape(40, 1, 1, 1)
        frames[:, number % 3] += number
        VideoEncoder(frames, frame_rate=10).to_file(folder / f"{number:02d}.mp4")


def clips(loader: Any) -> dict[int, NDArray[np.uint8]]:
    """Return {step: clips} for the remaining steps of a loader's epoch."""
    return {batch.step: batch["video"].numpy() for batch in loader}


def main() -> None:
    with workplace(__doc__):
        make_videos(Path("videos"))
        shardkit("build", "videos", "data/videos", "--jobs", 1)
        ds = sk.open("data/videos")
        plan, decode = ds.plan(global_batch=4, lanes=2, seed=0), {"video": RandomClip(8, 32, 32)}

        with ds.loader(plan, decode=decode, threads=2) as loader:
            epoch = clips(loader)
        brightness = epoch[0].mean(axis=(2, 3, 4))  # (4, 8)
        print(f"batch: {epoch[0].shape} {epoch[0].dtype}; each frame over the one before: "
              f"{np.diff(brightness).mean():.0f} levels")  # fmt: skip
        print("brightness of the first frames:", *brightness[:, 0].round().astype(int))

        with ds.loader(plan, decode=decode, threads=1) as loader:
            next(iter(loader))
            state = loader.state_dict()
        with ds.loader(plan, decode=decode, threads=3) as loader:
            loader.load_state_dict(state)
            rest = clips(loader)
        equal = all(np.array_equal(epoch[step], clip) for step, clip in rest.items())
        print(f"resumed before step {min(rest)}: " + ("the same clips" if equal else "other clips"))


if __name__ == "__main__":
    main()
