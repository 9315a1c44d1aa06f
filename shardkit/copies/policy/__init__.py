"""Where copies shall lie: policy, locations, and which object belongs where (SPEC.md, "Locations and policy").

A manifest holds none of this: it is configuration of a root, and may change while the data does not. Placement is
pure.
"""

from shardkit.copies.policy.opening import location_of, open_locations
from shardkit.copies.policy.placement import ALWAYS_EVERYWHERE, Placed, placement
from shardkit.copies.policy.policy import Critical, Parity, Policy
from shardkit.copies.policy.record import ROOT_NAME, LocationRecord, LocationTable
from shardkit.copies.policy.table import commit_table, read_table, read_tables

__all__ = [
    "ALWAYS_EVERYWHERE",
    "ROOT_NAME",
    "Critical",
    "LocationRecord",
    "LocationTable",
    "Parity",
    "Placed",
    "Policy",
    "commit_table",
    "location_of",
    "open_locations",
    "placement",
    "read_table",
    "read_tables",
]
