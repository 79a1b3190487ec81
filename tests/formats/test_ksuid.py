"""KSUIDs as bytes and as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnel.errors import MalformedError
from runnel.formats import ksuid

UIDS = st.binary(min_size=20, max_size=20)

KNOWN = [
    ("000000000000000000000000000", bytes(20)),
    ("aWgEPTl1tmebfsQzFP4bxwgy80V", b"\xff" * 20),
    ("0ujtsYcgvSTl8PAuAdqWYSMnLOv", bytes.fromhex("0669F7EFB5A1CD34B5F99D1154FB6853345C9735")),
]


@pytest.mark.parametrize(("text", "uid"), KNOWN)
def test_known_pairs_of_text_and_bytes(text: str, uid: bytes) -> None:
    assert ksuid.to_text(uid) == text
    assert ksuid.from_text(text) == uid


def test_the_time_is_counted_from_its_own_epoch() -> None:
    assert ksuid.time_s(KNOWN[2][1]) == 1_507_608_047
    assert ksuid.make(1_507_608_047, KNOWN[2][1][4:]) == KNOWN[2][1]
    assert ksuid.time_s(bytes(20)) == 1_400_000_000


@given(UIDS, UIDS)
def test_text_sorts_as_bytes_do(first: bytes, second: bytes) -> None:
    texts = ksuid.to_text(first), ksuid.to_text(second)
    assert (texts[0] < texts[1]) == (first < second)
    assert tuple(map(ksuid.from_text, texts)) == (first, second)


@pytest.mark.parametrize(
    "text", ["", "0" * 26, "0" * 28, "0" * 26 + "-", "0" * 26 + "ä", "z" * 27, "0" * 1_000_000]
)
def test_text_that_is_no_ksuid_is_refused(text: str) -> None:
    with pytest.raises(MalformedError, match="uid"):
        ksuid.from_text(text)


def test_bytes_that_are_no_ksuid_are_refused() -> None:
    for uid in (b"", bytes(19), bytes(21)):
        with pytest.raises(MalformedError):
            ksuid.to_text(uid)
        with pytest.raises(MalformedError):
            ksuid.time_s(uid)
    for time_s, chance in ((1_399_999_999, bytes(16)), (2**33, bytes(16)), (1_500_000_000, b"")):
        with pytest.raises(MalformedError):
            ksuid.make(time_s, chance)
