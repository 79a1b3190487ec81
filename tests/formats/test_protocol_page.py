"""docs/protocol.md says what the code does: its example, its program and its numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from runnel.formats import block, columns, envelope, ksuid
from runnel.formats.batch import Batch
from runnel.formats.message import Message

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")

MESSAGES = [
    Message(
        "sensors/a",
        b"21.5",
        key=b"a",
        tags={"unit": "C"},
        event_time_ns=1_700_000_000_000_000_000,
        transmit_time_ns=1_700_000_000_001_000_000,
        partition_key=b"a",
    ),
    Message(
        "sensors/a",
        b"21.75",
        event_time_ns=1_700_000_000_000_500_000,
        transmit_time_ns=1_700_000_000_001_000_000,
    ),
]


def fenced(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


def example() -> bytes:
    """The bytes of the page's example; each line says at which it begins."""
    data = b""
    for line in filter(str.strip, fenced("hex").splitlines()):
        parts = re.match(r" *(\d+)  ((?:[0-9a-f]{2} ?)+)", line)
        assert parts is not None, line
        assert int(parts[1]) == len(data), line
        data += bytes.fromhex(parts[2])
    return data


def test_the_example_is_what_the_code_writes_and_reads() -> None:
    assert Batch.from_messages(MESSAGES).pack() == example()
    assert Batch.unpack(example()).messages() == MESSAGES


def test_the_columns_and_fields_are_those_of_the_code() -> None:
    body, head = PAGE.split("## Body")[1], PAGE.split("## Envelope")[1]
    for text, names in (
        (body, columns._Layout.__struct_fields__),
        (head, envelope.Envelope.__struct_fields__),
    ):
        assert (
            tuple(re.findall(r"^\d+ +[a-z/]+(?: \d+)? +(\w+)", text.split("```")[1], re.M)) == names
        )


def test_the_program_writes_blocks_that_the_code_reads() -> None:
    names: dict[str, Callable[..., bytes]] = {}
    exec(fenced("python"), names)
    make_block = names["make_block"]
    plain = [Message("t", b"1", event_time_ns=5, transmit_time_ns=5)]
    assert Batch.unpack(make_block("t", [b"1"], [], 5)).messages() == plain
    keys = [b"k", b"", b"kk"]
    keyed = Batch.unpack(make_block("größe", [b"1", b"22", b""], keys, 5))
    assert [(message.key, message.payload) for message in keyed] == [
        (b"k", b"1"),
        (b"", b"22"),
        (b"kk", b""),
    ]
    assert Batch.from_messages(keyed.messages()).uncompressed().envelope.topics == ["größe"]


def test_the_limits_are_those_of_the_code() -> None:
    assert columns.TAGS_MAX == 64
    assert envelope.RUNS_MAX == 65_536
    assert envelope.BODY_BYTES_CEILING == 64 * 2**20
    assert block.ENVELOPE_BYTES_MAX == 32 * 2**20
    assert envelope.OFFSET_MAX == 2**63 - 2**32
    assert envelope.ROW_MAX == 2**30
    for figure in ("| 64 |", "65,536", "64 MiB", "32 MiB", "2^63 - 2^32", "2^30"):
        assert figure in PAGE


def test_the_ksuid_is_right() -> None:
    ((uid, text),) = re.findall(r"`([0-9A-F]{40})`\s+is\s+`(\w{27})`", PAGE)
    assert ksuid.to_text(bytes.fromhex(uid)) == text
    assert ksuid.time_s(bytes.fromhex(uid)) == 1_507_608_047
