"""The living nodes of the cluster, for clients that connect to them themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from runnel.formats.wire import NodeState


class ClusterNodes:
    """The nodes as this one knows them. A broker that is alone has none, and clients hear of none."""

    def __init__(self) -> None:
        self.version = 0
        self.nodes: Sequence[NodeState] = ()
        self.listeners: Final[
            dict[Callable[[], None], None]
        ] = {}  # called on the loop after each change

    @property
    def is_several(self) -> bool:
        """Whether this broker is a node of a cluster, even if it is the only one that lives."""
        return bool(self.nodes)

    def changed(self, version: int, nodes: Sequence[NodeState]) -> None:
        """Take over a later state. Says nothing to the listeners if the nodes are the same."""
        if version < self.version:
            return
        is_other = list(nodes) != list(self.nodes)
        self.version, self.nodes = version, tuple(nodes)
        if is_other:
            for listener in list(self.listeners):
                listener()
