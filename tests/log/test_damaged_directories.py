"""Each file of a data directory damaged in every way: nothing is served wrong, nothing is skipped in silence."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from runnel.log.disk import directory_recovery
from runnel.log.segments.synced_marks import SyncedMarks
from tests.fakes.disk import FakeDisk
from tests.soak.damage_trials import (
    ORIGINS,
    PRESENT,
    Origin,
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
FEWER = 2  # of directories that are, or were, of format 1
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
PARTS_BY_ORIGIN = [
    (part, origin)
    for origin in ORIGINS
    for part in (*PARTS, "main/shards")
    if (part, origin.shards) != ("main/shards", 1) and (part, origin.format) != ("metadata/", 1)
]


def tried(part: str, *, was_closed: bool, origin: Origin = PRESENT) -> Summary:
    summary = Summary()
    seed = f"{part} {was_closed} {origin}"
    is_present = origin.format == 2 and not origin.is_migrated
    flips, cuts = (FLIPS, CUTS) if is_present else (FEWER, FEWER)
    for trial in trials(Random(seed), flips=flips, cuts=cuts, origin=origin):
        is_of_part = part in trial.path or part in trial.way
        if is_of_part and trial.was_closed == was_closed:
            summary.add(trial, run_trial(trial))
    return summary


@pytest.mark.parametrize("origin", ORIGINS, ids=str)
@pytest.mark.parametrize("was_closed", [True, False], ids=["closed", "killed"])
def test_whole_directory_is_served_whole(was_closed: bool, origin: Origin) -> None:
    path, content = next(iter(images(origin)[was_closed].items()))
    assert run_trial(Trial(was_closed, path, "as it was", content, origin)) == (False, [])


@pytest.mark.parametrize("was_closed", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize(("part", "origin"), PARTS_BY_ORIGIN, ids=str)
def test_damaged_file_is_told_refused_or_harmless(
    part: str, origin: Origin, was_closed: bool
) -> None:
    summary = tried(part, was_closed=was_closed, origin=origin)
    assert summary.trials > 5
    assert summary.failures == []


@pytest.mark.parametrize("part", ["metadata/", "/state/"])
def test_without_synced_marks_losses_would_go_unnoticed(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    images()
    monkeypatch.setattr(SyncedMarks, "get", lambda *_: None)
    monkeypatch.setattr(SyncedMarks, "orphans", lambda *_: [])
    kinds = tried(part, was_closed=False).kinds
    assert kinds.keys() & {"acknowledgements lost", "cursors lost", "subscription lost"}


def test_unless_the_number_of_shards_is_restored_topics_would_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images(Origin(3))
    monkeypatch.setattr(directory_recovery, "restore_shard_count", lambda *_: None)
    assert tried("metadata/", was_closed=True, origin=Origin(3)).failures


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
