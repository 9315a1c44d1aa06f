"""`shardkit bench`: shardkit beside the limits of the machine it runs on.

Contests are measured in turns and told as ratios. Peers, and what only developers run, are in tools/bench, which uses
this package.
"""
