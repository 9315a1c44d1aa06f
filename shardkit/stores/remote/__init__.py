"""Stores beyond the local disk.

Clients are made per process and make one attempt of each request; repeating, pausing and settling lost answers is
done above them. URLs that hold a credential are refused, and no message holds one. Packages of others are imported
where they are used.
"""

from shardkit.stores.remote.addresses import OBJECT_SCHEMES, Address, parse_address
from shardkit.stores.remote.backoff import RetryPolicy, pauses
from shardkit.stores.remote.foreign import ForeignStat, ForeignStore, open_foreign, split_url
from shardkit.stores.remote.fsspec_store import FsspecStore
from shardkit.stores.remote.object_store import ObjectStore
from shardkit.stores.remote.probe import ProbeResult, check_writers, probe

__all__ = [
    "OBJECT_SCHEMES",
    "Address",
    "ForeignStat",
    "ForeignStore",
    "FsspecStore",
    "ObjectStore",
    "ProbeResult",
    "RetryPolicy",
    "check_writers",
    "open_foreign",
    "parse_address",
    "pauses",
    "probe",
    "split_url",
]
