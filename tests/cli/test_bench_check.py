"""`runnel bench` finds loss and disorder by the numbers in the payloads, and computes rates from real times."""

from __future__ import annotations

import pytest

from runnel.cli.bench.latencies import Latencies
from runnel.cli.bench.payload import SIZE_MIN, PayloadMaker, RunCheck
from runnel.cli.bench.plan import Received, Sent
from runnel.cli.bench.report import BenchReport, Latency, expected_of, lines, put_together
from runnel.formats.message import Message

RUN = 7


def made(count: int, client: int = 0, topic: int = 0, run: int = RUN) -> list[Message]:
    payloads = PayloadMaker(run, client, topic, 100)
    return [Message("a", payloads.next(), event_time_ns=10 + row) for row in range(count)]


def test_payload_has_the_size_that_was_asked_for() -> None:
    assert {message.size for message in made(3)} == {100}
    assert len(PayloadMaker(RUN, 0, 0, SIZE_MIN).next()) == SIZE_MIN


def test_messages_in_order_are_all_received() -> None:
    arrivals = RunCheck(RUN)
    assert arrivals.take(made(3)) == [10, 11, 12]
    assert (arrivals.received, arrivals.bytes, arrivals.disordered) == (3, 300, 0)


def test_order_is_that_of_each_client_and_topic() -> None:
    arrivals = RunCheck(RUN)
    for parts in zip(made(3), made(3, client=1), made(3, topic=1), strict=True):
        arrivals.take(parts)
    assert (arrivals.received, arrivals.disordered) == (9, 0)


@pytest.mark.parametrize(
    ("order", "received", "disordered"),
    [
        ([0, 2, 1], 2, 1),  # overtaken
        ([0, 1, 1, 2], 3, 1),  # twice
        ([0, 3], 2, 0),  # two are missing, and what came is in order
        ([2, 3, 0, 1], 2, 2),
    ],
)
def test_overtaken_and_repeated_messages_are_disorder(
    order: list[int], received: int, disordered: int
) -> None:
    sent = made(4)
    arrivals = RunCheck(RUN)
    arrivals.take([sent[row] for row in order])
    assert (arrivals.received, arrivals.disordered) == (received, disordered)


def test_messages_of_others_are_set_apart() -> None:
    arrivals = RunCheck(RUN)
    assert arrivals.take([*made(2, run=8), Message("a", b"hello")]) == []
    assert (arrivals.received, arrivals.foreign) == (0, 3)


def received(messages: int, *, disordered: int = 0, told: int = 0) -> Received:
    latencies = Latencies()
    latencies.add([1_000_000] * 999 + [9_000_000])
    return Received(
        subscribers=2,
        messages=messages,
        bytes=messages * 100,
        disordered=disordered,
        told_missed=told,
        foreign=0,
        last_ns=3_000_000_000,
        latencies=tuple(latencies.counts),
    )


def report(arrived: Received) -> BenchReport:
    sent = [
        Sent({"a": 100, "b": 50}, 1_000_000_000, 2_500_000_000),
        Sent({"a": 100}, 1_500_000_000, 2_000_000_000),
    ]
    expected = expected_of(sent, frozenset("a"))
    assert expected == 200
    return put_together(sent, [arrived], clients=2, size=100, expected=expected)


def test_every_message_in_and_out_is_a_command_and_time_runs_to_the_last_arrival() -> None:
    found = report(received(400))
    assert (found.seconds, found.messages_in, found.messages_out) == (2.0, 250, 400)
    assert found.commands_per_s == 325
    assert (found.messages_in_per_s, found.megabytes_out_per_s) == (125, 0.02)
    assert found.is_sound
    assert isinstance(found.latency, Latency)
    assert found.latency.p50_ns == pytest.approx(1_000_000, rel=0.02)


def test_report_is_written_in_lines() -> None:
    assert lines(report(received(400))) == [
        "2 clients in 2 processes, 2 subscribers, 2.00 s",
        "commands  325/s",
        "in        250 messages, 125/s, 0.01 MB/s",
        "out       400 messages, 200/s, 0.02 MB/s",
        "latency   p50 997 µs, p99 997 µs, p99.9 997 µs",
        "checked   nothing lost, everything in order",
    ]


def test_loss_and_disorder_are_counted_over_all_subscribers() -> None:
    found = report(received(390, disordered=3, told=8))
    assert not found.is_sound
    assert lines(found)[-1] == "checked   10 LOST (8 of them reported as gaps), 3 OUT OF ORDER"


def test_disorder_alone_is_not_sound() -> None:
    assert not report(received(400, disordered=1)).is_sound
