"""Simulate a plan on a described cluster: reads, waiting times and costs (SPEC.md).

Planning, assignment, rebalancing and cache eviction run the product's code. Time, stores and links are modelled. No
shard is read.
"""
