"""Publishes stored messages again, each once, from an archive, journal files or a broker. Read `job.py` first.

job           the function, and the Spark job that it runs
options       its options
sources       where it reads: an archive, journal files, a broker
plan, planner    which messages there are, decided once; which of them each task sends
rename_rules  the names of topics at the destination
timetable     when each message leaves
sender        what a task does
state         the directory from which a replay can be resumed
progress      how far a replay is

Tasks on executors import `sender` and what it needs, and no Delta library.
"""

__all__ = ["job", "options", "progress"]
