"""Converts messages, options and positions between the .proto's form and the broker's."""

__all__ = ["fields", "messages", "options", "plain", "positions"]
