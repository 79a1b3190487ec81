"""Copies of a data directory: `checkpoint.py` makes one while the broker runs, `copies.py` copies and restores."""

__all__ = ["checkpoint", "copies"]
