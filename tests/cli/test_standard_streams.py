"""Reading and writing beside an event loop: loses nothing, blocks nothing else, and can be interrupted."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from runnel.cli.standard_streams import read_some, write_all

# More than any pipe holds.
DATA = bytes(range(256)) * 4096


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            continue  # closed by the test


async def read_until_end(descriptor: int) -> bytes:
    parts = []
    while part := await read_some(descriptor):
        parts.append(part)
    return b"".join(parts)


def test_more_than_a_pipe_holds_goes_through_while_the_reader_reads(pipe: tuple[int, int]) -> None:
    reading, writing = pipe

    async def write() -> None:
        await write_all(writing, DATA)
        os.close(writing)

    async def both() -> bytes:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(write())
            return await read_until_end(reading)

    assert asyncio.run(both()) == DATA


def test_waiting_for_a_reader_can_be_ended(pipe: tuple[int, int]) -> None:
    async def write() -> None:
        async with asyncio.timeout(0.01):
            await write_all(pipe[1], DATA)

    with pytest.raises(TimeoutError):
        asyncio.run(write())


def test_waiting_for_input_can_be_ended(pipe: tuple[int, int]) -> None:
    async def read() -> None:
        async with asyncio.timeout(0.01):
            await read_some(pipe[0])

    with pytest.raises(TimeoutError):
        asyncio.run(read())


def test_reader_that_left_is_a_broken_pipe(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    with pytest.raises(BrokenPipeError):
        asyncio.run(write_all(pipe[1], b"x"))


def test_files_and_devices_are_read_and_written_too(tmp_path: Path) -> None:
    async def copy() -> bytes:
        writing = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
        await write_all(writing, DATA)
        os.close(writing)
        reading = os.open(tmp_path / "file", os.O_RDONLY)
        empty = os.open(os.devnull, os.O_RDWR)
        await write_all(empty, DATA)
        try:
            return await read_until_end(reading) + await read_until_end(empty)
        finally:
            os.close(reading)
            os.close(empty)

    assert asyncio.run(copy()) == DATA
