"""A data directory that the last Runnel of format 1 wrote, and what it said of its content."""
