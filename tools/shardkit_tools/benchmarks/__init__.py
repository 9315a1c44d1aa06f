"""`shardkit bench`: shardkit beside the limits of the machine it runs on.

A contest is measured in turns and told as ratios; what belongs to one of its subjects (reading, building, planning,
reducing) is a module of that name. Peers, and what only developers run, are in tools/bench, which uses this package.
"""
