"""Parity sets: k objects and two more, of which any two may be lost (SPEC.md).

::

    galois.py      P and Q over GF(2⁸), in numpy
    sets.py        which objects form a set; headers and documents
    catalogue.py   the sets of a version, and where P and Q are
    streaming.py   objects of a set from the others, verified on both sides
    encoding.py    P and Q of every set of a version
    rebuilding.py  a block from the same range of the others
    degraded.py    the last resort of a reader
"""

from shardkit.storage.parity.catalogue import find_records, parity_names, read_record, sets_of, sets_that_hold
from shardkit.storage.parity.degraded import ParityReads, with_parity
from shardkit.storage.parity.encoding import Encoding, encode_sets
from shardkit.storage.parity.rebuilding import rebuild_range
from shardkit.storage.parity.sets import ParitySet, SetRecord, parse_code
from shardkit.storage.parity.streaming import BadSource, restore

__all__ = [
    "BadSource",
    "Encoding",
    "ParityReads",
    "ParitySet",
    "SetRecord",
    "encode_sets",
    "find_records",
    "parity_names",
    "parse_code",
    "read_record",
    "rebuild_range",
    "restore",
    "sets_of",
    "sets_that_hold",
    "with_parity",
]
