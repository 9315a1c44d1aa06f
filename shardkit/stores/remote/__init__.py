"""Stores beyond the local disk.

Clients are made per process and make one attempt of each request; repeating, pausing and settling lost answers is
done above them. URLs that hold a credential are refused, and no message holds one. Packages of others are imported
where they are used.
"""
