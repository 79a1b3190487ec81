"""Searches for bugs with random seeds, for as long as you like: `bin/soak`, or `python -m tests.soak`."""
