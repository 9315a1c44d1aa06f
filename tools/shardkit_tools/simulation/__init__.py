"""A cluster that is not here: what a plan would read, wait for and cost on it (SPEC.md).

Planner, assignment, rebalancing and the cache's decisions are the product's own; time, stores and links are models.
No shard is read.
"""
