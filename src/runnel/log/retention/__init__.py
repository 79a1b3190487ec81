"""Decides which messages may be removed, and rewrites segments without them. Read `rules.py` first."""

__all__ = ["acked", "holds", "rewriter", "rules"]
