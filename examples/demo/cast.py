"""The processes of the demo: starts and ends them together, and puts their reports on the board."""

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
from examples.demo.world import OrderSource

_Report = TypeVar("_Report", ShopReport, WorkerReport, PipelineReport)


class Cast:
    """`tasks` gets the error of a process that fails."""

    def __init__(self, directory: Path, board: Board, tasks: asyncio.TaskGroup) -> None:
        self.broker = BrokerProcess(directory)
        self.shops: dict[OrderSource, Child] = {}
        self.pipeline: Child | None = None
        self._directory = directory
        self._board = board
        self._tasks = tasks
        self._workers: dict[str, Child] = {}
        self._hired = 0
        self._all: list[Child] = []

    # --- The broker ---

    async def start_broker(self) -> float:
        """Start it. Returns the seconds until it listened."""
        seconds = await self.broker.start()
        broker, self._board.is_broker_up = self.broker, True
        self._board.listeners = (broker.native_url, broker.http_url, broker.grpc_url)
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

    # --- The other processes ---

    async def start_pipeline(self) -> None:
        def take(report: PipelineReport) -> None:
            self._board.pipeline = report

        words = ("examples.demo.pipeline", self.broker.native_url, str(self._directory))
        self.pipeline = await self._start("pipeline", words, PipelineReport, take)

    async def finish_pipeline(self, messages: int, within_s: float) -> None:
        """Let Spark archive so many messages in all, count, and end."""
        assert self.pipeline is not None
        self.pipeline.tell(f"finish {messages}")
        await self.pipeline.wait_end(within_s)

    async def start_shop(self, source: OrderSource, first: int) -> None:
        def take(report: ShopReport) -> None:
            self._board.shops[source] = report

        module, url = {
            OrderSource.WEB: ("rest_client", self.broker.http_url),
            OrderSource.PARTNER: ("grpc_client", self.broker.grpc_url),
        }[source]
        words = (f"examples.demo.{module}", url, str(first))
        self.shops[source] = await self._start(module, words, ShopReport, take)

    async def hire(self) -> str:
        """Start one more worker. Returns its name."""
        self._hired += 1
        name = f"worker-{self._hired}"

        def take(report: WorkerReport) -> None:
            self._board.workers[name] = report

        words = ("examples.demo.worker", self.broker.native_url, name)
        self._board.workers[name] = WorkerReport()
        self._workers[name] = await self._start(name, words, WorkerReport, take)
        return name

    async def kill_worker(self, name: str) -> int:
        """Kill it, like a crash. Returns the number of orders it last reported in hand."""
        await self._workers.pop(name).end(signal.SIGKILL)
        return self._forget(name).in_hand

    async def send_home(self) -> None:
        """Let the workers finish their orders and end."""
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
        """End all processes in any case, without letting them finish their work."""
        for child in self._all:
            # Java removes its temporary files when it is asked to end.
            child.ask_to_end(signal.SIGTERM if child is self.pipeline else signal.SIGKILL)
        await asyncio.gather(*(child.end(signal.SIGTERM) for child in self._all))
        await self.broker.child.end(signal.SIGTERM)
