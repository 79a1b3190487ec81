"""The publisher: messages come in without waiting, gather, and leave as batches, one line a shard."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final, Self

from runnel.client.gathering import Rows, codec_of
from runnel.client.intake import Intake
from runnel.client.line import Haste, ShardKey, ShardLine, Terms
from runnel.client.link import Link
from runnel.client.results import Receipt
from runnel.client.routing import Router
from runnel.client.timers import Deadline, Timers
from runnel.errors import (
    BusyError,
    ClientFault,
    ClosedError,
    LimitExceededError,
    RunnelError,
    Unavailable,
)
from runnel.formats import wire
from runnel.formats.envelope import RUNS_MAX
from runnel.topics.habits import level_meant
from runnel.topics.partitions import KeylessTurns, partition_of_key, partitions_of_keys

# Unless somebody says otherwise. A quarter of it had four fifths of the rate from one to one (bench/live.py).
BATCH_MESSAGES_MAX: Final = 4000
BATCH_BYTES_MAX: Final = 2**20

LEVELS: Final = ("stored", "received", "none")
# `send` refuses when the buffer is exceeded by this factor: a loop that never waits is told.
_PATIENCE: Final = 2
# An enum's member takes several times as long to look up.
_NONE: Final = Haste.NONE
_USUAL: Final = Haste.USUAL


class _Spread:
    """A topic of several partitions: a line for each, and whose turn it is for messages without a key."""

    __slots__ = ("lines", "turns")

    def __init__(self, lines: list[ShardLine], begin: int) -> None:
        self.lines = lines
        self.turns = KeylessTurns(len(lines), begin=begin)


class Publisher(Intake):
    """Publishes many messages. `send` never waits; `ready` waits for room; `flush` for acknowledgements.

    Use it in an `async with`, which flushes at its end.
    """

    def __init__(
        self,
        router: Router,
        timers: Timers,
        topic: str | None = None,
        *,
        name: str | None = None,
        level: str | None = None,
        batch_messages_max: int = BATCH_MESSAGES_MAX,
        batch_bytes_max: int = BATCH_BYTES_MAX,
        linger_ms: float = 2,
        buffer_bytes_max: int = 16 * 2**20,
        compression: str | None = None,
        deadline_s: float | None = 30,
        on_close: Callable[[Publisher], object] | None = None,
        on_room: Callable[[], object] | None = None,
    ) -> None:
        if not 1 <= batch_messages_max <= RUNS_MAX:
            raise ClientFault(f"batch_messages_max is {batch_messages_max}: 1 to {RUNS_MAX}")
        if batch_bytes_max < 1 or buffer_bytes_max < 1 or linger_ms < 0:
            raise ClientFault("batch_bytes_max and buffer_bytes_max begin at 1, linger_ms at 0")
        self.intake_bytes_max: Final = min(batch_bytes_max, buffer_bytes_max)
        super().__init__(
            topic,
            timers.time_ns,
            intake_messages=batch_messages_max,
            intake_bytes_max=self.intake_bytes_max,
        )
        self._terms = Terms(
            name=name,
            term=0,
            level=_level_of(level, name),
            batch_messages_max=batch_messages_max,
            batch_bytes_max=batch_bytes_max,
            linger_s=linger_ms / 1000,
            deadline_s=deadline_s,
            codec=codec_of(compression),
        )
        self.batches_under_way = 0
        self.buffer_bytes_max: Final = buffer_bytes_max
        self._router = router
        self._timers = timers
        self._loop = asyncio.get_running_loop()
        self._on_close = on_close
        self._on_room = on_room
        self._is_open = name is None
        self._is_waking = False
        self._has_handed_over = False
        self._buffered_bytes = 0
        self._generation = 0
        self._unsettled: dict[int, int] = {}  # messages by generation
        self._flushing: dict[asyncio.Future[None], int] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._lines: dict[ShardKey, ShardLine] = {}
        self._plain: dict[str, ShardLine] = {}  # topics of one partition
        self._spread: dict[str, _Spread] = {}  # the others
        self._unrouted: deque[Rows] = deque()
        self._routing: asyncio.Task[None] | None = None
        self._failure: RunnelError | None = None  # the first since the last flush
        self._failures = 0
        self._end: RunnelError | None = None  # nothing can be sent any more

    def __repr__(self) -> str:
        name = f" {self._terms.name!r}" if self._terms.name is not None else ""
        return f"<Publisher{name} to {self._topic or 'any topic'}, {self._buffered_bytes} bytes under way>"

    @property
    def buffered_bytes(self) -> int:
        """What has been handed over and is not acknowledged."""
        return self._buffered_bytes

    @property
    def now_ns(self) -> Callable[[], int]:
        return self._timers.time_ns

    @property
    def batch_messages_max(self) -> int:
        return self._terms.batch_messages_max

    @property
    def is_ended(self) -> bool:
        return self._end is not None

    def check_open(self) -> None:
        """Raise why nothing can be sent, if that is so."""
        if self._end is not None:
            raise self._end.with_traceback(None)
        if not self._is_open:
            raise ClientFault("a named publisher is used in an `async with`, which gets its term")

    # --- Opening and closing ---

    async def open(self) -> None:
        """A named publisher gets its term, which ends whoever published under this name before."""
        name = self._terms.name
        if self._is_open or name is None:
            return
        answer, _ = await self._router.home.ask(
            wire.Term,
            lambda number: wire.Producer(number, name),
            deadline=Deadline(self._timers, self._terms.deadline_s),
            what=f"opening publisher {name!r}",
        )
        terms = {field: getattr(self._terms, field) for field in Terms.__struct_fields__}
        self._terms = Terms(**(terms | {"term": answer.term}))
        self._is_open = True

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, RunnelError):
            await self.close()
        else:  # its own trouble comes first: send what is there, and do not wait
            self._hand_over(Haste.FLUSH)
            self.end(ClosedError("the publisher was left with an error"))

    async def close(self) -> None:
        """Flush, and take nothing more. Raises what flush raises."""
        if self._end is None:
            try:
                await self.flush()
            finally:
                self.end(ClosedError("the publisher has been closed"))
        elif not isinstance(self._end, ClosedError):
            self._raise_failure()

    def end(self, error: RunnelError) -> None:
        """Give up what is not acknowledged, and refuse everything from here on."""
        if self._end is not None:
            return
        self._end = error
        if rows := self._take():
            self._count_in(rows)
            self.settled(rows, error)
        self._room_bytes = 0
        if self._routing is not None:
            self._routing.cancel()
        while self._unrouted:
            self.settled(self._unrouted.popleft(), error)
        for line in self._lines.values():
            line.close(error)
        self._wake_waiting()
        if self._on_room is not None:
            self._on_room()
        if self._on_close is not None:
            self._on_close(self)

    # --- Sending ---

    def submit(
        self,
        payload: bytes,
        topic: str | None = None,
        key: bytes | None = None,
        tags: Mapping[str, str] | None = None,
        event_time_ns: int | None = None,
        partition_key: bytes | None = None,
        uid: bytes | None = None,
    ) -> asyncio.Future[Receipt]:
        """The same as `send`, with a future of where the message is stored."""
        self.send(payload, topic, key, tags, event_time_ns, partition_key, uid)
        future: asyncio.Future[Receipt] = self._loop.create_future()
        self._rows.futures[len(self._payloads) - 1] = future
        return future

    async def ready(self) -> None:
        """Wait until the buffer has room. Lets others run now and then, also while there is room."""
        if self._has_handed_over:
            self._has_handed_over = False
            await asyncio.sleep(0)
        while self._end is None and self._buffered_bytes > self.buffer_bytes_max:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
        self.check_open()

    async def flush(self) -> None:
        """Wait until everything sent so far is acknowledged. Raises the first failure since the last flush.

        At level none: until the broker has it.
        """
        self._hand_over(Haste.FLUSH)
        generation = self._generation
        self._generation += 1
        if self._unsettled:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._flushing[waiter] = generation
            try:
                await waiter
            finally:
                self._flushing.pop(waiter, None)
        if self._terms.level == "none" and self._end is None:
            await self._reach_brokers()
        self._raise_failure()

    async def _reach_brokers(self) -> None:
        """Frames are taken in order: who answers a ping has everything before it, and has refused what it will."""
        deadline = Deadline(self._timers, self._terms.deadline_s)
        links: dict[Link, None] = dict.fromkeys(line.link for line in self._lines.values())
        for link in links:
            await link.ask(wire.Pong, wire.Ping, deadline=deadline, what="flushing")

    def _raise_failure(self) -> None:
        failure, count = self._failure, self._failures
        self._failure, self._failures = None, 0
        if failure is not None:
            if count > 1:
                failure.add_note(
                    f"{count} batches were not published; this is why the first was not"
                )
            raise failure.with_traceback(None)

    # --- From intake to lines ---

    def _make_room(self) -> None:
        if self._end is not None or not self._is_open:
            self.check_open()
        if self._payloads:
            self._hand_over(_NONE)
        if self._buffered_bytes > _PATIENCE * self.buffer_bytes_max:
            raise BusyError(
                f"{self._buffered_bytes} bytes are not acknowledged, where the buffer is to hold "
                f"{self.buffer_bytes_max}: await publisher.ready() between sends"
            )
        self._open()
        if not self._is_waking:
            self._is_waking = True
            self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        """The end of a wake-up in which something was sent."""
        self._is_waking = False
        self._hand_over(_USUAL)

    def _hand_over(self, haste: Haste) -> None:
        rows = self._take()
        if rows is not None:
            self._has_handed_over = haste is _NONE
            self.accept(rows, haste)
        elif haste is not _NONE:
            self._pump(haste)

    def accept(self, rows: Rows, haste: Haste = Haste.USUAL) -> None:
        """Rows that were gathered here, or in another thread."""
        self._count_in(rows)
        if self._end is not None:
            self.settled(rows, self._end)
            return
        welcome = self._router.home.welcome
        if welcome is not None and rows.size > welcome.message_bytes_max:
            rows = self._without_oversize(rows, welcome.message_bytes_max)
        if rows.payloads:
            if self._unrouted or not self._distribute(rows):
                self._wait_for_routes(rows)
            self._pump(haste)

    def _count_in(self, rows: Rows) -> None:
        generation = rows.generation = self._generation
        self._unsettled[generation] = self._unsettled.get(generation, 0) + len(rows.payloads)
        self._buffered_bytes += rows.size

    def _without_oversize(self, rows: Rows, message_bytes_max: int) -> Rows:
        """Refuse messages that are too large by themselves, rather than with their whole batch."""
        large = [
            row for row, payload in enumerate(rows.payloads) if len(payload) > message_bytes_max
        ]
        if not large:
            return rows
        refused = rows.select(large)
        kept = rows.select(sorted(set(range(len(rows))).difference(large)))
        error = LimitExceededError(
            f"a payload of {max(map(len, refused.payloads))} bytes; the broker takes "
            f"{message_bytes_max} in one message"
        )
        self.settled(refused, error)
        return kept

    def _pump(self, haste: Haste) -> None:
        for line in self._lines.values():
            line.pump(haste)

    def _distribute(self, rows: Rows) -> bool:
        """Put rows into the lines of their shards. False if the route of a topic is not known yet."""
        if not rows.topics and self._topic is not None:
            if line := self._plain.get(self._topic):
                line.add(rows)
                return True
            if spread := self._spread.get(self._topic):
                self._distribute_spread(rows, spread)
                return True
            return False
        rows.name_all()
        lines = set(map(self._plain.get, rows.topics))
        if None not in lines and len(lines) == 1:
            for line in lines:
                assert line is not None
                line.add(rows)
            return True
        if any(t not in self._plain and t not in self._spread for t in rows.distinct_topics()):
            return False
        self._distribute_mixed(rows)
        return True

    def _distribute_spread(self, rows: Rows, spread: _Spread) -> None:
        """Rows of one topic with several partitions."""
        keyless = spread.turns.current
        spread.turns.next_batch()
        if rows.keys or rows.partition_keys:
            keys = {**rows.keys, **rows.partition_keys}
            wanted = map(keys.get, range(len(rows)))
            rows.partitions = partitions_of_keys(wanted, len(spread.lines), keyless=keyless)
        else:
            rows.partitions = [keyless] * len(rows)
        self._add_by_line(rows, [spread.lines[partition] for partition in rows.partitions])

    def _distribute_mixed(self, rows: Rows) -> None:
        """Rows of topics in several shards, or of several partitions."""
        keyless = {
            topic: spread.turns.next_batch()
            for topic in rows.distinct_topics()
            if (spread := self._spread.get(topic))
        }
        partitions = [0] * len(rows)
        lines: list[ShardLine] = []
        for row, topic in enumerate(rows.topics):
            if line := self._plain.get(topic):
                lines.append(line)
                continue
            spread = self._spread[topic]
            key = rows.partition_keys.get(row, rows.keys.get(row))
            if key is None:
                partition = keyless[topic]
            else:
                partition = partition_of_key(key, len(spread.lines))
            partitions[row] = partition
            lines.append(spread.lines[partition])
        rows.partitions = partitions
        self._add_by_line(rows, lines)

    def _add_by_line(self, rows: Rows, lines: list[ShardLine]) -> None:
        if lines.count(lines[0]) == len(lines):
            lines[0].add(rows)
            return
        by_line: dict[ShardLine, list[int]] = {}
        for row, line in enumerate(lines):
            by_line.setdefault(line, []).append(row)
        for line, chosen in by_line.items():
            line.add(rows.select(chosen))

    # --- Routes ---

    def _wait_for_routes(self, rows: Rows) -> None:
        """Rows of unknown topics wait, and everything behind them too, so that the order holds."""
        self._unrouted.append(rows)
        if self._routing is None:
            self._routing = self._loop.create_task(self._find_routes(), name="runnel routes")

    async def _find_routes(self) -> None:
        deadline = Deadline(self._timers, self._terms.deadline_s)
        try:
            while self._unrouted and self._end is None:
                topics = list(
                    dict.fromkeys(t for rows in self._unrouted for t in rows.distinct_topics())
                )
                try:
                    await self._router.resolve(topics, deadline)
                except RunnelError as error:
                    for _ in range(len(self._unrouted)):
                        self.settled(self._unrouted.popleft(), error)
                    continue
                self._take_routes(topics)
                while self._unrouted and self._distribute(self._unrouted[0]):
                    self._unrouted.popleft()
                self._pump(Haste.USUAL if not self._flushing else Haste.FLUSH)
        finally:
            self._routing = None

    def _take_routes(self, topics: list[str]) -> None:
        for topic in topics:
            route = self._router.routes.get(topic)
            if route is None or topic in self._plain or topic in self._spread:
                continue
            lines = [self._line(route.keep, owner) for owner in route.owners]
            if len(lines) == 1:
                self._plain[topic] = lines[0]
            else:
                # Publishers begin at different partitions, or all would fill the same one.
                self._spread[topic] = _Spread(lines, begin=id(self) >> 4)

    def _line(self, keep: str, owner: wire.Owner) -> ShardLine:
        key = ShardKey(keep, owner.journal, owner.shard)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = ShardLine(
                key, owner.address, self._router, self, self._terms, self._timers
            )
        return line

    # --- What lines tell ---

    def settled(self, rows: Rows, error: RunnelError | None) -> None:
        """These messages are acknowledged, or never will be."""
        self._buffered_bytes -= rows.size
        if error is not None:
            if rows.fail(error):
                self.refused_late(error)
            if not isinstance(error, Unavailable):
                for topic in rows.distinct_topics():  # perhaps its route is no longer right
                    self._plain.pop(topic, None)
                    self._spread.pop(topic, None)
        left = self._unsettled[rows.generation] - len(rows.payloads)
        if left:
            self._unsettled[rows.generation] = left
        else:
            del self._unsettled[rows.generation]
            if self._flushing:
                self._wake_flushing()
        if self._buffered_bytes <= self.buffer_bytes_max:
            if self._waiting:
                self._wake_waiting()
            if self._on_room is not None:
                self._on_room()

    def refused_late(self, error: RunnelError) -> None:
        """A failure that nobody waits for: the next flush tells of it."""
        self._failure = self._failure or error
        self._failures += 1

    def batch_answered(self) -> None:
        if self._buffered_bytes:  # otherwise nothing waits in any line
            self._pump(_USUAL)

    def line_broken(self, error: RunnelError) -> None:
        """A named publisher whose sequence cannot go on."""
        error.add_note(f"publisher {self._terms.name!r} has ended; open it again to go on")
        self.end(error)

    def _wake_flushing(self) -> None:
        oldest = min(self._unsettled, default=None)
        for waiter, generation in self._flushing.items():
            if not waiter.done() and (oldest is None or oldest > generation):
                waiter.set_result(None)

    def _wake_waiting(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)


def checked_level(level: str | None) -> str | None:
    if level is not None and level not in LEVELS:
        meant = level_meant(level)
        raise ClientFault(
            f"level {level!r} is unknown: {', '.join(LEVELS)}, or None for the topic's own"
            + ("" if meant is None else f"; did you mean {meant!r}?")
        )
    return level


def _level_of(level: str | None, name: str | None) -> str | None:
    if name is None:
        return checked_level(level)
    if level not in (None, "stored"):
        raise ClientFault(f"a named publisher always has its batches stored, not {level!r}")
    return "stored"
