"""Routes of topics as brokers gave them, and the links to the nodes in them.

A client is connected to one node, its home, and to the nodes that its routes name. Home is whichever node answers: one
of those that the client was given, or that it has heard of. What names no partition is asked there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Final, TypeVar

import msgspec

from runnel.client.connection.connection import Buffer
from runnel.client.connection.link import Dial, DialTarget, Link, UnreachableError, backoff_s
from runnel.client.connection.timers import Deadline, Timers, sleep
from runnel.errors import LimitExceededError, MalformedError, MovedError, UnknownTopicError
from runnel.formats import wire

_Wanted = TypeVar("_Wanted", bound=wire.Head)

# Routes that are remembered. Beyond it the oldest are dropped, and asked for again when they are needed.
ROUTES_MAX: Final = 200_000
_ROUTES_PER_REQUEST: Final = 1000
# Links to nodes. Beyond it a link that nothing uses is closed.
LINKS_MAX: Final = 1000


class Router:
    """The routes and nodes that a client knows, and a link for each address in them."""

    def __init__(
        self,
        home: Link,
        link_to: Callable[[str], Link],
        timers: Timers,
        dial_to: Callable[[str], Dial] | None = None,
    ) -> None:
        """`dial_to` lets home connect to other nodes than those that the client was given."""
        self.home: Final = home
        self.routes: Final[dict[str, wire.Route]] = {}
        self.hinted: Final[set[str]] = set()  # patterns that `warn_of_habits` has checked
        self.nodes: Sequence[wire.NodeState] = ()
        """The living nodes, with complete addresses. Empty for a broker that is alone, and until they are known."""
        self._shard_owners: dict[tuple[str, int], str] = {}
        self._nodes_version = 0
        self._watchers: dict[Callable[[], object], None] = {}
        self._link_to = link_to
        self._dial_to = dial_to
        self._given: Final = list(home.endpoints)
        self._links: dict[str, Link] = {"": home}
        self._timers = timers
        home.on_nodes = self._take_nodes
        home.listeners[_RouterListener(self._home_up, _nothing)] = None
        self._ask_nodes()

    # --- Nodes ---

    @property
    def is_several(self) -> bool:
        """Whether the broker has several nodes, which this client connects to itself."""
        welcome = self.home.welcome
        return welcome is not None and {wire.NODES, wire.PARTS}.issubset(welcome.features)

    def node_addresses(self) -> Sequence[str]:
        """The addresses of the living nodes, as `link` takes them. Home alone, if the broker has no others."""
        return [node.address for node in self.nodes] if self.is_several else [""]

    def watch_nodes(self, on_change: Callable[[], object]) -> None:
        """Call this on the loop whenever nodes come or go, or home is connected again."""
        self._watchers[on_change] = None

    def unwatch_nodes(self, on_change: Callable[[], object]) -> None:
        self._watchers.pop(on_change, None)

    def _home_up(self) -> None:
        if not self.is_several:
            self._replace_nodes(())
        self._ask_nodes()
        self._tell()

    def _ask_nodes(self) -> None:
        """Ask home for the nodes. It also says whenever they change."""
        connection = self.home.connection
        if connection is not None and self.is_several:
            self._nodes_version = 0  # another node may count from elsewhere
            number = self.home.next_number()
            connection.request(number, wire.Nodes(number), lambda _answer, _tail: None)

    def _take_nodes(self, answer: wire.NodeList) -> None:
        if not self.is_several or (answer.version < self._nodes_version and not answer.id):
            return
        self._nodes_version = answer.version
        nodes = [
            msgspec.structs.replace(node, address=self._complete(node.address, self.home))
            for node in answer.nodes
        ]
        if nodes != list(self.nodes):
            self._replace_nodes(nodes)
            self._tell()

    def _replace_nodes(self, nodes: Sequence[wire.NodeState]) -> None:
        self.nodes = nodes
        dial_to = self._dial_to
        if dial_to is not None:
            known = {endpoint.address for endpoint in self._given}
            # Draining nodes last: they will end.
            others = sorted(nodes, key=lambda node: node.is_draining)
            learned = [node.address for node in others if node.address not in known]
            self.home.endpoints = [
                *self._given,
                *(DialTarget(address, dial_to(address)) for address in learned),
            ]
        self._drop_links(lambda address: address not in self.node_addresses())

    def _tell(self) -> None:
        for watcher in list(self._watchers):
            watcher()

    # --- Links ---

    @property
    def links(self) -> list[Link]:
        return list(dict.fromkeys(self._links.values()))

    def link(self, address: str) -> Link:
        """The link to a node; "" is home, as is home's address where the broker has no other nodes."""
        if address == self.home.address and not self.is_several:
            return self.home
        link = self._links.get(address)
        if link is None:
            if len(self._links) > LINKS_MAX:
                self._drop_links(lambda _: True)
            if len(self._links) > LINKS_MAX:
                raise LimitExceededError(f"this client is connected to {LINKS_MAX} nodes already")
            link = self._links[address] = self._link_to(address)
            on_loss = partial(self._lost, address)
            link.listeners[_RouterListener(_nothing, on_loss)] = None
            link.keep_connected()
        return link

    def _drop_links(self, is_dropped: Callable[[str], bool]) -> None:
        """Close links that nothing uses."""
        for address, link in list(self._links.items()):
            if link is self.home or not is_dropped(address):
                continue
            if all(isinstance(listener, _RouterListener) for listener in link.listeners):
                del self._links[address]
                link.abandon()
                self._lost(address)

    async def close(self) -> None:
        self._watchers.clear()
        for link in self.links:
            await link.close()

    def abandon(self) -> None:
        for link in self.links:
            link.abandon()

    # --- Routes ---

    def learn(self, routes: Iterable[object], by: Link | None = None) -> None:
        """Replace known routes with those that a broker gave. `by`: the link of the node that gave them."""
        is_several = self.is_several
        for route in routes:
            if not isinstance(route, wire.Route) or not route.owners:
                raise MalformedError("route", f"{route!r:.200} names no owner")
            known = self._with_addresses(route, by or self.home) if is_several else route
            if not route.topic:  # it is about a shard, not about a topic
                self.learn_shards(
                    [(each.journal, each.shard, each.address) for each in known.owners]
                )
                continue
            self.routes.pop(route.topic, None)  # so that the newest are last
            self.routes[route.topic] = known
        for topic in list(islice(self.routes, max(0, len(self.routes) - ROUTES_MAX))):
            del self.routes[topic]

    def learn_shards(self, owners: Iterable[tuple[str, int, str]]) -> None:
        """Replace known owners of shards: journal, number, address."""
        for journal, shard, address in owners:
            self._shard_owners.pop((journal, shard), None)
            self._shard_owners[journal, shard] = self._complete(address, self.home)
        known = self._shard_owners
        for key in list(islice(known, max(0, len(known) - ROUTES_MAX))):
            del known[key]

    def _with_addresses(self, route: wire.Route, by: Link) -> wire.Route:
        owners = [
            msgspec.structs.replace(owner, address=self._complete(owner.address, by))
            for owner in route.owners
        ]
        return msgspec.structs.replace(route, owners=owners)

    def _complete(self, address: str, by: Link) -> str:
        """An address as a node gave it, so that other links may use it: "" is that node, and ":port" is on its host."""
        if address.startswith(":"):
            return f"{by.address.rpartition(':')[0]}{address}"
        if address or by is not self.home:
            return address or by.address
        name = "" if by.welcome is None else by.welcome.node
        return next((node.address for node in self.nodes if node.name == name), "")

    def forget(self, topics: Iterable[str]) -> None:
        for topic in topics:
            self.routes.pop(topic, None)

    def _lost(self, address: str) -> None:
        """The node at this address may have ended: its shards have other owners then."""
        self.forget(
            [
                topic
                for topic, route in self.routes.items()
                if any(owner.address == address for owner in route.owners)
            ]
        )

    async def resolve(
        self, topics: Sequence[str], deadline: Deadline, *, is_afresh: bool = False
    ) -> None:
        """Ask for the routes of the topics that have no known route; afresh: of all of them."""
        unknown = [
            topic for topic in dict.fromkeys(topics) if is_afresh or topic not in self.routes
        ]
        for begin in range(0, len(unknown), _ROUTES_PER_REQUEST):
            asked = unknown[begin : begin + _ROUTES_PER_REQUEST]
            answer, _ = await self.home.ask(
                wire.RouteList,
                lambda number, asked=asked: wire.Routes(number, asked),  # type: ignore[misc]
                deadline=deadline,
                what=f"asking where {_named(asked)} belong",
            )
            self.learn(answer.routes)
            if missing := [topic for topic in asked if topic not in self.routes]:
                raise MalformedError("route_list", f"the broker left out {_named(missing)}")

    async def route(self, topic: str, deadline: Deadline) -> wire.Route:
        if (route := self.routes.get(topic)) is None:
            await self.resolve([topic], deadline)
            route = self.routes[topic]
        return route

    # --- Requests to the owner of a partition ---

    async def ask_owner(
        self,
        kind: type[_Wanted],
        topic: str,
        partition: int,
        make: Callable[[int], wire.Head],
        *,
        deadline: Deadline,
        what: str,
        is_repeatable: bool = True,
        tail: Sequence[Buffer] = (),
    ) -> tuple[_Wanted, memoryview]:
        """Ask the node that owns the partition, as far as is known. After a move or a loss, ask the next."""
        moves = 0
        while True:
            link = self.link_of(topic, partition)
            try:
                return await link.ask(
                    kind,
                    make,
                    deadline=deadline,
                    what=what,
                    is_repeatable=is_repeatable,
                    tail=tail,
                    is_patient=link is self.home,
                )
            except MovedError as error:
                self.learn(error.routes, link)
                # In a cluster that is changing, the new owner may not know it yet.
                pause_s = backoff_s(moves) if moves else 0.0
                if pause_s >= deadline.left_s:
                    raise
            except UnreachableError:
                self.forget([topic])
                pause_s = backoff_s(moves) if moves else 0.0
                if pause_s >= deadline.left_s:
                    raise link.expired(what, deadline) from None
            except UnknownTopicError:
                self.forget([topic])
                raise
            if moves:
                await sleep(self._timers, pause_s)
            moves += 1

    async def ask_shard(
        self,
        kind: type[_Wanted],
        journal: str,
        shard: int,
        make: Callable[[int], wire.Head],
        *,
        deadline: Deadline,
        what: str,
    ) -> tuple[_Wanted, memoryview]:
        """Ask the node that owns the shard, as far as is known, for what may be repeated."""
        attempt = 0
        while True:
            link = self.link(self._shard_owners.get((journal, shard), ""))
            try:
                return await link.ask(
                    kind, make, deadline=deadline, what=what, is_patient=link is self.home
                )
            except MovedError as error:
                self.learn(error.routes, link)
                attempt += 1
                pause_s = backoff_s(attempt)
                if pause_s >= deadline.left_s:
                    raise
            except UnreachableError:
                self._shard_owners.pop((journal, shard), None)
                attempt += 1
                pause_s = backoff_s(attempt)
                if pause_s >= deadline.left_s:
                    raise link.expired(what, deadline) from None
            if attempt > 1 or link is self.link(self._shard_owners.get((journal, shard), "")):
                await sleep(self._timers, pause_s)

    def link_of(self, topic: str, partition: int) -> Link:
        """The link to the node that owns the partition, as far as is known."""
        route = self.routes.get(topic)
        if route is None or partition >= len(route.owners):
            return self.home
        return self.link(route.owners[partition].address)


class _RouterListener:
    """Tells a router that a link of it is connected, or has lost its connection."""

    def __init__(self, on_up: Callable[[], object], on_down: Callable[[], object]) -> None:
        self._on_up = on_up
        self._on_down = on_down

    def link_up(self) -> None:
        self._on_up()

    def link_down(self) -> None:
        self._on_down()

    def link_writable(self) -> None:
        """Does nothing: this listener writes nothing."""


def _nothing() -> None:
    """Is the callback where nothing follows."""


def _named(topics: Sequence[str]) -> str:
    return repr(topics[0]) if len(topics) == 1 else f"{topics[0]!r} and {len(topics) - 1} more"
