"""Conformance tests for stores: every implementation must pass them before it is used.

To test a store, subclass `StoreConformance` and define `new_store`. `memory_store` is an in-memory model to compare
with. Servers, faults and models that only the tests of shardkit use are in `tests`.
"""
