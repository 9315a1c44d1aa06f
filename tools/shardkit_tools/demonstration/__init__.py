"""`shardkit demo`: the whole of shardkit on data that every machine has.

stdlib_text  — the standard library's own source text as samples with their top-level package
narration    — how the demo speaks: headings, commands as typed, their output
chapters     — what it shows, in order
"""
