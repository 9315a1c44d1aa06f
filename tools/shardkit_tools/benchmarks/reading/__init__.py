"""Readers of the same samples, ours and the peers', each in a process of its own.

workloads    the samples, made from their number alone
limits       what the machine can do with the same bytes
worker       a reader's process; runs in the peers' environment too, so nothing here imports shardkit_tools
peers        one module per reader
readers      starts such processes and asks them
contests     reading and writing, limits and peers, in turn
"""
