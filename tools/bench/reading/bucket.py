"""Measure a shuffled epoch from a bucket without a cache, and obstore fetching the same ranges."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from bench.reading.contest import Entrant, take_turns
from bench.reading.processes import Job, Reader
from bench.reading.workloads import WORKLOADS
from shardkit.reading.read_path import ReadSettings
from tests.servers.fault_proxy import Fault, FaultProxy, Request
from tests.servers.object_stores import localstack, s3_environment

__all__ = ["IN_FLIGHT", "measure", "ranges_of_first_epoch"]

BUCKET = "bench"
SHARE = 0.1
"""Of the tokens of the other parts."""
IN_FLIGHT = ReadSettings().most_concurrency
"""Ranges that obstore fetches at a time: as many as shardkit may."""


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    workload, scale = WORKLOADS["tokens"], options.scale * SHARE
    found: dict[str, Any] = {
        "shardkit": {"label": "**shardkit**", "epochs": {}},
        "ranges": {"label": f"limit: obstore, the same ranges, {IN_FLIGHT} in flight", "epochs": {}},
    }
    facts = {"rows": workload.rows(scale), "batch": workload.batch, "readers": found}
    try:
        with localstack(scratch / "server", BUCKET) as endpoint:
            job = Job(reader="shardkit_reader", workload=workload.name, scale=scale,
                      directory=f"s3://{BUCKET}/tokens", environment=s3_environment(endpoint))  # fmt: skip
            with Reader(job) as reader:
                if "error" in (answer := reader.ask("build")):
                    raise RuntimeError(answer["error"])
            ranges = ranges_of_first_epoch(job, endpoint, BUCKET, options.seconds)
            (scratch / "ranges.json").write_text(json.dumps(ranges))
            settings = {"ranges": str(scratch / "ranges.json"), "in_flight": IN_FLIGHT, "endpoint": endpoint,
                        "bucket": BUCKET}  # fmt: skip
            entrants = {
                "shardkit": Entrant("", job, frozenset()),
                "ranges": Entrant("", _with(job, "ranges", settings), frozenset()),
            }
            for repeat in range(options.repeats):
                print(f"  repeat {repeat + 1} of {options.repeats}", flush=True)
                take_turns(entrants, found, options, repeat, ["touched"])
            return {**facts, "ranges": len(ranges), "bytes": sum(end - start for _, start, end in ranges)}
    except Exception as error:  # noqa: BLE001  a server that cannot be had is a line of the result
        found["shardkit"]["error"] = found["ranges"]["error"] = f"{type(error).__name__}: {error}"[:300]
        return facts


def _with(job: Job, reader: str, settings: dict[str, Any]) -> Job:
    return Job(reader=reader, workload=job.workload, scale=job.scale, directory=job.directory, settings=settings,
               environment=job.environment)  # fmt: skip


def ranges_of_first_epoch(job: Job, endpoint: str, bucket: str, seconds: float) -> list[tuple[str, int, int]]:
    """Return (key, first byte, end) of each range that the first epoch of a job fetches, in order."""
    asked: list[Request] = []

    def note(request: Request) -> Fault | None:
        asked.append(request)
        return None

    with FaultProxy(endpoint, note) as proxy:
        environment = {**job.environment, "AWS_ENDPOINT_URL": proxy.endpoint}
        through = Job(reader=job.reader, workload=job.workload, scale=job.scale, directory=job.directory,
                      environment=environment)  # fmt: skip
        with Reader(through) as reader:
            reader.ask("prepare")
            asked.clear()
            if "error" in (answer := reader.ask(f"epoch touched {100 * seconds}")):
                raise RuntimeError(answer["error"])
    ranges: dict[tuple[str, int, int], None] = {}
    for request in asked:
        bounds = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
        if request.method == "GET" and bounds:
            key = unquote(urlsplit(request.path).path).removeprefix(f"/{bucket}/")
            ranges[key, int(bounds[1]), int(bounds[2]) + 1] = None  # repeats are dropped
    return list(ranges)
