"""`cluster.sqlite`: what several brokers of a data directory know together. Read `schema.py` first, then `database.py`.

It lies in the log, though most of its tables are about nodes: once it exists it has the metadata of the directory, also
for a single broker and for readers without one. `runnel.cluster.sqlite` has the other half, over the same connection.
"""

__all__ = ["conversion", "database", "offline", "sqlite_metadata"]
