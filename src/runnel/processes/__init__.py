"""Several processes that serve one data directory: a parent, and children that are nodes of a cluster.

`supervisor` decides when children are started, told to end or killed; read it first. `parent` does that, `child` is
what runs in each process.
"""

__all__ = ["child", "directory", "parent"]
