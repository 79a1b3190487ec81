"""Wrong tokens are answered later and later; what waits is bounded."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from runnel.client import connect
from runnel.security.penalties import Penalties, origin_of
from tests.fakes.clock import NS_PER_SECOND, VirtualClock
from tests.protocols.native.talker import in_loop, turn


@pytest.mark.parametrize(
    ("address", "origin"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("192.0.2.1:50123", "192.0.2.1"),
        ("ipv4:192.0.2.1:50123", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("[::ffff:192.0.2.1]:50123", "192.0.2.1"),
        ("::1", "::1"),
        ("[::1]:50123", "::1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("[2001:db8:1:2::9]:50123", "2001:db8:1:2::/64"),
        ("ipv6:%5B2001:db8:1:2::9%5D:50123", "2001:db8:1:2::/64"),
        ("[fe80::1%eth0]:50123", "fe80::/64"),
        ("?", "?"),
        ("x" * 1000, "x" * 64),
    ],
)
def test_ports_and_neighbouring_addresses_are_one_origin(address: str, origin: str) -> None:
    assert origin_of(address) == origin


async def waited_s(penalties: Penalties, clock: VirtualClock, address: str) -> float:
    """How long one wrong token waits for its answer."""
    waiting = asyncio.ensure_future(penalties.wait(address))
    begin_ns = clock.monotonic_ns()
    await turn()
    while not waiting.done():
        clock.advance(NS_PER_SECOND // 20)
        await turn()
    return (clock.monotonic_ns() - begin_ns) / NS_PER_SECOND


@in_loop
async def test_each_further_one_waits_longer_up_to_a_limit() -> None:
    clock = VirtualClock()
    penalties = Penalties(clock)
    waits = [await waited_s(penalties, clock, f"192.0.2.1:{port}") for port in range(9)]
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2, 2, 2, 2])
    assert await waited_s(penalties, clock, "192.0.2.2:1") == pytest.approx(0.1)
    assert penalties.failure_count == 10


@in_loop
async def test_the_longest_wait_leaves_a_client_most_of_its_time_to_be_told() -> None:
    patience_s = inspect.signature(connect).parameters["connect_timeout_s"].default
    clock = VirtualClock()
    penalties = Penalties(clock)
    longest_s = max([await waited_s(penalties, clock, "192.0.2.1") for _ in range(20)])
    assert longest_s < patience_s / 2


@in_loop
async def test_what_is_only_noted_is_counted_and_told_of_and_waits_for_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    penalties = Penalties(VirtualClock(), "no token was shown")
    for port in range(3):
        penalties.note(f"192.0.2.1:{port}")
    assert (penalties.failure_count, penalties.waiting_count) == (3, 0)
    assert told(caplog) == [
        "no token was shown address=192.0.2.1 times=1",
        "no token was shown address=192.0.2.1 times=2",
    ]


@in_loop
async def test_an_address_that_was_quiet_for_a_minute_is_forgiven() -> None:
    clock = VirtualClock()
    penalties = Penalties(clock)
    for _ in range(5):
        await waited_s(penalties, clock, "192.0.2.1")
    clock.advance(61 * NS_PER_SECOND)
    assert await waited_s(penalties, clock, "192.0.2.1") == pytest.approx(0.1)


@in_loop
async def test_of_many_at_a_time_a_few_wait_and_the_others_are_answered_at_once() -> None:
    penalties = Penalties(VirtualClock())
    tries = [asyncio.ensure_future(penalties.wait("192.0.2.1")) for _ in range(1000)]
    await turn()
    assert penalties.waiting_count == 8
    assert sum(each.done() for each in tries) == 992
    for each in tries:
        each.cancel()
    await turn()
    assert penalties.waiting_count == 0


@in_loop
async def test_of_many_addresses_no_more_wait_than_a_limit() -> None:
    penalties = Penalties(VirtualClock())
    tries = [
        asyncio.ensure_future(penalties.wait(f"10.0.{n // 256}.{n % 256}")) for n in range(2000)
    ]
    await turn()
    assert penalties.waiting_count == 1000
    for each in tries:
        each.cancel()
    await turn()
    assert penalties.waiting_count == 0


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@in_loop
async def test_what_is_remembered_and_told_is_bounded_however_many_addresses_there_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = VirtualClock()
    penalties = Penalties(clock)
    tries = [
        asyncio.ensure_future(penalties.wait(f"10.{n // 65536}.{n // 256 % 256}.{n % 256}"))
        for n in range(11_000)
    ]
    await turn()
    assert len(penalties._failures) == 10_000  # memory has no other face
    assert len(told(caplog)) == 60
    assert told(caplog)[0] == "a token was refused address=10.0.0.0 times=1"
    clock.advance(61 * NS_PER_SECOND)
    await asyncio.gather(*tries)
    await waited_s(penalties, clock, "192.0.2.1")
    assert told(caplog)[60:] == ["a token was refused address=192.0.2.1 times=1"]


@in_loop
async def test_one_address_is_told_of_at_the_first_second_fourth_time_and_so_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = VirtualClock()
    penalties = Penalties(clock)
    for _ in range(20):
        await waited_s(penalties, clock, "192.0.2.1")
    assert [line.rpartition("=")[2] for line in told(caplog)] == ["1", "2", "4", "8", "16"]
