"""A cluster that is not here: what a plan would read, wait for and cost on it (SPEC.md).

- ``cluster``, ``quantities``: the description, from TOML; changes to it.
- ``populations``: the rows, from a manifest or made up.
- ``demand``, ``caching``: which blocks each rank needs, and where they come from.
- ``full_shuffle``: the same for the usual way.
- ``reduction``, ``faults``, ``moves``, ``timing``: how long steps take.
- ``costs``, ``run``, ``drawing``: what it all comes to.
"""
