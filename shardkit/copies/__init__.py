"""Copies of a root's objects: what there shall be, what there is, and how one becomes the other (SPEC.md).

`inventory` says what versions need, `placement` where it belongs, `checking` whether it is there and good, `copying`
puts it there. verify, replicate, scrub, repair, place and collections of garbage are uses of these.
"""
