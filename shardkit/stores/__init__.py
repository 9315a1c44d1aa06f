"""Storage of immutable objects: the `Store` protocol, implemented for folders, buckets and fsspec file systems.

A store holds objects by name and does not interpret them. Local stores access files through `file_operations` only.
"""
