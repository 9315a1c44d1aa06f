"""Remote stores: buckets and fsspec file systems.

Clients are created per process and make one attempt per request. The layer above them retries, pauses and resolves
lost answers. URLs with credentials are refused, and no message contains one. Third-party packages are imported late.
"""
