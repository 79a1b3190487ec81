"""The order of events: publishers and readers start, a worker and the broker are killed, and all is counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import runnel
from examples.demo.board import Board
from examples.demo.cast import Cast
from examples.demo.child import DemoFailedError
from examples.demo.counting import count_archive, count_windows
from examples.demo.dashboard import Dashboard
from examples.demo.evidence import Evidence, Times, WorkFound
from examples.demo.invoices import count_work
from examples.demo.stations import PATIENCE_S, Stations
from examples.demo.world import BILLING, INVOICES, ORDERS, STATIONS, OrderSource, many
from runnel.client import Bus
from runnel.formats.dead_letters import OFFSET_TAG, TOPIC_TAG

_DELIVERIES_MAX: Final = 6
_RETRY_DELAY_S: Final = 0.3
_SWITCH_ON_S: Final = 1.0  # the dashboard: late, so that there are last known values
_AWAY_S: Final = 0.7
_SPARK_READY_MAX_S: Final = 40.0
_SPARK_MAX_S: Final = 150.0
_WORK_MAX_S: Final = 60.0
_READ_MAX_S: Final = 30.0
_LOOK_EVERY_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class StoryPlan:
    """The size of a run, and its directory."""

    directory: Path
    seconds: float  # the least duration; half of it is before the kill
    readings_per_s: int
    stays: bool = False  # the broker and its clients stay up after the count


@dataclass(frozen=True, slots=True)
class Troubles:
    """The kills of a run."""

    worker_killed_at_s: float
    in_hand: int  # orders that the worker had
    broker_killed_at_s: float
    archived: int  # messages, until then
    away_s: float
    waited: int  # readings, for the broker to come back


class Story:
    """`run` plays it from beginning to end. When it returns, no process is left."""

    def __init__(self, plan: StoryPlan, board: Board) -> None:
        self._plan = plan
        self._board = board
        self._stations = Stations(plan.readings_per_s)
        self._dashboard = Dashboard(board)
        self._cast: Cast

    async def run(self, when_proven: Callable[[Evidence], None]) -> None:
        """Run it. Raises DemoFailedError if a process fails for good."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._cast = Cast(self._plan.directory, self._board, tasks)
                try:
                    await self._tell(when_proven)
                finally:
                    await self._cast.end()
        except BaseExceptionGroup as several:
            raise _first(several) from None

    async def _tell(self, when_proven: Callable[[Evidence], None]) -> None:
        board, cast = self._board, self._cast
        seconds = await cast.start_broker()
        board.say(
            f"the broker is up after {seconds:.1f} s, with all its defaults and three listeners"
        )
        await cast.start_pipeline()
        url = cast.broker.native_url
        async with (
            runnel.connect(url, name="gateways", deadline_s=PATIENCE_S) as sending,
            runnel.connect(url, name="dashboard", deadline_s=PATIENCE_S) as bus,
            asyncio.TaskGroup() as tasks,
        ):
            stop = asyncio.Event()
            begun = time.perf_counter()
            publishing = tasks.create_task(self._stations.run(sending, board, stop))
            victim = await self._populate(bus)
            watching = tasks.create_task(self._dashboard.run(bus))
            troubles = await self._make_trouble(victim)
            await asyncio.sleep(self._plan.seconds / 2)
            stop.set()
            await publishing
            publishing_s = time.perf_counter() - begun
            stored, left = await self._come_to_rest(bus)
            work = await self._look_at_work(bus, left)
            exit_code = None
            if not self._plan.stays:
                watching.cancel()
                exit_code = await cast.stop_broker()
            when_proven(await self._gather(stored, work, troubles, publishing_s, exit_code))
            if self._plan.stays:
                await self._stay(sending)

    # --- The world, and its troubles ---

    async def _populate(self, bus: Bus) -> str:
        """Start shops and workers. Returns the name of the worker that will be killed."""
        board, cast = self._board, self._cast
        board.phase = "the world is running"
        await bus.make_subscription(
            BILLING,
            ORDERS,
            deliveries_max=_DELIVERIES_MAX,
            retry_delay_s=_RETRY_DELAY_S,
            backoff=1.0,
        )
        victim = await cast.hire()
        await cast.hire()
        await cast.start_shop(OrderSource.WEB, 1)
        await cast.start_shop(OrderSource.PARTNER, 1)
        await asyncio.sleep(_SWITCH_ON_S)
        board.say(
            f"{len(STATIONS)} stations, 2 shops and 2 workers are at it; a dashboard is switched on"
        )
        return victim

    async def _make_trouble(self, victim: str) -> Troubles:
        """A worker dies after a quarter of the time, and the broker after half of it."""
        quarter_s = self._plan.seconds / 4
        await asyncio.sleep(quarter_s)
        worker_killed_at_s, in_hand = await self._kill_worker(victim)
        await asyncio.sleep(quarter_s)
        await self._wait_archive()
        broker_killed_at_s, archived = self._board.seconds, self._board.pipeline.archived
        away_s, waited = await self._kill_broker()
        return Troubles(worker_killed_at_s, in_hand, broker_killed_at_s, archived, away_s, waited)

    async def _kill_worker(self, name: str) -> tuple[float, int]:
        """Kill the worker. Returns when, and how many orders it had in hand."""
        board = self._board
        await self._until(
            lambda: board.workers[name].invoiced > 0, f"{name} to have done something"
        )
        in_hand, at_s = await self._cast.kill_worker(name), board.seconds
        successor = await self._cast.hire()
        board.say(
            f"{name} was killed with {many(in_hand, 'order')} in hand; {successor} takes over",
            is_trouble=True,
        )
        return at_s, in_hand

    async def _wait_archive(self) -> None:
        """Wait until Spark works, because it should when the broker is killed; but not for ever on a busy machine."""
        board = self._board
        board.phase = "the world is running, Spark is getting ready"
        try:
            await self._until(
                lambda: board.pipeline.archived > 0, "Spark to archive", _SPARK_READY_MAX_S
            )
        except DemoFailedError:
            board.say("Spark is slow to start, and will find what it has missed")
        else:
            board.say(f"Spark has archived its first {board.pipeline.archived:,} messages")

    async def _kill_broker(self) -> tuple[float, int]:
        """How long the broker was down, and how many readings waited for it."""
        board = self._board
        board.phase = "the broker is dead"
        killed_at = time.perf_counter()
        await self._cast.kill_broker()
        board.say("the broker was killed (SIGKILL); the stations go on measuring", is_trouble=True)
        await asyncio.sleep(_AWAY_S)
        await self._cast.start_broker()
        away_s, waited = time.perf_counter() - killed_at, board.sent - board.stored
        board.say(
            f"the broker is back after {away_s:.1f} s, and gets the {waited:,} readings that waited"
        )
        board.phase = "the world is running on"
        return away_s, waited

    # --- Completion ---

    async def _come_to_rest(self, bus: Bus) -> tuple[dict[str, int], int]:
        """Let all finish. Returns the messages of each topic, and the number of orders that are not done."""
        board, cast = self._board, self._cast
        board.phase = "the world comes to rest"
        for shop in cast.shops.values():
            shop.tell("stop")
        await self._until(
            lambda: all(each.is_stopped for each in board.shops.values()), "the shops to stop"
        )
        left = await self._wait_work(bus)
        await cast.send_home()
        board.say(f"{board.sent:,} readings are published, and {self._orders():,} orders worked on")
        await self._dashboard.wait_all(self._stations.sums, _READ_MAX_S)
        stored = {topic.name: topic.messages for topic in await bus.topics("*")}
        for shop in cast.shops.values():
            shop.tell(f"until {stored.get(INVOICES, 0)}")
        await asyncio.gather(*(each.wait_end(_READ_MAX_S) for each in cast.shops.values()))
        board.phase = "Spark archives the rest, and counts"
        await cast.finish_pipeline(sum(stored.values()), _SPARK_MAX_S)
        board.say("Spark has archived everything, and counted it in windows")
        return stored, left

    async def _wait_work(self, bus: Bus) -> int:
        """Wait until every order is acknowledged or a dead letter. Returns how many are not, in the end."""
        ends_at = time.monotonic() + _WORK_MAX_S
        while True:
            state = await bus.subscription(BILLING)
            left = sum(member.backlog for member in state.members)
            if not left or time.monotonic() > ends_at:
                return left
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _look_at_work(self, bus: Bus, left: int) -> WorkFound:
        invoices, offset = [], 1
        while True:
            page = await bus.fetch(INVOICES, offset)
            invoices += [message.payload for message in page.messages]
            offset = page.next_offset
            if offset >= page.end_offset:
                break
        dead = [
            (letter.tags[TOPIC_TAG], int(letter.tags[OFFSET_TAG]))
            async for letter in bus.dead_letters(BILLING)
        ]
        sent = {source: shop.sent.messages for source, shop in self._board.shops.items()}
        return count_work(sent, invoices, dead, left=left)

    async def _gather(
        self,
        stored: dict[str, int],
        work: WorkFound,
        troubles: Troubles,
        publishing_s: float,
        exit_code: int | None,
    ) -> Evidence:
        """The reports of all processes, and Spark's tables counted anew."""
        board, directory = self._board, self._plan.directory
        board.phase = "counting everything again"
        return Evidence(
            readings=self._stations.sums,
            stored=stored,
            web=board.shops[OrderSource.WEB],
            partner=board.shops[OrderSource.PARTNER],
            dashboard=self._dashboard.found(self._stations.sums),
            work=work,
            pipeline=board.pipeline,
            archive=await asyncio.to_thread(count_archive, directory / "archive"),
            windows=await asyncio.to_thread(count_windows, directory / "windows"),
            times=Times(
                publishing_s=publishing_s,
                killed_at_s=troubles.broker_killed_at_s,
                archived_at_kill=troubles.archived,
                away_s=troubles.away_s,
                waited=troubles.waited,
                worker_killed_at_s=troubles.worker_killed_at_s,
                in_hand_at_kill=troubles.in_hand,
                total_s=board.seconds,
            ),
            broker_exit_code=exit_code,
        )

    async def _until(
        self, condition: Callable[[], bool], what: str, within_s: float = _READ_MAX_S
    ) -> None:
        ends_at = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > ends_at:
                raise DemoFailedError(f"waited {within_s:.0f} s for {what}")
            await asyncio.sleep(_LOOK_EVERY_S)

    def _orders(self) -> int:
        return sum(shop.sent.messages for shop in self._board.shops.values())

    # --- Staying ---

    async def _stay(self, sending: Bus) -> None:
        """Keep all running, without Spark and without kills, until it is cancelled."""
        first = {source: shop.sent.messages + 1 for source, shop in self._board.shops.items()}
        for source, number in first.items():
            await self._cast.start_shop(source, number)
        await self._cast.hire()
        await self._cast.hire()
        self._board.phase = "the world goes on until Ctrl-C"
        await self._stations.run(sending, self._board, asyncio.Event())


def _first(several: BaseExceptionGroup[BaseException]) -> BaseException:
    """The exception that ended the others."""
    for error in several.exceptions:
        if isinstance(error, BaseExceptionGroup):
            return _first(error)
        return error
    return several
