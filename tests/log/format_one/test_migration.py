"""A directory of format 1 is migrated when it is opened: everything is there, wherever the migration is cut short."""

from __future__ import annotations

import asyncio
import json
import tarfile
from pathlib import Path
from random import Random
from typing import Any

import pytest

from runnel.errors import FormatVersionError
from runnel.log.disk.disk_log import DiskLog
from runnel.log.log import Position
from runnel.log.metadata.shared_metadata import SharedMetadata
from runnel.log.reading import OfflineLog
from runnel.platform.disk import FileAccess
from runnel.topics.policies import Policies
from tests.fakes.clock import VirtualClock
from tests.fakes.disk import FakeDisk, Operation
from tests.fakes.losing_log import MetadataCopy
from tests.fakes.power import PowerLoss
from tests.fakes.workers import SimulatedWorkers
from tests.log.format_one import world
from tests.log.images import DIRECTORY, Image, disk_of, image_of

HERE = Path(__file__).parent
ARCHIVES = ("closed.tar.gz", "killed.tar.gz")
FACTS = json.loads((HERE / "facts.json").read_text())
# Of the last process that wrote the archives; the process before it had epoch 1.
LAST_EPOCH = 2

both = pytest.mark.parametrize("archive", ARCHIVES)


def image_in(archive: str) -> Image:
    with tarfile.open(HERE / archive) as packed:
        files = {member: packed.extractfile(member) for member in packed}
        return {f"{DIRECTORY}/{each.name}": file.read() for each, file in files.items() if file}


# --- What users see ---


@both
def test_everything_is_there_after_the_migration_and_after_each_later_start(
    archive: str, tmp_path: Path
) -> None:
    world.unpack(HERE / archive, tmp_path)
    for _ in range(3):
        assert asyncio.run(world.facts(str(tmp_path))) == FACTS
    assert json.loads((tmp_path / "runnel.json").read_text())["format"] == 2
    assert not (tmp_path / "catalogue").exists()


@both
def test_migration_is_logged_once(
    archive: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world.unpack(HERE / archive, tmp_path)
    with caplog.at_level("INFO", "runnel"):
        for _ in range(2):
            asyncio.run(world.facts(str(tmp_path)))
    told = [line.getMessage() for line in caplog.records if "migrated" in line.getMessage()]
    assert told == ["the data directory was migrated from_format=1 to_format=2"]


@both
def test_offline_tools_read_both_formats_alike(archive: str, tmp_path: Path) -> None:
    def told() -> dict[str, Any]:
        log = OfflineLog(str(tmp_path))
        found = {
            "topics": sorted(map(str, log.topics())),
            "cursors": sorted(map(str, log.cursors())),
            "messages": [
                (m.topic, m.partition, m.offset, m.payload)
                for batch in log.scan()
                for m in batch.messages()
            ],
        }
        assert not log.report.withheld
        return found

    world.unpack(HERE / archive, tmp_path)
    before = told()
    assert len(before["messages"]) > 100
    asyncio.run(world.facts(str(tmp_path)))
    assert told() == before


# --- Wherever it ends ---


async def open_on(
    disk: FakeDisk, shared: SharedMetadata | None = None, *, shards: int = 4
) -> DiskLog:
    return await DiskLog.open(
        DIRECTORY,
        settings=world.settings(DIRECTORY, shards),
        policies=Policies(world.RULES),
        disk=disk,
        clock=VirtualClock(world.BEGUN_NS),
        workers=SimulatedWorkers(Random(1), turns_max=0),
        shared=shared,
    )


async def log_facts(log: DiskLog) -> dict[str, Any]:
    """Everything that a directory holds, but for its epochs."""
    metadata = log.metadata
    found: dict[str, Any] = {
        "damage": list(log.recovered.damage),
        "cursors": sorted(map(str, metadata.cursors.all())),
        "subscriptions": metadata.subscriptions(),
        "terms": [await metadata.take_term(name) > 7 for name in ("meter", "shop")],
    }
    for name in sorted(metadata.topics.names()):
        topic = metadata.topics.get(name)
        for number, shard in enumerate(topic.shards):
            bounds = await log.bounds(name, number)
            page = await log.read(name, number, bounds.first_offset)
            messages = [m for each in page.found for m in each.wanted().messages()]
            last = {(name, number): bounds.next_offset - 1}
            found[f"{name}[{number}]"] = (
                shard,
                bounds,
                log.shard(shard).floor(name, number),
                [(m.offset, m.payload) for m in messages],
                [
                    chosen.batch.envelope.counts
                    async for some in log.messages_at(shard, last)
                    for chosen in some
                ],
            )
    for shard in sorted(log.shards(), key=str):
        page_of_shard = await log.read_shard(
            shard, Position(0, log.shard(shard).entries().first_offset)
        )
        found[f"{shard}"] = (
            sorted(log.shard(shard).state.contents),
            [m.payload for each in page_of_shard.found for m in each.wanted().messages()],
            str(log._owned.shards[shard].stored_producers.states()),
        )
    return found


async def facts_on(disk: FakeDisk) -> dict[str, Any]:
    log = await open_on(disk)
    found = await log_facts(log)
    await log.close()
    return found


def migrated_facts(image: Image) -> tuple[dict[str, Any], list[Operation]]:
    """What a directory holds that was migrated in peace, and the disk's operations until it was open."""
    disk = disk_of(image)
    before = len(disk.operations)

    async def act() -> tuple[dict[str, Any], list[Operation]]:
        log = await open_on(disk)
        operations = disk.operations[before:]
        return await log_facts(log), operations

    return asyncio.run(act())


@both
@pytest.mark.parametrize("is_kill", [False, True], ids=["power", "kill"])
def test_migration_may_end_in_any_operation(archive: str, *, is_kill: bool) -> None:
    image = image_in(archive)
    expected, operations = migrated_facts(image)
    assert len(operations) > 100
    for number in range(1, len(operations) + 1):
        disk = disk_of(image)
        end_at = disk.kill_at if is_kill else disk.crash_at
        end_at(len(disk.operations) + number)
        with pytest.raises(PowerLoss):
            asyncio.run(open_on(disk))
        assert asyncio.run(facts_on(disk.restart())) == expected, operations[number - 1]


@both
def test_epochs_of_all_shards_begin_above_that_of_the_directory(archive: str) -> None:
    async def epochs() -> set[int]:
        log = await open_on(disk)
        return {log.shard(shard).epoch for shard in log.shards()}

    disk = disk_of(image_in(archive))
    assert asyncio.run(epochs()) == {LAST_EPOCH + 1}


def test_several_brokers_do_not_open_a_directory_that_was_not_migrated() -> None:
    async def act() -> None:
        disk = disk_of(image_in("closed.tar.gz"))
        with pytest.raises(FormatVersionError, match="one broker alone has to open it first"):
            await open_on(disk, MetadataCopy(()))
        await facts_on(disk)
        log = await open_on(disk, MetadataCopy(()))
        await log.close()

    asyncio.run(act())


# --- Damage ---


@both
def test_damage_is_reported_and_not_migrated_away(archive: str) -> None:
    """Every file in turn loses its second half: what is lost then is reported, at this start and the next one."""
    image = image_in(archive)
    expected, _ = migrated_facts(image)
    told = 0
    for path, content in image.items():
        if path.endswith(("/name", "/shards", "runnel.json", ".index", "/synced")):
            continue  # these are made again
        disk = disk_of(image)
        disk.open(path, FileAccess.WRITE).truncate(len(content) // 2 // 8 * 8)
        found = [asyncio.run(facts_on(disk)), asyncio.run(facts_on(disk))]
        assert found[0]["damage"], path
        told += bool(found[1]["damage"])
        if path.endswith(".segment"):
            assert found[1]["damage"], path
            for facts in found:
                _check_nothing_is_invented(facts, expected)
    assert told > 10


def _check_nothing_is_invented(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key, before in expected.items():
        if key.endswith("]"):
            assert set(found[key][3]) <= set(before[3]), key


def test_what_is_migrated_is_small() -> None:
    """The catalogues of shards have nothing but what belongs to the shard."""
    disk = disk_of(image_in("closed.tar.gz"))
    asyncio.run(facts_on(disk))
    files = image_of(disk)
    folder = f"{DIRECTORY}/journals/main/0/catalogue/"
    [catalogue] = [content for path, content in files.items() if path.startswith(folder)]
    assert b"again" in catalogue
    assert b"orders/a" not in catalogue
