"""The log in memory: the same promises as on disk, except that a restart empties it. Read `memory_log.py` first."""

from runnel.log.memory.memory_log import MemoryLog

__all__ = ["MemoryLog"]
