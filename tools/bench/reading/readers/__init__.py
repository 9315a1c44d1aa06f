"""Readers: one module each, with two functions.

``build(workload, scale, directory)`` and ``open_reader(workload, scale, directory, workers, **settings)``.

``open_reader`` returns an object with ``epoch()``, an iterator over the main field of each batch. The object may have
``facts``, a dict that describes the reader. Packages are imported inside the functions that use them.
"""
