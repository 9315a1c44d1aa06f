"""Parity sets: k objects and two more, of which any two may be lost (SPEC.md).

What forms a set is a pure function of the version. Objects are verified before they are used and after they are made.
"""

from shardkit.reading.parity.catalogue import find_records, parity_names, read_record, sets_of, sets_that_hold
from shardkit.reading.parity.degraded import ParityReads, rebuild_range
from shardkit.reading.parity.sets import ParitySet, SetRecord
from shardkit.reading.parity.streaming import restore

__all__ = [
    "ParityReads",
    "ParitySet",
    "SetRecord",
    "find_records",
    "parity_names",
    "read_record",
    "rebuild_range",
    "restore",
    "sets_of",
    "sets_that_hold",
]
