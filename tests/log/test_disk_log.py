"""What only the disk store does: it is opened again, in files that rotate, have names and a format."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from runnel.config import Keep, LogSettings, Pin, Retain, Rotate, Settings, TopicRule
from runnel.config.settings import DAY_NS
from runnel.errors import (
    FormatVersionError,
    LockedError,
    OffsetGoneError,
    ProducerFencedError,
    ProducerForgottenError,
    SettingsError,
    UnknownTopicError,
)
from runnel.formats.block import HEADER_BYTES
from runnel.log.disk.disk_log import DiskLog
from runnel.log.log import CursorPosition, Level, OffsetBounds, Position, ShardId
from runnel.platform.disk import RealDisk
from runnel.platform.workers import ThreadWorkers
from runnel.topics.policies import Policies
from tests.fakes.clock import VirtualClock
from tests.log.home import LOG, Home, run
from tests.log.samples import (
    batch,
    last_message,
    numbered,
    one,
    read_all,
    read_offsets,
    read_payloads,
    read_topics,
    trim_log,
)

MAIN = ShardId("main")
HOUR_NS = DAY_NS // 24


def main_rule(
    *,
    rotate: Rotate | None = None,
    retain: Retain | None = None,
    pin: Pin | None = None,
    last_value: bool = False,
) -> TopicRule:
    return TopicRule(
        match="*",
        journal="main",
        rotate=rotate or Rotate(),
        retain=retain or Retain(),
        pin=pin or Pin(),
        last_value=last_value,
    )


# --- Opening again ---


@pytest.mark.parametrize("is_killed", [False, True])
def test_everything_acknowledged_is_there_when_it_is_opened_again(is_killed: bool) -> None:
    home = Home()

    async def scenario() -> None:
        log = await home.open()
        assert log.recovered.was_clean
        for number in range(5):
            await log.append(batch(("a", [b"%d" % number]), ("b", [b"x", b"y"])))
        await log.append(numbered("p", 0, term=3))
        await log.metadata.set_cursor("c", [CursorPosition(topic="a", offset=2)])
        before = await log.read_shard(MAIN, Position(0, 1))
        log = await (home.kill() if is_killed else home.reopen(log))

        assert log.recovered.was_clean == (not is_killed)
        assert not log.recovered.torn
        assert not log.recovered.damage
        assert sorted(log.metadata.topics.names()) == ["a", "b"]
        assert await log.bounds("a", 0) == OffsetBounds(1, 7)
        assert await log.bounds("b", 0) == OffsetBounds(1, 11)
        assert log.shard(MAIN).entries() == OffsetBounds(1, 7)
        after = await log.read_shard(MAIN, Position(0, 1))
        assert [bytes(found.block) for found in after.found] == [
            bytes(found.block) for found in before.found
        ]
        [cursor] = log.metadata.cursors.all()
        assert (cursor.name, cursor.positions[0].offset) == ("c", 2)
        assert (await log.append(numbered("p", 0, term=3))).is_repeated
        with pytest.raises(ProducerFencedError):
            log.append(numbered("p", 0, term=2))
        done = await log.append(numbered("p", 1, term=3))
        assert (done.base_offsets, done.entry) == ([7], 7)
        await log.close()

    run(scenario)


def test_every_opening_begins_a_new_epoch() -> None:
    home = Home()

    async def scenario() -> None:
        log = await home.open()
        epochs = [(await log.append(one("a", b"x"))).epoch]
        for _ in range(3):
            log = await home.reopen(log)
            epochs.append((await log.append(one("a", b"x"))).epoch)
        assert epochs == sorted(set(epochs))
        page = await log.read_shard(MAIN, Position(0, 1))
        assert [found.batch.runs()[0].epoch for found in page.found] == epochs
        await log.close()

    run(scenario)


def test_received_batches_may_be_lost_with_the_machine_but_leave_no_trace() -> None:
    home = Home()

    async def scenario() -> None:
        log = await home.open()
        await log.append(one("a", b"1"))
        assert log.append(one("a", b"2"), Level.RECEIVED).done()
        log = await home.crash()
        bounds = await log.bounds("a", 0)
        assert bounds.next_offset in (2, 3)
        assert (await log.append(one("a", b"new"))).base_offsets == [bounds.next_offset]
        await log.close()

    run(scenario)


def test_clean_directory_is_opened_without_reading_its_segments() -> None:
    home = Home(main_rule(rotate=Rotate(bytes_max=100_000)))

    async def scenario() -> None:
        log = await home.open()
        for _ in range(30):
            await log.append(one("a", b"x" * 10_000))
        await log.close()
        home.disk.read_bytes = 0
        log = await home.open()
        assert home.disk.read_bytes < 10_000
        assert read_offsets(await log.read("a", 0, 30)) == [30]
        await log.close()

    run(scenario)


def test_after_a_kill_only_the_last_segment_is_scanned() -> None:
    home = Home(main_rule(rotate=Rotate(bytes_max=50_000)))

    async def scenario() -> None:
        log = await home.open()
        for _ in range(22):
            await log.append(one("a", b"x" * 10_000))
        await trim_log(log)  # waits until the full segments have their indexes
        home.disk = home.disk.restart()
        log = await home.open()
        assert home.disk.read_bytes < 40_000
        assert await log.bounds("a", 0) == OffsetBounds(1, 23)
        await log.close()

    run(scenario)


@pytest.mark.parametrize("is_killed", [False, True])
def test_purged_and_deleted_messages_stay_hidden(is_killed: bool) -> None:
    home = Home(main_rule(last_value=True))

    async def scenario() -> None:
        log = await home.open()
        await log.append(batch(("purged", [b"1"]), ("deleted", [b"2"]), ("again", [b"3"])))
        await log.metadata.purge_topic("purged")
        await log.metadata.delete_topic("deleted")
        await log.metadata.delete_topic("again")
        await log.append(one("again", b"4"))
        log = await (home.kill() if is_killed else home.reopen(log))
        assert await log.bounds("purged", 0) == OffsetBounds(2, 2)
        assert await last_message(log, "purged", 0) is None
        assert await log.bounds("again", 0) == OffsetBounds(2, 3)
        assert sorted(log.metadata.topics.names()) == ["again", "purged"]
        with pytest.raises(UnknownTopicError):
            await log.read("deleted", 0, 1)
        assert read_payloads(await log.read_shard(MAIN, Position(0, 1))) == [b"4"]
        assert (await log.append(one("deleted", b"5"))).base_offsets == [2]
        await log.close()

    run(scenario)


def test_messages_on_their_way_when_a_topic_is_deleted_stay_hidden_after_a_restart() -> None:
    home = Home()

    async def scenario() -> None:
        log = await home.open()
        await log.append(one("a", b"1"))
        waiting = log.append(one("a", b"2"))
        await log.metadata.delete_topic("a")
        await waiting
        made = await log.append(one("a", b"new"))
        for _ in range(2):
            [first] = made.base_offsets
            assert await log.bounds("a", 0) == OffsetBounds(first, first + 1)
            assert read_payloads(await log.read("a", 0, first)) == [b"new"]
            log = await home.kill()
        await log.close()

    run(scenario)


def test_last_value_survives_retention_and_then_a_restart() -> None:
    home = Home(
        main_rule(rotate=Rotate(every_ns=HOUR_NS), retain=Retain(age_ns=DAY_NS), last_value=True)
    )

    async def scenario() -> None:
        log = await home.open()
        await log.append(batch(("a", [b"1", b"2"]), ("b", [b"3"])))
        home.clock.advance(2 * DAY_NS)
        assert (await trim_log(log)).segments_removed == 1
        for is_killed in (True, False):
            log = await (home.kill() if is_killed else home.reopen(log))
            last = await last_message(log, "a", 0)
            assert last is not None
            assert [(m.offset, m.payload) for m in last] == [(2, b"2")]
        await log.metadata.purge_topic("a")
        log = await home.reopen(log)
        assert await last_message(log, "a", 0) is None
        assert await last_message(log, "b", 0) is not None
        await log.close()

    run(scenario)


@pytest.mark.parametrize("is_killed", [False, True])
def test_numbers_go_on_when_retention_has_removed_all_segments(is_killed: bool) -> None:
    home = Home(main_rule(rotate=Rotate(every_ns=HOUR_NS), retain=Retain(age_ns=DAY_NS)))

    async def scenario() -> None:
        log = await home.open()
        await log.append(one("a", b"1", b"2"))
        await log.append(numbered("p", 0))
        home.clock.advance(2 * DAY_NS)
        await trim_log(log)
        assert home.shard_files(".segment") == []
        log = await (home.kill() if is_killed else home.reopen(log))
        assert await log.bounds("a", 0) == OffsetBounds(4, 4)
        assert log.shard(MAIN).entries() == OffsetBounds(3, 3)
        with pytest.raises(OffsetGoneError):
            await log.read("a", 0, 1)
        again = await log.append(numbered("p", 0))
        assert (again.is_repeated, list(again.base_offsets)) == (True, [])
        done = await log.append(numbered("p", 1))
        assert (done.base_offsets, done.entry) == ([4], 3)
        await log.close()

    run(scenario)


def test_forgotten_publisher_stays_forgotten_after_a_restart() -> None:
    home = Home().limit(producers_max=1)

    async def scenario() -> None:
        log = await home.open()
        await log.append(numbered("p", 0))
        await log.append(numbered("q", 0))
        log = await home.reopen(log)
        with pytest.raises(ProducerForgottenError):
            log.append(numbered("p", 1))
        assert not (await log.append(numbered("q", 1))).is_repeated
        await log.close()

    run(scenario)


def test_changed_rules_leave_the_fixed_part_alone_and_are_listed() -> None:
    home = Home(TopicRule(match="a/*", partitions=2, journal="one"), TopicRule(match="b"))

    async def scenario() -> None:
        log = await home.open()
        await log.append(one("a/1", b"x"))
        await log.append(one("b", b"x"))
        await log.append(one("c", b"x"))
        home.rules = (
            TopicRule(match="a/*", partitions=3, journal="two"),
            TopicRule(match="b", last_value=True),
            TopicRule(match="c", keep=Keep.MEMORY),
        )
        log = await home.reopen(log)
        assert [(d.topic, d.key, d.recorded, d.now) for d in log.recovered.differences] == [
            ("a/1", "partitions", "2", "3"),
            ("a/1", "journal", "one", "two"),
            ("c", "keep", "disk", "memory"),
            ("c", "journal", "main", "c"),
        ]
        assert log.metadata.topics.get("a/1").policy.partitions == 2
        assert log.metadata.topics.get("a/1").shards == [ShardId("one")] * 2
        assert log.metadata.topics.get("b").policy.last_value
        assert (await log.append(one("a/1", b"y"))).base_offsets == [2]
        await log.close()

    run(scenario)


# --- Rotation ---


def test_segments_rotate_by_size() -> None:
    home = Home(main_rule(rotate=Rotate(bytes_max=5000)))

    async def scenario() -> None:
        log = await home.open()
        for _ in range(12):
            await log.append(one("a", b"x" * 1000))
        await log.append(one("a", b"y" * 20_000))  # one batch alone may be larger
        await log.append(one("a", b"z"))
        await log.close()
        sizes = [len(home.content(path)) for path in home.shard_files(".segment")]
        assert len(sizes) >= 5
        assert sorted(sizes)[-2] <= 5000 < sorted(sizes)[-1]
        log = await home.open()
        assert log.statistics().shards[0].segments == len(sizes)
        assert sum(map(len, [(await log.read("a", 0, 1)).found])) == 14
        await log.close()

    run(scenario)


def test_segments_rotate_at_a_time_of_the_utc_day() -> None:
    home = Home(main_rule(rotate=Rotate(every_ns=DAY_NS, at_ns=6 * HOUR_NS)))

    async def scenario() -> None:
        log = await home.open()
        midnight_ns = home.clock.time_ns() // DAY_NS * DAY_NS + DAY_NS

        async def append_at(time_ns: int) -> int:
            home.clock.advance(midnight_ns + time_ns - home.clock.time_ns())
            await log.append(one("a", b"x"))
            return log.statistics().shards[0].segments

        assert await append_at(6 * HOUR_NS - 1) == 1
        assert await append_at(6 * HOUR_NS) == 2
        assert await append_at(24 * HOUR_NS) == 2
        assert await append_at(30 * HOUR_NS - 1) == 2
        assert await append_at(30 * HOUR_NS) == 3
        await log.close()

    run(scenario)


def test_segments_rotate_by_their_number_of_runs() -> None:
    home = Home(log=LogSettings(allocate_bytes=0, disk_reserve_bytes=0, segment_runs_max=6))

    async def scenario() -> None:
        log = await home.open()
        for _ in range(4):
            await log.append(batch(("a", [b"1"]), ("b", [b"2"]), ("c", [b"3"])))
        assert log.statistics().shards[0].segments == 2
        assert read_offsets(await log.read("b", 0, 1)) == [1, 2, 3, 4]
        await log.close()

    run(scenario)


def test_old_segment_is_sealed_even_if_nothing_more_comes() -> None:
    home = Home(main_rule(rotate=Rotate(every_ns=HOUR_NS)))

    async def scenario() -> None:
        log = await home.open()
        await log.append(one("a", b"1"))
        assert home.shard_files(".index") == []
        home.clock.advance(2 * HOUR_NS)
        await trim_log(log)
        assert len(home.shard_files(".index")) == 1
        await log.append(one("a", b"2"))
        assert len(home.shard_files(".segment")) == 2
        assert read_offsets(await log.read("a", 0, 1)) == [1, 2]
        await log.close()

    run(scenario)


def test_batches_that_arrive_while_an_old_segment_is_sealed_are_stored_behind_it() -> None:
    home = Home(main_rule(rotate=Rotate(every_ns=HOUR_NS)))

    async def scenario() -> None:
        log = await home.open()
        await log.append(one("a", b"1"))
        home.clock.advance(2 * HOUR_NS)
        trimming = asyncio.ensure_future(trim_log(log))
        home.clock.step_wall(-2 * HOUR_NS)  # so that they would belong to the old period
        futures = []
        while not trimming.done():
            futures.append(log.append(one("a", b"x")))
            await asyncio.sleep(0)
        await asyncio.gather(*futures)
        for _ in range(2):
            expected = list(range(1, len(futures) + 2))
            assert [message.offset for message in await read_all(log, "a")] == expected
            log = await home.kill()
        await log.close()

    run(scenario)


# --- The directory ---


def test_newer_format_is_refused_with_a_clear_text() -> None:
    home = Home()

    async def scenario() -> None:
        await (await home.open()).close()
        path = f"{home.directory}/runnel.json"
        home.overwrite(path, b'{"format": 99}')
        with pytest.raises(
            FormatVersionError, match=r"format 99, this Runnel reads formats 1, 2 and 4; .* newer"
        ):
            await home.open()
        home.overwrite(path, b"???")
        with pytest.raises(FormatVersionError, match="does not say which format"):
            await home.open()
        home.overwrite(path, b'{"format": 2}')
        await (await home.open()).close()  # a refused opening has let go of the lock

    run(scenario)


def store_one_in(directory: Path) -> None:
    async def scenario() -> None:
        workers = ThreadWorkers(1)
        try:
            log = await DiskLog.open(
                directory,
                settings=Settings(log=LOG),
                policies=Policies([]),
                disk=RealDisk(),
                clock=VirtualClock(),
                workers=workers,
            )
            await log.append(one("a", b"1"))
            await log.close()
        finally:
            workers.close()

    run(scenario)


def test_directory_of_somebody_else_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    for name in ("thesis.txt", "photos", "notes", ".profile"):
        (tmp_path / name).write_text("mine")
    with pytest.raises(
        SettingsError,
        match=r"not a data directory of Runnel: it holds '.profile', 'notes', 'photos' and 1 more, and no runnel.json",
    ):
        store_one_in(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".profile",
        "notes",
        "photos",
        "thesis.txt",
    ]


def test_directory_with_tokens_a_settings_file_or_our_own_files_is_taken(tmp_path: Path) -> None:
    for name in ("tokens.json", "tokens.json.lock", "runnel.toml", "lost+found"):
        (tmp_path / name).touch()
    store_one_in(tmp_path)
    (tmp_path / "runnel.json").rename(tmp_path / "runnel.json.new")  # a crash while it was made
    store_one_in(tmp_path)
    (tmp_path / "thesis.txt").touch()  # beside our format file anything may lie
    store_one_in(tmp_path)


def test_second_opener_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    async def scenario() -> None:
        workers = ThreadWorkers(1)

        async def open_log() -> DiskLog:
            return await DiskLog.open(
                str(tmp_path),
                settings=Settings(log=LOG),
                policies=Policies(),
                disk=RealDisk(),
                clock=VirtualClock(),
                workers=workers,
            )

        try:
            log = await open_log()
            with pytest.raises(LockedError, match="locked by process"):
                await open_log()
            await log.append(one("a", b"still works"))
            await log.close()
            log = await open_log()
            assert read_payloads(await log.read("a", 0, 1)) == [b"still works"]
            await log.close()
        finally:
            workers.close()

    run(scenario)


ODD_NAMES = [
    "plain",
    "Plain",
    "../../escape",
    "/rooted",
    "..",
    ".",
    "%2E%2E",
    "a%2fb",
    "a/b",
    "tilde~",
    "ü",
    "u\u0308",
    "名前",
    "con",
    "name",
    "x" * 255,
    "x" * 254 + "y",
    "é" * 127,
]


def test_journals_with_odd_names_keep_apart_and_stay_inside_the_directory(tmp_path: Path) -> None:
    async def scenario() -> None:
        workers = ThreadWorkers(1)
        directory = tmp_path / "inner" / "data"

        async def open_log() -> DiskLog:
            return await DiskLog.open(
                str(directory),
                settings=Settings(log=LOG),
                policies=Policies([TopicRule(match="*", journal="{topic}")]),
                disk=RealDisk(),
                clock=VirtualClock(),
                workers=workers,
            )

        try:
            log = await open_log()
            for name in ODD_NAMES:
                await log.append(one(name, name.encode()))
            await log.close()
            log = await open_log()
            for name in ODD_NAMES:
                assert read_payloads(await log.read(name, 0, 1)) == [name.encode()]
                page = await log.read_shard(ShardId(name), Position(0, 1))
                assert read_topics(page) == [name]
            await log.close()
        finally:
            workers.close()

    run(scenario)
    folders = list((tmp_path / "inner" / "data" / "journals").iterdir())
    assert len({folder.name.casefold() for folder in folders}) == len(ODD_NAMES)
    assert [path.name for path in tmp_path.iterdir()] == ["inner"]
    assert [path.name for path in (tmp_path / "inner").iterdir()] == ["data"]


def test_open_files_are_bounded_however_many_journals_there_are() -> None:
    home = Home(TopicRule(match="*", journal="{topic}")).limit(open_files_max=16)

    async def scenario() -> None:
        log = await home.open()
        names = [f"t{number}" for number in range(60)]
        await asyncio.gather(*(log.append(one(name, b"1")) for name in names))
        for name in names:
            await log.append(one(name, b"2"))
            assert read_payloads(await log.read(name, 0, 1)) == [b"1", b"2"]
            assert log.statistics().open_files <= 16 + 1
        log = await home.reopen(log)
        for name in names:
            assert read_payloads(await log.read(name, 0, 1)) == [b"1", b"2"]
            assert log.statistics().open_files <= 16
        await log.close()
        assert log.statistics().open_files == 0

    run(scenario)


def test_reading_returns_the_very_bytes_of_the_file() -> None:
    home = Home()

    async def scenario() -> None:
        log = await home.open()
        await log.append(batch(("a", [b"1", b"2"]), ("b", [b"3"])))
        await log.append(one("a", b"4"))
        content = home.content(home.shard_files(".segment")[0])
        page = await log.read("a", 0, 1)
        blocks = [bytes(found.block) for found in page.found]
        assert content[64 : 64 + sum(map(len, blocks))] == b"".join(blocks)
        assert all(len(block) % 8 == 0 and len(block) > HEADER_BYTES for block in blocks)
        await log.close()

    run(scenario)
