"""Copies of a root's objects: what there shall be, what there is, and how one becomes the other (SPEC.md).

`reading.inventory` says what versions need, `placement` where it belongs; `reading.objects` checks whether
it is there and good, and copies it. verify, replicate, scrub, repair, place and collections of garbage use these.
"""
