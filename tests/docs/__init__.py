"""The documents are run as a reader would: every code block of every page, from top to bottom."""
