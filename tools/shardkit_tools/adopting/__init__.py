"""Adoption: WebDataset tars become a dataset where they lie; one strict pass, in parallel, killable (SPEC.md).

No sample is copied: indexes say where the members of a tar lie, and digests whether it is what it was. What does not
hold for adopted data is said when it is adopted.
"""

from __future__ import annotations

from shardkit_tools.adopting.adoption import Adoption, adopt, broken_promises

__all__ = ["Adoption", "adopt", "broken_promises"]
