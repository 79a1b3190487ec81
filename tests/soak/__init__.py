"""Looking for faults for as long as one likes: `python -m tests.soak`, or `bin/soak`."""
