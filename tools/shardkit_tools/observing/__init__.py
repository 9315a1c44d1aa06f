"""Looking at a run from outside: all of it is read from the run directory.

run_view      — a run's directory as one document
events_text   — an event as a line for people
terminal      — the view of `shardkit top`
web           — the server of `shardkit dashboard`; page/ holds what it serves
archive       — the post-mortem archive of `shardkit report`
outage        — what stalls and detours cost
rehearsal     — what would happen if a node died
"""
