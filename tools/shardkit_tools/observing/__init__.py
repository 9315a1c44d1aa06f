"""Observe a run from outside the trainer. All data are read from the run directory."""
