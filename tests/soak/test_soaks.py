"""Short seeded forms of the soaks that have no test elsewhere, and of all together."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.soak import __main__ as command_line
from tests.soak import everything
from tests.soak.damage import damage_directories
from tests.soak.everything import NAMES, TRACKS, Soak, planned, soak_everything


@pytest.mark.slow
def test_damaged_directories_are_refused_or_served_without_a_wrong_message() -> None:
    outcome = asyncio.run(damage_directories(3.0, seed=2))
    assert outcome.rounds > outcome.refused
    assert outcome.served


def test_the_time_is_shared_by_the_soaks_of_a_track() -> None:
    plan = planned(600, NAMES)
    assert len(plan) == len(TRACKS)
    for track in plan:
        assert sum(seconds for _, seconds in track) == pytest.approx(600)
    assert planned(600, ["log"]) == [[], [(TRACKS[1][0], 600)]]


def test_a_soak_whose_package_is_missing_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(
        everything, "TRACKS", ((Soak("odd", ("odd",), 1, needs="no_such_package"),),)
    )
    assert soak_everything(1, 1, ["odd"], tmp_path) == 0
    assert "not run, because a package is missing: odd" in capsys.readouterr().out


@pytest.mark.slow
def test_what_a_soak_finds_is_reported_and_saved_with_the_command_that_finds_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fine = Soak("fine", ("log", "--jobs", "1"), 1)
    broken = Soak("broken", ("log", "--jobs", "0"), 1)  # which argparse refuses
    monkeypatch.setattr(everything, "TRACKS", ((fine,), (broken,)))
    assert soak_everything(1, 1, ["fine", "broken"], tmp_path) == 1
    told = capsys.readouterr().out
    assert "nothing broken" in told
    assert "broken: again with bin/soak log --jobs 0 --seconds 1 --seed" in told
    [saved] = tmp_path.iterdir()
    assert "at least 1 is needed" in saved.read_text()


def test_the_former_words_of_the_command_line_still_work(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[object] = []

    def soak_listeners(seconds: float, seed: int, only: list[str], *, with_tls: bool) -> int:
        chosen.extend((seconds, seed, only, with_tls))
        return 0

    monkeypatch.setattr(command_line, "soak_listeners", soak_listeners)
    assert command_line.main(["door", "--doors", "http", "--seconds", "5", "--seed", "7"]) == 0
    assert chosen == [5.0, 7, ["http"], False]
