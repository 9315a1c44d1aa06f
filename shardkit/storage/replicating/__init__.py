"""From what the policy asks for to copies that are there (SPEC.md, "Locations and policy").

::

    needed.py      which objects a root's versions need, and how many copies of each
    facts.py       what each location has, and what is missing where: the lag
    pacing.py      bandwidth, hours of the day, and a way to stop
    copying.py     one object to one location: copied, verified on the way, then published
    mirroring.py   the log and the small documents, so that a copy can be opened alone
    replicating.py `replicate`: until the policy is met
    committing.py  what a commit waits for: sync, async, hybrid
    protecting.py  parity, where the policy asks for it
    dropping.py    taking a copy away, with proof that enough verified ones are left
    promoting.py   a root that is lost for good: a copy takes its place
    placing.py     `place`: another table, and the bytes moved after it; `undo`
"""

from shardkit.storage.replicating.committing import copy_before_commit, copy_log
from shardkit.storage.replicating.copying import copy_object
from shardkit.storage.replicating.dropping import Drops, drop_surplus
from shardkit.storage.replicating.facts import Facts, Missing, look
from shardkit.storage.replicating.needed import Needed, find_needed
from shardkit.storage.replicating.pacing import Hours, Pace, parse_bandwidth
from shardkit.storage.replicating.placing import Placing, place, prepare, undo
from shardkit.storage.replicating.promoting import promote
from shardkit.storage.replicating.replicating import LocationResult, Replication, replicate

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
