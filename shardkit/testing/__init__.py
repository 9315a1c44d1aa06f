"""Conformance suites for stores and formats, models to test against, and faults on demand; for tests, yours included.

store_conformance, format_conformance   what every store and every format must keep
format_hostile                          shards that lie
memory_store                            a perfect store in memory;  shard_tables, populations: datasets made up
plan_model                              the plan by brute force
block_sources                           blocks that hold nothing
crash_states, faulty_operations         every state that a power cut may leave; calls that fail
fault_proxy, servers, google_server     a network that misbehaves; object stores on this machine
telemetry_series                        records of runs that never were
drills                                  how often long drills repeat
"""
