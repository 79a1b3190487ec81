"""Consistent copies of a data directory."""
