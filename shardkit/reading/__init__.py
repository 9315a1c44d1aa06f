"""Verified reads from several locations that may be slow, damaged, overloaded or gone; the block cache.

Only bytes with the right digest are returned. Counters and events report the location of each read and each failure.
This package imports stores and knows nothing of the log: repositories read through it.
"""
