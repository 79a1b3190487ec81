"""docs/protocol.md describes the native protocol as the code has it: fields, defaults, codes and an exchange."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from msgspec import inspect

from runnel import errors
from runnel.config import Settings
from runnel.errors import RunnelError
from runnel.formats import cluster_heads, heads, wire, work_heads
from runnel.formats.batch import Batch
from runnel.formats.envelope import pack64
from runnel.formats.frames import Frame, FrameReader
from runnel.formats.message import Message
from runnel.protocols.native.requests import PARTS_MAX
from runnel.topics.pattern_index import PATTERNS_PER_SUBSCRIBER_MAX

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
NATIVE = PAGE.split("## The native protocol")[1].split("\n## ")[0]
HEADS: dict[str, type[wire.Head]] = {
    str(kind.__struct_config__.tag): kind
    for kind in (*get_args(wire.Request), *get_args(wire.Answer))
}
VALUES: dict[str, type[msgspec.Struct]] = {
    kind.__name__: kind
    for module in (heads, wire, work_heads, cluster_heads)
    for kind in vars(module).values()
    if isinstance(kind, type)
    and issubclass(kind, msgspec.Struct)
    and kind.__module__ == module.__name__
    and not issubclass(kind, wire.Head)
}
# Failures that no request over a connection meets.
UNTOLD = {"settings", "locked", "connection_lost", "format_version"}

T0 = 1_700_000_000_000_000_000


# --- Tables ---


def rows_under(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its own two lines."""
    section = NATIVE.split(f"\n#### {heading}\n")[1]
    table = section[section.index("\n|") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in table[2:]]


def shown_type(kind: inspect.Type) -> str:
    match kind:
        case inspect.UnionType():
            names = sorted(map(shown_type, kind.types), key=lambda name: (name == "nil", name))
            return (", or " if "map" in names[0] else " or ").join(names)
        case inspect.ListType():
            return f"array of {shown_type(kind.item_type)}"
        case inspect.DictType():
            return f"map of {shown_type(kind.key_type)} to {shown_type(kind.value_type)}"
        case inspect.StructType():
            return kind.cls.__name__
    names_of = {
        inspect.IntType: "int",
        inspect.FloatType: "float",
        inspect.StrType: "str",
        inspect.BytesType: "bin",
        inspect.BoolType: "bool",
        inspect.NoneType: "nil",
    }
    return names_of[type(kind)]


def shown_default(field: inspect.Field) -> str:
    if field.required:
        return ""
    default = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    if default is None:
        return "nil"
    return f"`{msgspec.json.encode(default).decode()}`"


@pytest.mark.parametrize("name", [*HEADS, *VALUES])
def test_the_fields_of_each_head_and_value_are_those_of_the_code(name: str) -> None:
    kind: type[msgspec.Struct] = HEADS[name] if name in HEADS else VALUES[name]
    first = 1 if name in HEADS else 0  # a head's own name is its element 0
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    shown = [row[:4] for row in rows_under(f"`{name}`" if name in HEADS else name)]
    assert shown == [
        [str(number), f"`{field.name}`", shown_type(field.type), shown_default(field)]
        for number, field in enumerate(info.fields, first)
    ]


def test_every_heading_of_a_head_or_value_is_one_of_the_code() -> None:
    headings = re.findall(r"^#### (.+)$", NATIVE, re.M)
    assert len(headings) == len(set(headings))
    assert {heading.strip("`") for heading in headings} == HEADS.keys() | VALUES.keys()


def test_every_link_leads_to_one_heading() -> None:
    headings = re.findall(r"^##+ (.+)$", PAGE, re.M)
    anchors = [re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings]
    for link in re.findall(r"\]\(#([^)]+)\)", PAGE):
        assert anchors.count(link) == 1, link


def test_every_request_and_answer_is_in_the_list_of_pairs() -> None:
    pairs = NATIVE.split("### Requests and answers")[1].split("\n### ")[0]
    for name in HEADS:
        assert f"[`{name}`](#{name})" in pairs


def all_errors(kind: type[RunnelError] = RunnelError) -> Iterator[type[RunnelError]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from all_errors(narrower)


def test_the_codes_of_errors_are_those_of_the_code() -> None:
    shown = dict(re.findall(r"^\| `(\w+)` \| (yes|no) \|", NATIVE, re.M))
    told = {
        kind.code: "yes" if kind.retriable else "no"
        for kind in all_errors()
        if kind.__module__ == errors.__name__ and kind.code not in UNTOLD
    }
    assert shown == told


@pytest.mark.parametrize(
    "error",
    [
        errors.MalformedError("here", "wrong"),
        errors.OffsetGoneError("t", 0, 1, 8),
        errors.OffsetAheadError("t", 0, 9, 8),
        errors.CorruptionError("f", 1, "torn"),
    ],
)
def test_the_details_of_errors_are_those_of_the_code(error: RunnelError) -> None:
    (shown,) = re.findall(rf"^\| `{error.code}` \| no \|[^|]+\| (.+) \|$", NATIVE, re.M)
    assert re.findall(r"`(\w+)`", shown) == list(errors.details_of(error))


# --- The conversation and the exchange ---


def test_the_conversation_is_made_of_heads_of_the_code() -> None:
    (text,) = re.findall(r"```conversation\n(.*?)```", PAGE, re.DOTALL)
    said = [
        re.fullmatch(r"(client|broker)  (\[.*\])( +\+ 2 blocks)?", line)
        for line in text.splitlines()
    ]
    for each in said:
        assert each is not None
        head = msgspec.msgpack.encode(msgspec.json.decode(each[2]))
        decode = wire.decode_request if each[1] == "client" else wire.decode_answer
        decode(Frame(memoryview(head), memoryview(b"")))


def exchange() -> list[tuple[str, bytes]]:
    """Who says what, and the frame; each line says at which byte of its frame it begins."""
    (text,) = re.findall(r"```exchange\n(.*?)```", PAGE, re.DOTALL)
    told: list[tuple[str, bytes]] = []
    for line in filter(str.strip, text.splitlines()):
        parts = re.match(r" *(\d+)  ((?:[0-9a-f]{2} ?)+)", line)
        if parts is None:
            assert re.fullmatch(r"(client|broker): \w+", line), line
            told.append((line, b""))
            continue
        title, data = told.pop()
        assert int(parts[1]) == len(data), line
        told.append((title, data + bytes.fromhex(parts[2])))
    return told


def test_the_exchange_is_what_the_code_says_and_understands() -> None:
    message = Message("sensors/a", b"21.5", key=b"a", tags={"unit": "C"}, event_time_ns=T0)
    expected: list[wire.Head] = [
        wire.Hello(1, 1, [], "example/1.0"),
        wire.Welcome(1, 1, [], "runnel", "node-1", "runnel/0.1.0", 2**24, 2**22, 2**20, 60_000),
        wire.Send(2, None, "sensors/a", b"21.5", b"a", {"unit": "C"}, T0),
        wire.Published(2, [1], 1, 1, T0 + 5_000_000, "stored"),
        wire.Fetch(3, "sensors/a", 0, 1),
        wire.Fetched(3, 2, 1, 2, []),
    ]
    batch = Batch.from_messages([message])
    batch.envelope = msgspec.structs.replace(
        batch.envelope,
        base_offsets=pack64([1]),
        receive_times=pack64([T0 + 5_000_000]),
        epochs=pack64([1]),
        entries=pack64([1]),
    )
    for (title, data), head in zip(exchange(), expected, strict=True):
        (frame,) = FrameReader(2**20).feed(data)
        side, name = title.split(": ")
        decode = wire.decode_request if side == "client" else wire.decode_answer
        assert decode(frame) == head
        assert HEADS[name] is type(head)
        assert bytes(frame.tail) == (batch.pack() if name == "fetched" else b"")
        if side == "broker":
            assert wire.encode(head, len(frame.tail)) + bytes(frame.tail) == data


def test_the_version_and_port_are_those_of_the_code() -> None:
    assert f"by default to port {wire.DEFAULT_PORT}" in NATIVE
    assert f"of this protocol that the client speaks: {wire.VERSION}" in NATIVE


def test_the_limits_are_those_of_the_code() -> None:
    native, broker = Settings().native, Settings().broker
    assert native.frame_bytes_max == 16 * 2**20
    assert native.subscriptions_max == PATTERNS_PER_SUBSCRIBER_MAX == 1024
    assert native.consumers_max == 1000
    assert PARTS_MAX == 100_000
    assert native.requests_max == 4096
    assert Settings().limits.cursor_places_max == 10_000
    assert Settings().limits.durable_subscriptions_max == 10_000
    assert native.handshake_timeout_ns == 5 * 10**9
    assert native.idle_timeout_ns == broker.fetch_wait_max_ns == 60 * 10**9
    for shown in (
        "| 16 MiB, unless `native.frame_bytes_max`",
        "| 1,024, unless `native.subscriptions_max`",
        "| patterns of a subscription | 1,024 |",
        "| 1,000, unless `native.consumers_max`",
        "| 10,000, unless `limits.durable_subscriptions_max`",
        "offsets in one `dead_settle` | 100,000 |",
        "| 4,096, unless `native.requests_max`",
        "| topics in one `routes` | 10,000 |",
        "| 10,000, unless `limits.cursor_places_max`",
        "| patterns of a cursor's place | 1,024; of all its places together 100,000 |",
        "| one fetch | 4 MiB,",
        "prepared at a time | 8;",
        "| 5 s, unless `native.handshake_timeout`",
        "| 60 s, unless `native.idle_timeout`",
        "| 60 s, unless `broker.fetch_wait_max`",
    ):
        assert shown in PAGE
