"""webdataset: tars of npy, bin or txt members, shardshuffle and a shuffle buffer of 1,000; cannot resume."""

# mypy: ignore-errors
# the packages are optional
from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def build(workload: Any, scale: float, directory: str) -> None:
    from pathlib import Path

    import webdataset as wds

    Path(directory).mkdir(parents=True)
    suffix = {"": "bin", "str": "txt"}.get(workload.dtype, "npy")
    with wds.ShardWriter(
        f"{directory}/%05d.tar" + (".gz" if workload.compressed else ""), maxsize=256 << 20
    ) as writer:
        for number, sample in enumerate(workload.samples(scale)):
            row = {"__key__": f"{number:09d}", suffix: sample[workload.field]}
            writer.write(row | ({"cls": sample["label"]} if workload.label else {}))


class _Reader:
    def __init__(self, workload: Any, directory: str, workers: int, urls: list[str]) -> None:
        from pathlib import Path

        import webdataset as wds

        urls = urls or [str(p) for p in sorted(Path(directory).glob("*.tar*"))]
        suffix = {"": "bin", "str": "txt"}.get(workload.dtype, "npy")

        def pipeline() -> Any:
            data = (
                wds.WebDataset(urls, shardshuffle=len(urls), empty_check=False)
                .shuffle(1000)
                .decode()
                .to_tuple(suffix)
            )
            data = data.batched(workload.batch, partial=True)
            return wds.WebLoader(data, batch_size=None, num_workers=workers)

        self.epoch = lambda: (batch[0] for batch in pipeline())


def open_reader(
    workload: Any, scale: float, directory: str, workers: int, urls: Sequence[str] = ()
) -> _Reader:
    return _Reader(workload, directory, workers, list(urls))
