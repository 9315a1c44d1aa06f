"""Adoption: make a dataset of existing files, in one strict, parallel pass (SPEC.md).

No sample is copied: indexes locate the rows of a file, and digests detect changes. Guarantees that do not
hold for adopted data are reported.
"""

from __future__ import annotations

from shardkit_tools.adopting.adoption import Adoption, adopt, broken_promises

__all__ = ["Adoption", "adopt", "broken_promises"]
