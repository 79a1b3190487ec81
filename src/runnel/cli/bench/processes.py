"""Starts the processes of a bench: a broker of its own if requested, and the processes that make the load."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Final, TypeVar

import msgspec

from runnel.cli.bench.plan import Expect, Load, Ready, Received, Sent
from runnel.cli.bench.report import expected_of
from runnel.cli.render.banner import LISTENING
from runnel.config import Keep
from runnel.errors import RunnelError, TimeoutExpiredError

_LINE_BYTES_MAX: Final = 1 << 20
_START_S: Final = 30.0
_STOP_S: Final = 15.0

_Word = TypeVar("_Word")


@asynccontextmanager
async def own_broker(keep: Keep) -> AsyncIterator[str]:
    """Run a broker on a free port with a temporary data directory; yield its address."""
    with tempfile.TemporaryDirectory(prefix="runnel-bench-") as directory:
        rule = f'topics=[{{ match = "*", keep = "{keep.value}" }}]'
        where = ("--data", directory, "--listen", "127.0.0.1:0", "--http", "none", "--grpc", "none")
        quiet = ("--log-level", "warning")
        async with _process("-m", "runnel", "serve", *where, "--set", rule, *quiet) as broker:
            assert broker.stdout is not None
            try:
                async with asyncio.timeout(_START_S):
                    line = (await broker.stdout.readline()).decode()
            except TimeoutError:
                raise TimeoutExpiredError(f"no broker after {_START_S:g} s") from None
            if not line.startswith(LISTENING):
                raise RunnelError("the broker did not start")
            yield line.removeprefix(LISTENING).split()[0]


async def run_load(
    loads: Sequence[Load], subscribed: frozenset[str]
) -> tuple[list[Sent], list[Received], int]:
    """Run all processes step by step. Also returns how many messages each subscriber should have received."""
    async with _all_processes(len(loads)) as processes:
        for process, load in zip(processes, loads, strict=True):
            _tell(process, load)
        await _hear_all(processes, Ready)
        for process in processes:
            _tell(process, "go")
        sent = await _hear_all(processes, Sent)
        expected = expected_of(sent, subscribed)
        for process in processes:
            _tell(process, Expect(expected))
        return sent, await _hear_all(processes, Received), expected


@asynccontextmanager
async def _all_processes(count: int) -> AsyncIterator[list[Process]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(_process("-m", "runnel.cli.bench.load"))
            for _ in range(count)
        ]


@asynccontextmanager
async def _process(*words: str) -> AsyncIterator[Process]:
    """Run one Python process. Ctrl-C reaches only the bench, which ends the process in any case."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *words,
        stdin=PIPE,
        stdout=PIPE,
        limit=_LINE_BYTES_MAX,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        await asyncio.shield(_end(process))


async def _end(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _tell(process: Process, word: object) -> None:
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(word) + b"\n")


async def _hear_all(processes: Sequence[Process], kind: type[_Word]) -> list[_Word]:
    async with asyncio.TaskGroup() as tasks:
        words = [tasks.create_task(_hear(process, kind)) for process in processes]
    return [word.result() for word in words]


async def _hear(process: Process, kind: type[_Word]) -> _Word:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise RunnelError("a process that makes the load ended early; its error is above")
    return msgspec.json.decode(line, type=kind)
