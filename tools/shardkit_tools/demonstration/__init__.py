"""`shardkit demo`: the whole of shardkit on data that every machine has.

Commands run as they are typed, and what they print is what is shown.
"""
