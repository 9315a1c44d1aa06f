"""Tars as WebDataset reads them: one member for each sample."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from bench.interruptions.samples import COLLECTIONS, parts


def write(folder: Path) -> None:
    for name, numbers in COLLECTIONS.items():
        (folder / name).mkdir()
        for at, part in enumerate(parts(numbers)):
            with tarfile.open(folder / name / f"{at:06d}.tar", "w") as tar:
                for number in part:
                    data = str(number).encode()
                    member = tarfile.TarInfo(f"{number:08d}.cls")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
