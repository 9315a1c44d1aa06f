"""From what the policy asks for to copies that are there (SPEC.md, "Locations and policy").

A copy counts once it is there and verified; one is taken away only with proof that enough verified ones are left.
"""

from shardkit.copies.replicating.committing import copy_before_commit, copy_log
from shardkit.copies.replicating.copying import copy_object
from shardkit.copies.replicating.dropping import Drops, drop_surplus
from shardkit.copies.replicating.facts import Facts, Missing, look
from shardkit.copies.replicating.needed import Needed, find_needed
from shardkit.copies.replicating.pacing import Hours, Pace, parse_bandwidth
from shardkit.copies.replicating.placing import Placing, place, prepare, undo
from shardkit.copies.replicating.promoting import promote
from shardkit.copies.replicating.replicating import LocationResult, Replication, replicate

__all__ = [
    "Drops",
    "Facts",
    "Hours",
    "LocationResult",
    "Missing",
    "Needed",
    "Pace",
    "Placing",
    "Replication",
    "copy_before_commit",
    "copy_log",
    "copy_object",
    "drop_surplus",
    "find_needed",
    "look",
    "parse_bandwidth",
    "place",
    "prepare",
    "promote",
    "replicate",
    "undo",
]
