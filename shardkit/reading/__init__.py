"""Verified blocks from one or more locations, of which any may be slow, wrong, overloaded or gone; and their cache.

Only bytes whose digest is right are handed on; which location gave them, and what went wrong, is told as counters and
events. Imports stores; a repository reads through it, so nothing here knows a log.
"""
