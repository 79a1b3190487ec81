"""What a subscription is: modes, options and their checks, and the form in which the catalogue keeps it."""

from __future__ import annotations

import math

import msgspec
import pytest

from runnel.errors import ClientFault, MalformedError
from runnel.formats.work_heads import WorkOptions
from runnel.group_rules.definition import (
    Definition,
    MemberRecord,
    Mode,
    SubscriptionOptions,
    decode,
    encode,
)

MS = 1_000_000
SECOND = 1_000 * MS


def refusal(**options: float) -> str:
    with pytest.raises(ClientFault) as caught:
        SubscriptionOptions(**options)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_mode_is_known_by_its_name() -> None:
    assert [Mode.checked(text) for text in ("shared", "key_shared", "multicast")] == list(Mode)


def test_another_mode_is_refused_with_the_three_there_are() -> None:
    with pytest.raises(ClientFault, match="'solo' is none of shared, key_shared, multicast"):
        Mode.checked("solo")


def test_delays_grow_by_the_backoff_up_to_their_maximum() -> None:
    options = SubscriptionOptions(
        retry_delay_ns=SECOND, backoff=3.0, retry_delay_ns_max=20 * SECOND
    )
    delays = [options.delay_ns(failures) // SECOND for failures in (1, 2, 3, 4, 5)]
    assert delays == [1, 3, 9, 20, 20]


def test_delays_stay_at_their_maximum_however_often_a_message_fails() -> None:
    assert SubscriptionOptions().delay_ns(10**9) == SubscriptionOptions().retry_delay_ns_max
    assert SubscriptionOptions(retry_delay_ns=0).delay_ns(10**9) == 0
    assert SubscriptionOptions(backoff=1.0).delay_ns(10**9) == SECOND


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"lease_ns": 99 * MS},
            "lease of 99 ms is too short to be renewed in time: 100 ms or more",
        ),
        (
            {"lease_ns": 2 * SECOND, "processing_ns_max": SECOND},
            "processing_max of 1000 ms is shorter than the lease of 2000 ms",
        ),
        (
            {"retry_delay_ns": 2 * SECOND, "retry_delay_ns_max": SECOND},
            "retry_delay_max of 1000 ms is shorter than the retry_delay of 2000 ms",
        ),
        ({"deliveries_max": -1}, "deliveries_max of -1 is no count"),
        ({"backoff": 0.5}, "backoff of 0.5: it must be a number of 1 or more"),
        ({"backoff": math.nan}, "backoff of nan"),
        ({"backoff": math.inf}, "backoff of inf"),
        ({"absent_ns_max": -1}, "absent_max of"),
        ({"retry_delay_ns_max": 2**62}, "is not within 0 and 10 years"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, float], said: str) -> None:
    assert said in refusal(**options)


def test_what_a_client_leaves_out_is_the_default() -> None:
    assert SubscriptionOptions.of(None) == SubscriptionOptions()
    assert SubscriptionOptions.of(WorkOptions()) == SubscriptionOptions()
    assert SubscriptionOptions.of(
        WorkOptions(lease_ms=500, deliveries_max=0)
    ) == SubscriptionOptions(lease_ns=500 * MS, deliveries_max=0)


def test_a_ceiling_that_was_left_out_gives_way() -> None:
    options = SubscriptionOptions.of(WorkOptions(lease_ms=7_200_000, retry_delay_ms=600_000))
    assert options.processing_ns_max == options.lease_ns == 7_200 * SECOND
    assert options.retry_delay_ns_max == options.retry_delay_ns == 600 * SECOND


def test_a_ceiling_that_was_given_does_not() -> None:
    with pytest.raises(ClientFault, match="retry_delay_max of 1000 ms is shorter"):
        SubscriptionOptions.of(WorkOptions(retry_delay_ms=2_000, retry_delay_ms_max=1_000))


def test_options_travel_to_the_client_and_back() -> None:
    options = SubscriptionOptions(lease_ns=SECOND, deliveries_max=3, backoff=1.5, absent_ns_max=0)
    assert SubscriptionOptions.of(options.to_wire()) == options
    assert None not in msgspec.structs.astuple(options.to_wire())


def test_a_definition_is_read_as_it_was_written() -> None:
    definition = Definition(
        id=7,
        name="billing",
        patterns=("orders/*", "refunds"),
        mode=Mode.MULTICAST,
        options=SubscriptionOptions(deliveries_max=0),
        is_paused=True,
        made_ns=5,
        members=(MemberRecord("a", 1), MemberRecord("b", 2, absent_since_ns=3)),
    )
    assert decode(encode(definition)) == definition


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1, "a", ["*"], "solo", {}]),
        msgspec.msgpack.encode([1, "a", ["*"], "shared", {"backoff": 0.1}]),
    ],
)
def test_what_is_no_definition_is_malformed(content: bytes) -> None:
    with pytest.raises(MalformedError, match="subscription definition"):
        decode(content)
