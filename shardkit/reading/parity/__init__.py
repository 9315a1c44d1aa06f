"""Parity sets: k objects and two more, of which any two may be lost (SPEC.md).

What forms a set is a pure function of the version. Objects are verified before they are used and after they are made.
"""
