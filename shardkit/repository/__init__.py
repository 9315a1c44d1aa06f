"""What a root holds: its layout, the log of commits that names versions, and collecting what nothing names.

A version exists once the log names it. SPEC.md says the layout, the order of writes, and what is promised when.
"""
