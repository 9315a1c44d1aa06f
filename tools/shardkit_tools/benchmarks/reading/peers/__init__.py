"""One module per reader, with two functions.

``build(workload, scale, directory)`` and ``open_reader(workload, scale, directory, workers)``.

What ``open_reader`` returns has ``epoch()``, an iterator over the main field of each batch. One that can resume has
also ``position(steps)``, where it stands after as many batches as the iterable `steps` lasts (it ends early where a
reader is slow; one that can compute the position takes that of half an epoch), and ``resume(position)``, an iterator
from there on.

The packages are imported where they are used; ``TORCH = False`` says that torch is none of them in one process.
"""
