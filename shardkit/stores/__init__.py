"""Where bytes lie: the `Store` protocol, and folders, buckets and fsspec behind it.

A store holds immutable objects by name and knows nothing of what they mean. Files are read and written through
`file_operations` alone. Imports nothing of shardkit but errors, formats and manifest.
"""
