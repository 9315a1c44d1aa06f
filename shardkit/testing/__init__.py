"""The conformance suite of stores: what a new one must pass before it is used.

A test class that inherits `StoreConformance` and says what to test is the whole of it. `memory_store` is a perfect
store to test against. Servers, faults and models that only shardkit's own tests use are in `tests`.
"""
