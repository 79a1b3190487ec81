"""Decides which messages may be removed, and rewrites segments without them."""
