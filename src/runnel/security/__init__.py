"""Tokens, rights by topic pattern, and the authenticator that every listener asks. Read `authenticator.py` first."""

__all__ = ["authenticator", "rights", "tokens"]
