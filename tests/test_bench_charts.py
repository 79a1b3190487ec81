"""The charts of `bin/bench`: drawn from results alone, the same file for the same figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.measures import PERCENTILES
from bench.record import PartRecord
from bench.report import Measured, Result

pytest.importorskip("matplotlib", reason="the bench set brings it")

from bench.charts import draw


def measured(system: str, value: float) -> Measured:
    return Measured(system, (value * 0.8, value, value * 1.3))


def compared(what: str, value: float, peers: dict[str, float], unit: str = "messages/s") -> Result:
    first, *others = (measured(name, figure) for name, figure in peers.items())
    return Result(
        f"{what}, against {first.system}",
        value,
        unit,
        first.median,
        what=what,
        ours=measured("Runnel", value),
        peer=first,
        others=tuple(others),
    )


def records() -> dict[str, dict[str, PartRecord]]:
    peers = {"NATS": 200_000.0, "Redis": 150_000.0, "RabbitMQ": 12_000.0, "Kafka": 300_000.0}
    given = {
        "live": [
            compared("1 to 1, ephemeral, 100 bytes", 1_500_000, peers),
            compared("1 to 30, delivered", 3_000_000, {"NATS": 400_000.0}),
        ],
        "latency": [
            compared(
                f"latency at {rate} messages/s, one by one, {percentile}", 100 + place, peers, "µs"
            )
            for rate in ("1,000", "5,000")
            for place, percentile in enumerate(PERCENTILES)
        ],
        "growth": [compared("a busy topic on disk, 1,000 topics", 9e5, {"no other topic": 1e6})],
        "restart": [
            Result(
                "restart with 512 MiB in 100 topics, after SIGKILL",
                0.5,
                "s",
                what="restart with 512 MiB in 100 topics, after SIGKILL",
                ours=measured("Runnel", 0.5),
                others=(measured("JetStream", 0.3), Measured("Kafka", (), "no java")),
            )
        ],
    }
    return {
        name: {
            "part": PartRecord("part", "2026-01-02T03:04:05+00:00", 1.0, False, {}, tuple(results))
        }
        for name, results in given.items()
    }


def test_every_subject_with_results_has_a_chart(tmp_path: Path) -> None:
    drawn = draw(records(), tmp_path)
    assert set(drawn) == {"throughput", "latency", "growth", "restart", "targets"}
    for name in drawn:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_subject_without_results_has_none(tmp_path: Path) -> None:
    drawn = draw({"growth": records()["growth"]}, tmp_path)
    assert set(drawn) == {"growth", "targets"}


def test_the_same_figures_make_the_same_file(tmp_path: Path) -> None:
    draw(records(), tmp_path / "once")
    draw(records(), tmp_path / "again")
    once, again = (tmp_path / folder / "throughput.png" for folder in ("once", "again"))
    assert once.read_bytes() == again.read_bytes()
