"""One module per reader, with two functions.

``build(workload, scale, directory)`` and ``open_reader(workload, scale, directory, workers, **settings)``.

What ``open_reader`` returns has ``epoch()``, an iterator over the main field of each batch, and may have ``facts``,
a dict of what it says of itself. The packages are imported where they are used.
"""
