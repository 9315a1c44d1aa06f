"""Adoption: WebDataset tars become a dataset where they lie; one strict pass, in parallel, killable (SPEC.md).

adoption   `adopt`: what is asked for, the journal, the commit
tar_places which tars, where they lie, whether they are what they were
scanning   one pass over one tar: its index, its digest, its runs of one label
tasks      the pass as work for processes, and what is left of it after a kill
promises   what does not hold for adopted data
"""

from __future__ import annotations

from shardkit_tools.adopting.adoption import Adoption, adopt
from shardkit_tools.adopting.promises import Promise, broken_promises

__all__ = ["Adoption", "Promise", "adopt", "broken_promises"]
