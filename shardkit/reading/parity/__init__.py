"""Parity sets: two parity objects for every k objects, so that any two losses can be repaired (SPEC.md).

The sets are a pure function of the version. Every rebuilt object or block is verified by digest.
"""
