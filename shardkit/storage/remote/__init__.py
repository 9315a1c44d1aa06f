"""Stores beyond the local disk.

::

    addresses.py      URLs taken apart; those that hold a credential are refused
    backoff.py        how long to try again, with jitter
    waiting.py        what is waited for, said every few seconds
    failures.py       what a client's error means, without its text
    ranges.py         which ranges to ask for together
    clients.py        one attempt of each request: obstore, made per process
    boto3_client.py   the same through boto3: stored checksums, forked processes
    object_store.py   a store in a bucket: repeats, settles lost answers
    spooled_stage.py  a large object on its way to a bucket
    fsspec_store.py   a store behind any other URL that fsspec knows
    foreign.py        objects of somebody else, by URL, read only
    probe.py          does put-if-absent hold in a race?
"""

from shardkit.storage.remote.addresses import OBJECT_SCHEMES, Address, parse_address
from shardkit.storage.remote.backoff import Patience, pauses
from shardkit.storage.remote.foreign import ForeignStat, ForeignStore, open_foreign, split_url
from shardkit.storage.remote.fsspec_store import FsspecStore
from shardkit.storage.remote.object_store import ObjectStore
from shardkit.storage.remote.probe import ProbeResult, check_writers, probe
from shardkit.storage.remote.ranges import Range, RangeGroup, coalesce

__all__ = [
    "OBJECT_SCHEMES",
    "Address",
    "ForeignStat",
    "ForeignStore",
    "FsspecStore",
    "ObjectStore",
    "Patience",
    "ProbeResult",
    "Range",
    "RangeGroup",
    "check_writers",
    "coalesce",
    "open_foreign",
    "parse_address",
    "pauses",
    "probe",
    "split_url",
]
