"""Finding bad copies, and making them good (SPEC.md, "Scrubs and repair").

A copy is bad if its bytes were read and are wrong, or if its store says that it is not there; what could not be asked
is reported as unchecked. Results of checks are append-only.
"""

from shardkit.copies.repairing.checking import CheckAll, Checked, CopyCheck, check_copy
from shardkit.copies.repairing.records import Look, Records, read_looks
from shardkit.copies.repairing.repairing import repair
from shardkit.copies.repairing.results import Healed, Lost, Repair, Unchecked
from shardkit.copies.repairing.scrubbing import Scrub, ScrubbedLocation, scrub

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
