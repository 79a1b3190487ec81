"""Each file of a data directory damaged in every way: nothing is served wrong, nothing is skipped in silence."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from runnel.log.disk import directory_recovery
from runnel.log.segments.synced_marks import SyncedMarks
from tests.fakes.disk import FakeDisk
from tests.soak.damage_trials import (
    SHARDS,
    Summary,
    Trial,
    images,
    open_broker,
    run_trial,
    trials,
)

# Of each file, beside the other kinds of damage. `bin/soak damage` tries others, for as long as you like.
FLIPS = 6
CUTS = 6
PARTS = (
    "metadata/",
    "catalogue/",
    "/state/",
    "synced",
    "/name",
    ".index",
    ".segment",
    "runnel.json",
    "folder",
)
PARTS_BY_SHARDS = [
    *((part, shards) for shards in SHARDS for part in PARTS),
    *(("main/shards", shards) for shards in SHARDS if shards > 1),
]


def tried(part: str, *, was_closed: bool, shards: int) -> Summary:
    summary = Summary()
    seed = f"{part} {was_closed}" if shards == 1 else f"{part} {was_closed} {shards}"
    for trial in trials(Random(seed), flips=FLIPS, cuts=CUTS, shards=shards):
        is_of_part = part in trial.path or part in trial.way
        if is_of_part and trial.was_closed == was_closed:
            summary.add(trial, run_trial(trial))
    return summary


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("was_closed", [True, False], ids=["closed", "killed"])
def test_whole_directory_is_served_whole(was_closed: bool, shards: int) -> None:
    path, content = next(iter(images(shards)[was_closed].items()))
    assert run_trial(Trial(was_closed, path, "as it was", content, shards)) == (False, [])


@pytest.mark.parametrize("was_closed", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize(("part", "shards"), PARTS_BY_SHARDS)
def test_damaged_file_is_told_refused_or_harmless(part: str, shards: int, was_closed: bool) -> None:
    summary = tried(part, was_closed=was_closed, shards=shards)
    assert summary.trials > 5
    assert summary.failures == []


@pytest.mark.parametrize("part", ["metadata/", "/state/"])
def test_without_synced_marks_losses_would_go_unnoticed(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    images()
    monkeypatch.setattr(SyncedMarks, "get", lambda *_: None)
    monkeypatch.setattr(SyncedMarks, "orphans", lambda *_: [])
    kinds = tried(part, was_closed=False, shards=1).kinds
    assert kinds.keys() & {"acknowledgements lost", "cursors lost", "subscription lost"}


def test_unless_the_number_of_shards_is_restored_topics_would_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images(3)
    monkeypatch.setattr(directory_recovery, "restore_shard_count", lambda *_: None)
    assert tried("metadata/", was_closed=True, shards=3).failures


def disk_with_emptied(part: str) -> FakeDisk:
    """Not for a coroutine: the first call runs a broker in its own event loop."""
    path = next(path for path in images()[True] if part in path)
    return Trial(True, path, "emptied", b"").disk()


def test_readiness_warns_of_damage_without_a_path() -> None:
    disk = disk_with_emptied("/state/")

    async def warnings() -> list[str]:
        broker = await open_broker(disk)
        try:
            return broker.monitor.warnings()
        finally:
            await broker.close()

    (warning,) = asyncio.run(warnings())
    assert warning.startswith("1 place in the data directory damaged")
    assert "journals" not in warning


def test_subscription_whose_definition_is_lost_is_reported_with_its_topics(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its number and topics are in the state journals, its name is not."""

    disk = disk_with_emptied("/metadata/")

    async def start() -> None:
        broker = await open_broker(disk)
        await broker.close()

    asyncio.run(start())
    told = [line.getMessage() for line in caplog.records if "the definition of" in str(line)]
    assert len(told) == 1
    assert "'a', 'b', 'own/c'" in told[0]
