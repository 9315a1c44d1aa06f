"""The s3fs part of `remote.py`, for a separate environment: s3fs and boto3 need different versions of botocore.

Prints JSON: name → [[wall s, processor s], …].
"""

from __future__ import annotations

import asyncio
import importlib
import json
import resource
import sys
import time
from collections.abc import Callable


def time_work(work: Callable[[], object]) -> tuple[float, float]:
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    s3fs = importlib.import_module("s3fs")
    endpoint, path = sys.argv[1:3]
    length, in_flight, rounds = map(int, sys.argv[3:6])
    starts = json.loads(sys.stdin.read())
    whole = s3fs.S3FileSystem(endpoint_url=endpoint)

    async def ranges() -> None:
        system = s3fs.S3FileSystem(endpoint_url=endpoint, asynchronous=True, skip_instance_cache=True)
        session = await system.set_session()
        gate = asyncio.Semaphore(in_flight)

        async def read(start: int) -> None:
            async with gate:
                await system._cat_file(path, start=start, end=start + length)  # noqa: SLF001

        await asyncio.gather(*map(read, starts))
        await session.close()

    contestants: dict[str, Callable[[], object]] = {
        "whole": lambda: whole.cat_file(path),
        "ranges": lambda: asyncio.run(ranges()),
    }
    result: dict[str, list[tuple[float, float]]] = {}
    for name, work in contestants.items():
        work()
        result[name] = [time_work(work) for _ in range(rounds)]
    print(json.dumps({"version": s3fs.__version__, **result}))


if __name__ == "__main__":
    main()
