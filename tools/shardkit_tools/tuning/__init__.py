"""Settings for this machine and these stores, each with the measurement behind it (SPEC.md).

- ``measuring``, ``ranges``: the disk, memory, checksums; the ranges of a store; the all-reduce.
- ``proposing``: from measurements to settings; pure.
- ``applying``: settings into a TOML file, comments kept.
"""
