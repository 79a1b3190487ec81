"""The load of `runnel bench`: its processes, clients, messages and report.

`processes.py` starts the processes, `load.py` is the program of each, `plan.py` is what they tell each other.
"""

__all__ = ["payload", "plan", "processes", "report"]
