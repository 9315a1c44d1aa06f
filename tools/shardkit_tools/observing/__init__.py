"""Looking at a run from outside: all of it is read from the run directory."""
