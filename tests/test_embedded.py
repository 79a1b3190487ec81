"""The log inside a program."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from runnel.config import LogSettings, Retain, Rotate, Settings, TopicRule
from runnel.embedded import Broker, open_log
from runnel.errors import SettingsError
from runnel.formats.batch import Batch
from runnel.formats.message import Message


def one(payload: bytes) -> Batch:
    return Batch.from_messages([Message("a", payload)])


def test_what_was_stored_is_there_when_opened_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_log(tmp_path / "data") as log:
            await log.append(one(b"1"))
        async with open_log(str(tmp_path / "data")) as log:
            page = await log.read("a", 0, 1)
            assert [message.payload for message in page.found[0].wanted()] == [b"1"]

    asyncio.run(scenario())


@pytest.mark.parametrize("directory", ["", "/", b"x", None, 5, "a\0b"])
def test_what_is_no_data_directory_is_refused(directory: object) -> None:
    async def scenario() -> None:
        async with open_log(directory):  # type: ignore[arg-type]
            pass

    with pytest.raises(SettingsError):
        asyncio.run(scenario())


def test_file_in_the_place_of_the_directory_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def scenario() -> None:
        async with open_log(tmp_path / "file"):
            pass

    with pytest.raises(SettingsError, match="cannot be used as a data directory"):
        asyncio.run(scenario())


def test_opening_that_is_cancelled_leaves_nothing_behind(tmp_path: Path) -> None:
    async def open_and_close() -> None:
        async with open_log(tmp_path / "data") as log:
            await log.append(one(b"1"))

    async def scenario() -> None:
        await open_and_close()
        before = psutil.Process().num_fds()
        for turns in range(40):
            opening = asyncio.get_running_loop().create_task(open_and_close())
            for _ in range(turns):
                await asyncio.sleep(0)
            opening.cancel()
            await asyncio.wait({opening})
        await open_and_close()
        assert psutil.Process().num_fds() <= before

    asyncio.run(scenario())


def test_retention_is_applied_while_the_log_is_open(tmp_path: Path) -> None:
    rule = TopicRule(
        match="*", journal="main", rotate=Rotate(bytes_max=200), retain=Retain(bytes_max=1000)
    )
    settings = Settings(topics=(rule,), log=LogSettings(retention_interval_ns=1_000_000))

    async def scenario() -> None:
        async with open_log(tmp_path / "data", settings) as log, asyncio.timeout(30):
            while (
                (await log.bounds("a", 0)).first_offset == 1
                if log.metadata.topics.has("a")
                else True
            ):
                await log.append(one(bytes(100)))

    asyncio.run(scenario())


def test_broker_inside_a_program_is_silent(tmp_path: Path) -> None:
    program = f"""
import asyncio, runnel

async def main():
    for where in ("memory:", {str(tmp_path / "data")!r}):
        async with runnel.Broker.open(where) as broker, broker.connect() as bus:
            await bus.publish("orders", b"1")
            await bus.delete_topic("orders")

asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=False, timeout=60
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


def test_warnings_of_a_broker_inside_a_program_go_through_logging(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with Broker.open(tmp_path / "data") as broker, broker.connect() as bus:
            await bus.publish("orders", b"1")
            # As a machine that lost its power would leave it.
            shutil.copytree(tmp_path / "data", tmp_path / "copy")
        async with Broker.open(tmp_path / "copy"):
            pass

    asyncio.run(scenario())
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("runnel", "WARNING")
    assert record.getMessage().startswith("recovered after an unclean end kind=recovered")
