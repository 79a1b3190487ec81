"""docs/reference/python.md: the public Python API, from signatures, docstrings and the comments beside fields."""

from __future__ import annotations

import ast
import enum
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

import msgspec

import runnel
import runnel.client
import runnel.spark
import runnel.testing
from runnel import errors
from runnel.client import Opening, ShardPage
from runnel.formats import wire, work_heads
from runnel.log import reading
from runnel.testing.cluster import EmbeddedCluster, EmbeddedNode
from tools.reference.markdown import code, head, page, prose, table

_WIDTH: Final = 100


class Shown(NamedTuple):
    """A class or function, the name that it is imported by, and, if not all of them, its members.

    Of a class with a twin, members that are called as the twin's are named and not repeated.
    """

    thing: Any
    name: str
    members: Sequence[str] | None = None
    twin: type | None = None


class ApiPart(NamedTuple):
    title: str
    text: str
    shown: Sequence[Shown]


# Classes whose public methods are partly for other modules of the library: what programs use of them.
_PUBLISHER: Final = ("open", "send", "submit", "ready", "flush", "close", "buffered_bytes")
_SUBSCRIPTION: Final = ("open", "batches", "to_arrow", "close")
_CONSUMER: Final = (
    *("open", "batches", "ack", "ack_up_to", "nack", "extend", "flush", "process"),
    *("process_batches", "close", "mode", "statistics"),
)
_WORK: Final = (
    *("topic", "partition", "offset", "key", "payload", "tags", "event_time_ns", "receive_time_ns"),
    *("failures", "delivery_count", "first_delivery_ns", "is_late", "ack", "nack", "extend"),
)
_WORK_BATCH: Final = ("topic", "partition", "works", "ack", "nack", "extend")
_BATCH: Final = ("messages", "to_arrow", "from_messages")

PARTS: Final = (
    ApiPart(
        "Connecting",
        "`runnel.connect` for asyncio, `runnel.connect_blocking` without `await`. Both are also in `runnel.client`.",
        (
            Shown(runnel.connect, "runnel.connect"),
            Shown(runnel.connect_blocking, "runnel.connect_blocking"),
            Shown(Opening, "Opening", ()),
        ),
    ),
    ApiPart(
        "The bus",
        "What `connect` gives. Every verb of the broker is one of its methods.",
        (Shown(runnel.client.Bus, "runnel.client.Bus"),),
    ),
    ApiPart(
        "Publishing, reading, working",
        "What the verbs of the bus give.",
        (
            Shown(runnel.client.Publisher, "runnel.client.Publisher", _PUBLISHER),
            Shown(runnel.client.Subscription, "runnel.client.Subscription", _SUBSCRIPTION),
            Shown(runnel.Consumer, "runnel.Consumer", _CONSUMER),
            Shown(runnel.Work, "runnel.Work", _WORK),
            Shown(runnel.WorkBatch, "runnel.WorkBatch", _WORK_BATCH),
            Shown(runnel.LateWork, "runnel.LateWork"),
            Shown(runnel.client.ConsumerStatistics, "runnel.client.ConsumerStatistics"),
        ),
    ),
    ApiPart(
        "Messages and answers",
        "Values that are handed out; none of them can be changed.",
        (
            Shown(runnel.Message, "runnel.Message"),
            Shown(runnel.Batch, "runnel.Batch", _BATCH),
            Shown(runnel.client.Receipt, "runnel.client.Receipt"),
            Shown(runnel.client.BatchReceipt, "runnel.client.BatchReceipt"),
            Shown(runnel.client.Page, "runnel.client.Page"),
            Shown(ShardPage, "runnel.client.ShardPage"),
            Shown(runnel.client.Gap, "runnel.client.Gap"),
            Shown(runnel.client.DeadLetterPage, "runnel.client.DeadLetterPage"),
            Shown(wire.Welcome, "runnel.formats.wire.Welcome"),
            Shown(wire.TopicState, "runnel.formats.wire.TopicState"),
            Shown(wire.PartitionState, "runnel.formats.wire.PartitionState"),
            Shown(wire.CursorState, "runnel.formats.wire.CursorState"),
            Shown(wire.CursorPlace, "runnel.formats.wire.CursorPlace"),
            Shown(wire.ShardState, "runnel.formats.wire.ShardState"),
            Shown(wire.Route, "runnel.formats.wire.Route"),
            Shown(work_heads.SubscriptionState, "runnel.formats.work_heads.SubscriptionState"),
            Shown(work_heads.MemberState, "runnel.formats.work_heads.MemberState"),
            Shown(work_heads.PartitionWork, "runnel.formats.work_heads.PartitionWork"),
        ),
    ),
    ApiPart(
        "Without await",
        "The same verbs; each call returns when it is done.",
        (
            Shown(runnel.client.BlockingBus, "runnel.client.BlockingBus", twin=runnel.client.Bus),
            Shown(
                runnel.client.BlockingPublisher,
                "runnel.client.BlockingPublisher",
                twin=runnel.client.Publisher,
            ),
            Shown(
                runnel.client.BlockingSubscription,
                "runnel.client.BlockingSubscription",
                twin=runnel.client.Subscription,
            ),
            Shown(
                runnel.client.BlockingConsumer,
                "runnel.client.BlockingConsumer",
                twin=runnel.client.Consumer,
            ),
            Shown(runnel.client.BlockingWork, "runnel.client.BlockingWork", _WORK, runnel.Work),
            Shown(
                runnel.client.BlockingWorkBatch,
                "runnel.client.BlockingWorkBatch",
                _WORK_BATCH,
                runnel.WorkBatch,
            ),
        ),
    ),
    ApiPart(
        "A broker in the program, and in a test",
        "Where Runnel is installed, pytest has the fixtures `runnel_broker` and `runnel_settings` by itself.",
        (
            Shown(runnel.Broker, "runnel.Broker"),
            Shown(runnel.testing.open_broker, "runnel.testing.open_broker"),
            Shown(runnel.testing.BrokerThread, "runnel.testing.BrokerThread"),
            Shown(runnel.testing.open_cluster, "runnel.testing.open_cluster"),
            Shown(EmbeddedCluster, "runnel.testing.cluster.EmbeddedCluster"),
            Shown(EmbeddedNode, "runnel.testing.cluster.EmbeddedNode"),
            Shown(runnel.testing.VirtualClock, "runnel.testing.VirtualClock"),
        ),
    ),
    ApiPart(
        "Data directories without a broker",
        "`runnel.log.reading` only reads, takes no lock, and may be used beside a broker.",
        (Shown(reading.OfflineLog, "runnel.log.reading.OfflineLog"),),
    ),
    ApiPart(
        "Spark",
        "`pip install '.[spark]'`. The format `runnel` of `spark.read`, `readStream`, `write` and `writeStream`, and "
        "its options, are in [pipeline.md](../pipeline.md).",
        tuple(
            Shown(getattr(runnel.spark, name), f"runnel.spark.{name}")
            for name in runnel.spark.__all__
            if not inspect.ismodule(getattr(runnel.spark, name))
        ),
    ),
)


def python_page() -> str:
    lines = head(
        "The Python API",
        "Everything that programs import. [python.md](../python.md) explains it with examples that are run; this "
        "page is for looking up a signature.",
    )
    contents = [
        (part.title, ", ".join(code(shown.name.rpartition(".")[2]) for shown in part.shown))
        for part in PARTS
    ]
    lines += table(
        ("part", "what it has"),
        [*contents, ("Errors", "every error, its code, and whether to try again")],
    )
    for part in PARTS:
        lines += [f"## {part.title}", "", *prose(part.text)]
        for shown in part.shown:
            lines += _thing(shown)
    lines += _errors()
    return page(lines)


def _thing(shown: Shown) -> list[str]:
    lines = [f"### {shown.name}", ""]
    if not isinstance(shown.thing, type):
        name = shown.name.rpartition(".")[2]
        return [*lines, *_signature(name, shown.thing), *prose(inspect.getdoc(shown.thing) or "")]
    lines += prose(_own_words(shown.thing))
    if fields := _fields(shown.thing):
        has_words = any(meaning for _, _, meaning in fields)
        width = 3 if has_words else 2
        lines += table(("field", "type", "meaning")[:width], [row[:width] for row in fields])
    lines += _members(shown)
    return lines


def _members(shown: Shown) -> list[str]:
    found = dict(public_members(shown.thing))
    names = found if shown.members is None else shown.members
    twins = dict(public_members(shown.twin)) if shown.twin else {}
    alike = [name for name in names if name in twins and _is_alike(found[name], twins[name])]
    rows, methods = [], []
    if shown.twin and alike:
        listed = ", ".join(map(code, alike))
        methods += prose(f"As those of `{shown.twin.__name__}`: {listed}.")
    for name in names:
        if name in alike:
            continue
        member = found[name]
        words = " ".join(_words(member).split())
        if isinstance(member, property | cached_property):
            function = member.fget if isinstance(member, property) else member.func
            rows.append((code(name), code(_returned(function)), words))
        else:
            plain = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            methods += [f"#### {shown.thing.__name__}.{name}", ""]
            methods += _signature(name, plain, owner=member)
            methods += prose(_words(member))
    return [*table(("property", "type", "meaning"), rows), *methods]


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, property) or isinstance(other, property):
        return isinstance(one, property) and isinstance(other, property)
    first, second = inspect.signature(one).parameters, inspect.signature(other).parameters
    return [*map(str, first.values())] == [*map(str, second.values())]


def public_members(cls: type) -> Iterator[tuple[str, Any]]:
    """Our own public methods and properties, those of the class itself first."""
    seen = set(getattr(cls, "__struct_fields__", ()))
    for owner in cls.__mro__:
        if not owner.__module__.startswith("runnel"):
            continue
        for name, member in vars(owner).items():
            plain = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            is_member = inspect.isfunction(plain) or isinstance(member, property | cached_property)
            if is_member and not name.startswith("_") and name not in seen:
                seen.add(name)
                yield name, member


def _words(member: Any) -> str:
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, cached_property):
        member = member.func
    elif isinstance(member, classmethod | staticmethod):
        member = member.__func__
    return inspect.getdoc(member) or ""


def _own_words(cls: type) -> str:
    """Its own docstring. msgspec and others invent one where there is none."""
    return inspect.cleandoc(vars(cls).get("__doc__") or "")


def _returned(function: Callable[..., Any] | None) -> str:
    assert function is not None
    return str(function.__annotations__.get("return", ""))


def _signature(name: str, function: Callable[..., Any], owner: Any = None) -> list[str]:
    """The signature as a stub. A long one is in a block that tests do not run: its types are not defined there."""
    signature = inspect.signature(function)
    parameters = [
        _parameter(each)
        for each in signature.parameters.values()
        if each.name not in ("self", "cls")
    ]
    stars = _with_stars(list(signature.parameters.values()), parameters)
    word = "async def" if inspect.iscoroutinefunction(inspect.unwrap(function)) else "def"
    is_context = hasattr(function, "__wrapped__") and "AsyncIterator" in _returned(function)
    returned = str(signature.return_annotation)
    if is_context:
        word, returned = "def", returned.replace("AsyncIterator", "AbstractAsyncContextManager")
    if "AsyncIterator" in returned and not is_context:
        word = "def"
    made = f"@{type(owner).__name__}" if isinstance(owner, classmethod | staticmethod) else ""
    line = f"{made} {word} {name}({', '.join(stars)}) -> {returned}".strip()
    if len(line) <= _WIDTH:
        return [code(line), ""]
    inside = textwrap.indent(",\n".join(stars), "    ")
    block = f"{made}\n{word} {name}(\n{inside},\n) -> {returned}: ...".strip()
    return ["<!-- only parsed: a signature -->", "```python", block, "```", ""]


def _parameter(parameter: inspect.Parameter) -> str:
    text = parameter.name
    if parameter.kind is parameter.VAR_POSITIONAL:
        text = f"*{text}"
    elif parameter.kind is parameter.VAR_KEYWORD:
        text = f"**{text}"
    if parameter.annotation is not parameter.empty:
        text += f": {parameter.annotation}"
    if parameter.default is not parameter.empty:
        text += f" = {_default(parameter.default)}"
    return text


def _default(value: object) -> str:
    # Defaults without a literal form, such as functions, are shown as `...`.
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:_}"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return "..."
    return text


def _with_stars(parameters: Sequence[inspect.Parameter], texts: Sequence[str]) -> list[str]:
    kinds = [each.kind for each in parameters if each.name not in ("self", "cls")]
    found = list(texts)
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        found.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    if inspect.Parameter.POSITIONAL_ONLY in kinds:
        found.insert(kinds.count(inspect.Parameter.POSITIONAL_ONLY), "/")
    return found


_FIELD: Final = re.compile(r"^    (\w+): [^#\n]*?(?:  # ?(.*))?$", re.MULTILINE)


def _fields(cls: type) -> list[tuple[str, str, str]]:
    """The fields of a struct: name, type with default, and the comment beside it."""
    if not issubclass(cls, msgspec.Struct):
        return []
    comments: dict[str, str] = {}
    for owner in cls.__mro__:
        if owner.__module__.startswith("runnel"):
            for name, said in _FIELD.findall(inspect.getsource(owner)):
                comments.setdefault(name, said)
    rows = []
    for owner_field in msgspec.structs.fields(cls):
        name = owner_field.name
        kind = _annotation(cls, name)
        if kind == "Id":  # of a frame, and not public
            continue
        if owner_field.default is not msgspec.NODEFAULT:
            kind += f" = {_default(owner_field.default)}"
        rows.append((code(name), code(kind), comments.get(name, "")))
    return rows


def _annotation(cls: type, name: str) -> str:
    for owner in cls.__mro__:
        if name in vars(owner).get("__annotations__", {}):
            return str(vars(owner)["__annotations__"][name])
    return ""


def _errors() -> list[str]:
    lines = ["## Errors", ""]
    lines += prose(
        "All of them are in `runnel.errors`, those that programs meet most also in `runnel`. `error.code` is stable, "
        "and the same over every protocol; `error.retriable` says whether the same request may succeed later."
    )
    rows = [
        (
            "&nbsp;" * 4 * depth + code(kind.__name__),
            code(kind.code),
            "yes" if kind.retriable else "",
            " ".join(_own_words(kind).split()),
        )
        for depth, kind in _kinds(errors.RunnelError, 0)
    ]
    return [*lines, *table(("error", "code", "try again", "meaning"), rows)]


def _kinds(
    kind: type[errors.RunnelError], depth: int
) -> Iterator[tuple[int, type[errors.RunnelError]]]:
    yield depth, kind
    for narrower in kind.__subclasses__():
        if narrower.__module__ == errors.__name__:
            yield from _kinds(narrower, depth + 1)
