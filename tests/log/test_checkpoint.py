"""A checkpoint is the log as of one moment, whatever happens to the log afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from runnel.config import Retain, Rotate, Settings, TopicRule
from runnel.errors import ClientFault, DiskFullError
from runnel.log.backup import checkpoint, copies
from runnel.log.disk.disk_log import DiskLog
from runnel.log.log import Appended, CursorPosition, ShardId
from runnel.log.reading import OfflineLog, verify
from runnel.platform.disk import RealDisk
from runnel.platform.workers import ThreadWorkers
from runnel.topics.policies import Policies
from tests.fakes.clock import VirtualClock
from tests.log.home import LOG
from tests.log.samples import one, read_all, trim_log

RULE = TopicRule(
    match="*", journal="main", rotate=Rotate(bytes_max=4096), retain=Retain(age_ns=10**9)
)

MAIN = ShardId("main")


@asynccontextmanager
async def opened(
    directory: Path, clock: VirtualClock, journal_shards: int = 1
) -> AsyncIterator[DiskLog]:
    workers = ThreadWorkers(2)
    log = await DiskLog.open(
        directory,
        settings=Settings(log=msgspec.structs.replace(LOG, journal_shards=journal_shards)),
        policies=Policies([RULE]),
        disk=RealDisk(),
        clock=clock,
        workers=workers,
    )
    try:
        yield log
    finally:
        await log.close()
        workers.close()


def copy_of(path: str, target: Path) -> Path:
    source = Path(path)
    with copies.new_copy(target) as unfinished:
        copies.copy_files(source, unfinished, list(checkpoint.files_of(source)))
    return target


def test_checkpoint_has_what_was_stored_before_it_and_nothing_later(tmp_path: Path) -> None:
    clock = VirtualClock()

    async def scenario() -> None:
        async with opened(tmp_path / "data", clock) as log:
            for number in range(1, 21):
                await log.append(one("a", bytes([number]) * 500))
            await log.metadata.set_cursor("before", [CursorPosition("a", 0, 5)])
            path, checkpoint_id = await log.checkpoint()
            assert checkpoint.read_contents(Path(path)).id == checkpoint_id
            # The segment that grows goes on growing, and retention takes the others.
            for number in range(21, 31):
                await log.append(one("a", bytes([number]) * 500))
            await log.append(one("later", b"1"))
            await log.metadata.set_cursor("after", [CursorPosition("a", 0, 5)])
            await log.metadata.remove_cursor("before")
            await log.metadata.remove_cursor("after")
            clock.advance(10**10)
            await trim_log(log)
            assert log.shard(MAIN).entries().first_offset > 20
            copy = copy_of(path, tmp_path / "copy")
            assert verify(OfflineLog(str(copy))).damage == []
            await log.drop_checkpoint()
            assert "checkpoint" not in RealDisk().list(str(tmp_path / "data"))
        clock.step_wall(-(10**10))
        async with opened(tmp_path / "copy", clock) as log:
            assert not log.recovered.damage
            assert not log.recovered.torn
            messages = await read_all(log, "a")
            assert [message.offset for message in messages] == list(range(1, 21))
            assert [cursor.name for cursor in log.metadata.cursors.all()] == ["before"]
            assert not log.metadata.topics.has("later")
            assert (await log.append(one("a", b"x"))).base_offsets[0] == 21

    asyncio.run(scenario())


def test_whatever_comes_while_a_checkpoint_is_made_waits_and_is_stored(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path / "data", VirtualClock()) as log:
            await log.append(one("a", b"1"))
            making = asyncio.ensure_future(log.checkpoint())
            appended: list[asyncio.Future[Appended]] = []
            while not making.done():  # a stream that leaves the writer no rest
                await log.wait_room(MAIN)
                appended.append(log.append(one(f"t{len(appended) % 50}", b"2")))
                await asyncio.sleep(0)
            path, _ = await making
            setting = log.metadata.set_cursor("c", [CursorPosition("a", 0, 1)])
            await asyncio.gather(setting, *appended)
            copy = copy_of(path, tmp_path / "copy")
            with pytest.raises(ClientFault, match="a copy of this broker is being made"):
                await log.checkpoint()
            # Those that had come before the log was at rest, in order, and none that came behind them.
            found = OfflineLog(str(copy)).scan()
            stored = sum(len(batch.messages()) for batch in found)
            assert 1 <= stored <= 1 + len(appended)
        async with opened(tmp_path / "data", VirtualClock()) as log:
            assert "checkpoint" not in RealDisk().list(
                str(tmp_path / "data")
            )  # the next start removes what was left

    asyncio.run(scenario())


def test_copy_is_refused_where_it_would_do_harm(tmp_path: Path) -> None:
    source = tmp_path / "data"
    source.mkdir()
    full = tmp_path / "full"
    full.mkdir()
    (full / "something").touch()
    for target, problem in (
        (full, "is not an empty directory"),
        (source / "inner", "lie in each other"),
        (tmp_path / "missing" / "copy", "is not a directory"),
    ):
        with pytest.raises(ClientFault, match=problem):
            copies.check_target(target, beside=source)
    (tmp_path / "copy.unfinished").mkdir()
    with pytest.raises(ClientFault, match="was not finished"):
        copies.check_target(tmp_path / "copy", beside=source)
    copies.check_target(tmp_path / "other", beside=source)
    with pytest.raises(DiskFullError, match="bytes are needed"):
        copies.check_room(tmp_path / "other", [("a", 2**60)])


def test_copy_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def copy() -> None:
        with copies.new_copy(tmp_path / "copy") as unfinished:
            copies.copy_files(tmp_path / "data", unfinished, [("a", 1), ("gone", 1)])

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_bytes(b"1")
    with pytest.raises(FileNotFoundError):
        copy()
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_restored_copy_goes_on_in_an_epoch_that_the_original_never_has(tmp_path: Path) -> None:
    async def scenario() -> None:
        data = tmp_path / "data"
        async with opened(data, VirtualClock()) as log:
            await log.append(one("a", b"1"))
            copy = copy_of((await log.checkpoint())[0], tmp_path / "copy")
        epoch = copies.begin_epoch(RealDisk(), copy)
        assert copies.begin_epoch(RealDisk(), copy) > epoch  # a copy of a copy
        async with opened(data, VirtualClock()) as log:
            original = log.shard(MAIN).epoch
        async with opened(copy, VirtualClock()) as log:
            assert log.shard(MAIN).epoch > epoch > original
            assert (await log.append(one("a", b"2"))).epoch == log.shard(MAIN).epoch

    asyncio.run(scenario())


def test_copy_of_a_journal_with_several_shards_has_all_of_them(tmp_path: Path) -> None:
    clock = VirtualClock()
    topics = [f"t{number}" for number in range(20)]

    async def scenario() -> None:
        async with opened(tmp_path / "data", clock, journal_shards=4) as log:
            for topic in topics:
                await log.append(one(topic, b"before"))
            path, _ = await log.checkpoint()
            for topic in topics:
                await log.append(one(topic, b"after"))
            copy = copy_of(path, tmp_path / "copy")
            await log.drop_checkpoint()
        assert verify(OfflineLog(str(copy))).damage == []
        async with opened(copy, clock) as log:
            assert len({log.metadata.topics.get(topic).shards[0] for topic in topics}) == 4
            for topic in topics:
                assert [message.payload for message in await read_all(log, topic)] == [b"before"]

    asyncio.run(scenario())
