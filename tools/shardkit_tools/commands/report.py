"""`shardkit report`: a run's last hours as one archive that can be handed on."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

from shardkit.errors import StoreError
from shardkit_tools import console, options
from shardkit_tools.observing.archive import collect, parse_since, write
from shardkit_tools.options import argument, option
from shardkit_tools.texts import bytes_text

_STACKS_WAIT_S = 10.0


def report(
    run: Annotated[str, argument("RUN", "The run directory.")],
    since: Annotated[str, option("--since TIME", "How far back: 30min, 2h, 1d, all.")] = "2h",
    output: Annotated[
        str | None, option("--output -o FILE", "Where to; by default RUN-report-TIME.tar.gz here.")
    ] = None,
    stacks: Annotated[
        bool, option("--stacks/--no-stacks", "Ask live ranks what their threads are doing.")
    ] = True,
    as_json: options.JsonFlag = False,
) -> None:
    """Pack what explains the last hours of a run into one redacted archive.

    In it: events, decisions, versions, stacks, the slowest blocks, every rank's records, what the outage cost;
    README.txt sums it up. Credentials are taken out: in addresses, behind names that sound like secrets, and the values
    of such environment variables; read it all the same before you hand it on. The run is not disturbed.

    Example: shardkit report runs/mine --since 2h
    """
    path, seconds = Path(run), parse_since(since)
    archive = collect(path, seconds, stacks_wait_s=_STACKS_WAIT_S if stacks else 0.0)
    now = int(time.time())
    folder = f"{path.absolute().name}-report-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"
    target = Path(output or f"{folder}.tar.gz")
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(f"{target} cannot be written: {error.strerror}; name another --output") from error
    with open(descriptor, "wb") as sink:
        write(archive, sink, folder, now)
    size = target.stat().st_size
    if as_json:
        sizes = {name: len(data) for name, data in archive.items()}
        console.print_json({"archive": str(target), "bytes": size, "files": sizes})
        return
    summary = archive["README.txt"].decode().partition("\nDecisions")[0].rstrip()
    for line in [*summary.splitlines(), "", f"{target}  {bytes_text(size)}, {len(archive)} files"]:
        console.print_line(line)
