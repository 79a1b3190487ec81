"""Stored messages published again: from an archive, journal files or a broker into topics, each once.

job        the function, and what it has Spark do
options    what it may be asked
sources    what is read
settling   what it comes to, found out once
planning   what of it each task sends, and into what
renaming   what topics are called where they go
pacing     when each message leaves
sending    what a task does
state      the directory by which a replay can be gone on with
watching   how far it is

Tasks on executors import `sending` and what stands below it, and no Delta library.
"""
