"""What a root holds: its layout, the log of commits that names versions, and the deletion of garbage.

A version exists once the log names it. SPEC.md states the layout, the order of writes, and what is promised when. This
package imports `shardkit.reading`, through whose locations it reads. Making copies is `shardkit.copies`' business.
"""
