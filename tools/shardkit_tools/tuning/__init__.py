"""Propose settings for a machine and its stores, each with the measurement that supports it (SPEC.md).

Proposals are a pure function of the measurements.
"""
