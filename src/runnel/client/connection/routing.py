"""Routes of topics as brokers gave them, and the links to the nodes in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final, TypeVar

from runnel.client.connection.connection import Buffer
from runnel.client.connection.link import Link, backoff_s
from runnel.client.connection.timers import Deadline, Timers, sleep
from runnel.errors import MalformedError, MovedError, UnknownTopicError
from runnel.formats import wire

_Wanted = TypeVar("_Wanted", bound=wire.Head)

# Routes that are remembered. Beyond it the oldest are dropped, and asked for again when they are needed.
ROUTES_MAX: Final = 200_000
_ROUTES_PER_REQUEST: Final = 1000


class Router:
    """The routes that a client knows, and a link for each address in them."""

    def __init__(self, home: Link, link_to: Callable[[str], Link], timers: Timers) -> None:
        self.home: Final = home
        self.routes: Final[dict[str, wire.Route]] = {}
        self.hinted: Final[set[str]] = set()  # patterns that `warn_of_habits` has checked
        self._link_to = link_to
        self._links: dict[str, Link] = {"": home, home.address: home}
        self._timers = timers

    # --- Links ---

    @property
    def links(self) -> list[Link]:
        return list(dict.fromkeys(self._links.values()))

    def link(self, address: str) -> Link:
        """The link to a node; "" is the node that this client was opened with."""
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = self._link_to(address)
            link.keep_connected()
        return link

    async def close(self) -> None:
        for link in self.links:
            await link.close()

    def abandon(self) -> None:
        for link in self.links:
            link.abandon()

    # --- Routes ---

    def learn(self, routes: Iterable[object]) -> None:
        """Replace known routes with those that a broker gave."""
        for route in routes:
            if not isinstance(route, wire.Route) or not route.owners:
                raise MalformedError("route", f"{route!r:.200} names no owner")
            self.routes.pop(route.topic, None)  # so that the newest are last
            self.routes[route.topic] = route
        for topic in list(islice(self.routes, max(0, len(self.routes) - ROUTES_MAX))):
            del self.routes[topic]

    def forget(self, topics: Iterable[str]) -> None:
        for topic in topics:
            self.routes.pop(topic, None)

    async def resolve(self, topics: Sequence[str], deadline: Deadline) -> None:
        """Ask for the routes of the topics that have no known route."""
        unknown = [topic for topic in dict.fromkeys(topics) if topic not in self.routes]
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
        """Ask the node that owns the partition, as far as is known. After `moved`, ask the next one."""
        moves = 0
        while True:
            try:
                return await self.link_of(topic, partition).ask(
                    kind, make, deadline=deadline, what=what, is_repeatable=is_repeatable, tail=tail
                )
            except MovedError as error:
                self.learn(error.routes)
                # In a cluster that is changing, the new owner may not know it yet.
                pause_s = backoff_s(moves) if moves else 0.0
                if pause_s >= deadline.left_s:
                    raise
                if moves:
                    await sleep(self._timers, pause_s)
                moves += 1
            except UnknownTopicError:
                self.forget([topic])
                raise

    def link_of(self, topic: str, partition: int) -> Link:
        """The link to the node that owns the partition, as far as is known."""
        route = self.routes.get(topic)
        if route is None or partition >= len(route.owners):
            return self.home
        return self.link(route.owners[partition].address)


def _named(topics: Sequence[str]) -> str:
    return repr(topics[0]) if len(topics) == 1 else f"{topics[0]!r} and {len(topics) - 1} more"
