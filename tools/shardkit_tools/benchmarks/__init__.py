"""`shardkit bench`, and the measuring that the programs under tools/bench share with it.

machine      on what a benchmark ran
rounds       contests: the limit, shardkit and its peers in turn, round after round
results      ratios and the document that holds them
comparing    a result with an earlier one: what got worse
reading      readers of the same samples (a package)
building     from files to shards
planning     resuming in the middle of an epoch
reducing     gradients over gloo
"""
