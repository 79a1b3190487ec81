"""The links of one relayed stream to all nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from runnel.client.connection import Link
from runnel.formats import wire
from runnel.relay.peers import Peer
from runnel.relay.relays import Relays


class RelayedLinks:
    """The nodes for the parts of one subscription or consumer, with the caller's token: as `Router` for a client."""

    def __init__(self, relays: Relays, token: str | None) -> None:
        self._relays = relays
        self._token = token
        self._peers: dict[str, Peer] = {}
        self.hinted: Final[set[str]] = set()

    is_several: Final = True

    @property
    def nodes(self) -> Sequence[wire.NodeState]:
        return [
            wire.NodeState(node.name, node.address, node.incarnation)
            for node in self._relays.node.nodes
        ]

    @property
    def home(self) -> Link:
        """The link to this node: its own shards are read over a link, too."""
        return self.link(self._relays.node.address)

    def learn(self, routes: Sequence[object], link: Link) -> None:
        """Nothing to do: each part stays with its node."""

    def node_addresses(self) -> Sequence[str]:
        return [node.address for node in self._relays.node.nodes]

    def watch_nodes(self, on_change: Callable[[], object]) -> None:
        self._relays.watchers[on_change] = None

    def unwatch_nodes(self, on_change: Callable[[], object]) -> None:
        self._relays.watchers.pop(on_change, None)

    def link(self, address: str) -> Link:
        peer = self._peers.get(address)
        if peer is None or peer.link.is_ended:
            if peer is not None:
                peer.leave_stream()
            peer = self._peers[address] = self._relays.peers.for_streams(self._token, address)
            peer.enter_stream()
        return peer.link

    def close(self) -> None:
        for peer in self._peers.values():
            peer.leave_stream()
        self._peers.clear()
