"""Settings for this machine and these stores, each with the measurement behind it (SPEC.md).

Proposals are a pure function of measurements.
"""
