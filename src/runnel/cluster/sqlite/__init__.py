"""Nodes and owners in `cluster.sqlite`.

The file itself and the metadata in it are `runnel.log.metadata.sqlite`. `ClusterDirectory` of `runnel.log.disk` makes
it.
"""

from runnel.cluster.sqlite.sqlite_state import SqliteState

__all__ = ["SqliteState"]
