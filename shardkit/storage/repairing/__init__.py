"""Finding bad copies, and making them good (SPEC.md, "Scrubs and repair").

::

    checking.py    one look at one copy
    records.py     results of looking, append-only
    survey.py      what is needed and where, of a root of which anything may be damaged
    documents.py   identity, marks, log, tables: in the root and its copies
    results.py     what a repair finds and does
    healing.py     one copy, from a replica, else from parity
    repairing.py   `repair`: all that is bad
    scrubbing.py   `scrub`: longest unlooked-at first
"""

from shardkit.storage.repairing.checking import CheckAll, Checked, CopyCheck, check_copy
from shardkit.storage.repairing.records import Look, Records, read_looks
from shardkit.storage.repairing.repairing import repair
from shardkit.storage.repairing.results import Healed, Lost, Repair, Unchecked
from shardkit.storage.repairing.scrubbing import Scrub, ScrubbedLocation, scrub

__all__ = [
    "CheckAll",
    "Checked",
    "CopyCheck",
    "Healed",
    "Look",
    "Lost",
    "Records",
    "Repair",
    "Scrub",
    "ScrubbedLocation",
    "Unchecked",
    "check_copy",
    "read_looks",
    "repair",
    "scrub",
]
