"""Tokens, rights by topic pattern, and the authenticator that every listener asks."""
