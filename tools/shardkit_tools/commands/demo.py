"""`shardkit demo`: all of it in two minutes, on data that every machine has."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

from shardkit.errors import UsageError
from shardkit_tools.demonstration import Narration, tell
from shardkit_tools.options import option


def demo(
    directory: Annotated[
        Path | None, option("--dir", "Work in this empty folder and keep it; else a temporary one.")
    ] = None,
) -> None:
    """Build, look, verify, train, kill, resume, prove, damage, heal: on data that every machine has.

    Takes under two minutes on 2 cores, downloads nothing and needs no server.

    Example: shardkit demo --dir /tmp/shardkit-demo
    """
    if directory is not None and directory.exists() and any(directory.iterdir()):
        raise UsageError(f"{directory} is not empty; name a new folder with --dir, or leave it out")
    place = Path(tempfile.mkdtemp(prefix="shardkit-demo-")) if directory is None else directory
    place.mkdir(parents=True, exist_ok=True)
    narration = Narration(place.resolve())
    try:
        tell(narration)
    finally:
        if directory is None:
            shutil.rmtree(place, ignore_errors=True)
    narration.say("")
    kept = (
        f" Everything is in {place}."
        if directory is not None
        else " Keep the files next time: shardkit demo --dir DIR"
    )
    narration.say("Done: every check above was made just now, on this machine." + kept, "bold green")
