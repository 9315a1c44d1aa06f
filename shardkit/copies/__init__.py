"""Copies of a root's objects: where they belong, and commands that check, make, repair and delete them (SPEC.md).

`reading.inventory` lists the objects that versions need, and `placement` the locations that each belongs in.
`reading.objects` checks and copies objects. verify, replicate, scrub, repair, place and gc are built on these.
"""
