"""Measure one epoch of pictures from a bucket that answers 10 ms late: shardkit and every peer that reads buckets.

Each reader starts in a new process with an empty cache. The sizes are the sizes of ImageNet's pictures; the bytes are
random and not decoded, because decoding would hide the loaders (tools/bench/images.py measures it). Readers with
worker processes have two, Energon one, and shardkit its threads.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.reading.bucket import IN_FLIGHT, ranges_of_first_epoch
from bench.reading.contest import Entrant, take_turns
from bench.reading.processes import PEERS, Job, build_data, interpreter
from bench.reading.slow_bucket import slow_bucket
from bench.reading.workloads import PICTURES
from tests.servers.object_stores import s3_environment

__all__ = ["LATENCY_S", "measure"]

LATENCY_S = 0.01
BUCKET = "bench"
WORKERS = {"shardkit_reader": 0, "energon": 1}
"""Worker processes of a reader, of others two. With two, Energon's storage client loses the end of tars."""
READ_BUCKETS = ("mosaicml", "litdata_reader", "webdataset_reader", "hf_iterable", "lance_reader", "lancedb_reader",
                "energon")  # fmt: skip
"""Peers that read a bucket without a download of all data before."""
_CACHED = ("mosaicml", "litdata_reader")
"""Peers that keep what they read in a local folder."""


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    root = scratch / BUCKET
    root.mkdir()
    wanted = {"shardkit_reader": sys.executable}
    if options.peers_python:
        wanted |= {name: interpreter(options.peers_python, name) for name in READ_BUCKETS}
    wanted = {
        name: python for name, python in wanted.items() if not options.readers or name in options.readers
    }
    jobs = {
        name: Job(
            reader=name,
            workload=PICTURES.name,
            scale=options.scale,
            directory=str(root / name),
            python=python,
        )
        for name, python in wanted.items()
    }
    failed = build_data(jobs)
    found: dict[str, Any] = {
        name: {"label": PEERS.get(name, "**shardkit**"), "epochs": {}}
        | ({"error": failed[name]} if name in failed else {})
        for name in wanted
    }
    with slow_bucket(root, LATENCY_S) as endpoint:
        settings = scratch / "msc.json"  # of Energon's storage client
        settings.write_text(json.dumps(_storage_client(endpoint)))
        environment = s3_environment(endpoint) | {
            "S3_ENDPOINT_URL": endpoint,  # of Streaming
            "AWS_ALLOW_HTTP": "true",  # of Lance
            "MSC_CONFIG": str(settings),
        }
        entrants = {}
        for name, job in jobs.items():
            special: dict[str, Any] = {"cache": str(scratch / "caches" / name)} if name in _CACHED else {}
            if name == "webdataset_reader":  # reads by HTTP
                tars = sorted((root / name).glob("*.tar"))
                special = {"urls": [f"{endpoint}/{BUCKET}/{name}/{tar.name}" for tar in tars]}
            remote = replace(job, directory=f"s3://{BUCKET}/{name}", environment=environment, settings=special,
                             workers=WORKERS.get(name, 2))  # fmt: skip
            entrants[name] = Entrant("", remote, frozenset())
        if "shardkit_reader" in entrants and "error" not in found["shardkit_reader"]:
            job = entrants["shardkit_reader"].job
            ranges = ranges_of_first_epoch(job, endpoint, BUCKET, options.seconds)
            (scratch / "ranges.json").write_text(json.dumps(ranges))
            limit = {"ranges": str(scratch / "ranges.json"), "in_flight": IN_FLIGHT, "endpoint": endpoint,
                     "bucket": BUCKET}  # fmt: skip
            entrants["ranges"] = Entrant("", replace(job, reader="ranges", settings=limit), frozenset())
            found["ranges"] = {
                "label": f"limit: obstore, shardkit's ranges, {IN_FLIGHT} in flight",
                "epochs": {},
            }
        for repeat in range(options.repeats):
            print(f"  repeat {repeat + 1} of {options.repeats}", flush=True)
            take_turns(entrants, found, options, repeat, ["touched"])
            shutil.rmtree(scratch / "caches", ignore_errors=True)
    return {"rows": PICTURES.rows(options.scale), "batch": PICTURES.batch, "readers": found}


def _storage_client(endpoint: str) -> dict[str, Any]:
    options = {"base_path": BUCKET, "endpoint_url": endpoint, "region_name": "us-east-1"}
    return {"profiles": {BUCKET: {"storage_provider": {"type": "s3", "options": options}}}}
