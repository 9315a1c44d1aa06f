"""Parity sets: k objects and two more, of which any two may be lost (SPEC.md).

What forms a set is a pure function of the version. Objects are verified before they are used and after they are made.
"""

from shardkit.storage.parity.catalogue import find_records, parity_names, read_record, sets_of, sets_that_hold
from shardkit.storage.parity.degraded import ParityReads, with_parity
from shardkit.storage.parity.encoding import Encoding, encode_sets
from shardkit.storage.parity.rebuilding import rebuild_range
from shardkit.storage.parity.sets import ParitySet, SetRecord
from shardkit.storage.parity.streaming import restore

__all__ = [
    "Encoding",
    "ParityReads",
    "ParitySet",
    "SetRecord",
    "encode_sets",
    "find_records",
    "parity_names",
    "read_record",
    "rebuild_range",
    "restore",
    "sets_of",
    "sets_that_hold",
    "with_parity",
]
