"""Finding bad copies, and making them good (SPEC.md, "Scrubs and repair").

A copy is bad if its bytes were read and are wrong, or if its store says that it is not there; what could not be asked
is reported as unchecked. Results of checks are append-only.
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
