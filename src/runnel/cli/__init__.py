"""The command line: `main.py` finds a command, `commands/` has one module for each, `render/` prints."""

__all__ = ["main"]
