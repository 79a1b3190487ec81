"""Pages of docs/reference that are written from the code: each module gives one page, as text.

`python -m tools.reference` writes them all; tests/test_reference.py says when that is due.
"""
