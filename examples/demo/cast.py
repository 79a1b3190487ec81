"""The processes of the world: started, listened to and ended together, what they report on the board."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from examples.demo.board import Board
from examples.demo.broker_process import BrokerProcess
from examples.demo.child import Child
from examples.demo.evidence import PipelineReport, ShopReport, WorkerReport
from examples.demo.world import Source

_Report = TypeVar("_Report", ShopReport, WorkerReport, PipelineReport)


class Cast:
    """`tasks` hears of a process that fails."""

    def __init__(self, directory: Path, board: Board, tasks: asyncio.TaskGroup) -> None:
        self.broker = BrokerProcess(directory)
        self.shops: dict[Source, Child] = {}
        self.pipeline: Child | None = None
        self._directory = directory
        self._board = board
        self._tasks = tasks
        self._workers: dict[str, Child] = {}
        self._hired = 0
        self._all: list[Child] = []

    # --- The broker ---

    async def start_broker(self) -> float:
        """Seconds until it listened."""
        seconds = await self.broker.start()
        broker, self._board.is_broker_up = self.broker, True
        self._board.doors = (broker.native_url, broker.http_url, broker.grpc_url)
        self._tasks.create_task(broker.watch())
        return seconds

    async def kill_broker(self) -> None:
        await self.broker.kill()
        self._board.is_broker_up = False

    async def stop_broker(self) -> int:
        """Its exit code."""
        code = await self.broker.stop()
        self._board.is_broker_up = False
        return code

    # --- Everybody else ---

    async def start_pipeline(self) -> None:
        def take(report: PipelineReport) -> None:
            self._board.pipeline = report

        words = ("examples.demo.pipeline", self.broker.native_url, str(self._directory))
        self.pipeline = await self._start("pipeline", words, PipelineReport, take)

    async def finish_pipeline(self, messages: int, within_s: float) -> None:
        """It archives that many in all, counts, and ends."""
        assert self.pipeline is not None
        self.pipeline.tell(f"finish {messages}")
        await self.pipeline.wait_end(within_s)

    async def start_shop(self, source: Source, first: int) -> None:
        def take(report: ShopReport) -> None:
            self._board.shops[source] = report

        module, url = {
            Source.WEB: ("rest_client", self.broker.http_url),
            Source.PARTNER: ("grpc_client", self.broker.grpc_url),
        }[source]
        words = (f"examples.demo.{module}", url, str(first))
        self.shops[source] = await self._start(module, words, ShopReport, take)

    async def hire(self) -> str:
        """One more worker; its name."""
        self._hired += 1
        name = f"worker-{self._hired}"

        def take(report: WorkerReport) -> None:
            self._board.workers[name] = report

        words = ("examples.demo.worker", self.broker.native_url, name)
        self._board.workers[name] = WorkerReport()
        self._workers[name] = await self._start(name, words, WorkerReport, take)
        return name

    async def kill_worker(self, name: str) -> int:
        """As a crash would; how many orders it had in hand, as it last said."""
        await self._workers.pop(name).end(signal.SIGKILL)
        return self._forget(name).in_hand

    async def send_home(self) -> None:
        """Workers finish what they have in hand, and end."""
        for worker in self._workers.values():
            worker.ask_to_end(signal.SIGTERM)
        for name, worker in list(self._workers.items()):
            await worker.wait_end(within_s=30)
            del self._workers[name]
            self._forget(name)

    def _forget(self, name: str) -> WorkerReport:
        report, gone = self._board.workers.pop(name), self._board.gone
        gone.invoiced += report.invoiced
        gone.failed += report.failed
        gone.postponed += report.postponed
        return report

    async def _start(
        self,
        name: str,
        words: tuple[str, ...],
        kind: type[_Report],
        take: Callable[[_Report], None],
    ) -> Child:
        child = Child(name, self._directory, *words)
        await child.start()
        self._all.append(child)

        async def listen() -> None:
            decoder = msgspec.json.Decoder(kind)
            async for line in child.lines():
                take(decoder.decode(line))

        self._tasks.create_task(listen())
        return child

    async def end(self) -> None:
        """Whatever happened, nobody is left. Who would first finish his work with the broker is not asked."""
        for child in self._all:
            # Java removes its temporary files when it is asked.
            child.ask_to_end(signal.SIGTERM if child is self.pipeline else signal.SIGKILL)
        await asyncio.gather(*(child.end(signal.SIGTERM) for child in self._all))
        await self.broker.child.end(signal.SIGTERM)
