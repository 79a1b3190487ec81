"""A data directory with everything in it: how the last Runnel of format 1 made it, and what any Runnel says of it.

`closed.tar.gz` was closed in good order, `killed.tar.gz` is the same as a killed process leaves it. `facts.json` is
what `facts` said of both. Run as a program by a Runnel of format 1, from the root of its source, this makes them anew:

    python tests/log/format_one/world.py tests/log/format_one
"""

from __future__ import annotations

import asyncio
import json
import sys
import tarfile
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from runnel.client import Bus
from runnel.config import LogSettings, Pin, Retain, Rotate, Settings, TopicRule, Until
from runnel.embedded import Broker
from runnel.errors import RunnelError
from runnel.formats.batch import Batch
from runnel.formats.envelope import Codec
from runnel.formats.message import Message

RULES: Final = (
    TopicRule(match="orders/*", partitions=2, journal="orders", rotate=Rotate(bytes_max=2048)),
    TopicRule(
        match="state/*",
        journal="state",
        last_value=True,
        rotate=Rotate(bytes_max=1024),
        retain=Retain(bytes_max=4096),
        pin=Pin(bytes_max=8192),
    ),
    TopicRule(match="acked/*", journal="acked", retain=Retain(until=Until.ACKED)),
    TopicRule(match="own/*", journal="{topic}"),
    TopicRule(match="wide/*", partitions=4, journal="wide"),
    TopicRule(match="*", journal="main"),
)
STATES: Final = [f"state/{letter}" for letter in "abcd"]
BEGUN_NS: Final = 1_700_000_000_000_000_000


def settings(directory: str, journal_shards: int = 1) -> Settings:
    log = LogSettings(allocate_bytes=0, disk_reserve_bytes=0, journal_shards=journal_shards)
    return Settings(data=directory, topics=RULES, log=log)


def numbered(number: int, payload: bytes | None = None) -> Batch:
    """A batch of the named publisher `meter`."""
    payload = payload or b"meter %d" % number
    return Batch.from_messages(
        [Message("orders/a", payload, event_time_ns=BEGUN_NS)],
        producer="meter",
        term=7,
        number=number,
    )


# --- How it was made ---


async def make(directory: str, killed: str) -> None:
    async with Broker.open(settings(directory)) as broker, broker.connect() as bus:
        await _publish_messages(bus)
        await _trim(broker, "state")
        await _remove_some(bus)
        await _consume(bus)
        await bus.set_cursor("reader", {("orders/a", 0): 5, ("orders/a", 1): 2})
        await bus.set_cursor("other", {"own/x": 3})
        await bus.set_cursor("forgotten", {"own/x": 1})
        await bus.remove_cursor("forgotten")
    # Journals made from now on have several shards.
    async with Broker.open(settings(directory, 4)) as broker, broker.connect() as bus:
        for number in range(24):
            await bus.publish(
                f"wide/{number % 3}",
                b"wide %d" % number,
                event_time_ns=BEGUN_NS,
                key=b"%d" % number,
            )
        await bus.publish("own/x", b"after a restart", event_time_ns=BEGUN_NS)
        await broker.sync()
        _pack(Path(directory), Path(killed))


async def _publish_messages(bus: Bus) -> None:
    for number in range(40):
        await bus.publish(
            "orders/a",
            b"order %d " % number + bytes(range(60)),
            key=b"key %d" % (number % 5),
            tags={"unit": "pieces"},
            event_time_ns=BEGUN_NS + number,
        )
    async with bus.publisher("orders/b", name="shop") as publisher:
        for number in range(10):
            publisher.send(b"%d" % number, event_time_ns=BEGUN_NS)
    for number in range(3):
        await bus.publish_batch(numbered(number))
    for number in range(30):
        for topic in STATES:
            await bus.publish(topic, b"%d " % number + bytes(50), event_time_ns=BEGUN_NS)
            if topic == STATES[0]:
                break  # the others spoke long ago
        if number < 2:
            for topic in STATES[1:]:
                await bus.publish(topic, b"old %d" % number, event_time_ns=BEGUN_NS)
    packed = [Message("own/x", b"packed %d" % n, event_time_ns=BEGUN_NS) for n in range(20)]
    await bus.publish_batch(Batch.from_messages(packed, codec=Codec.LZ4))
    for number in range(8):
        await bus.publish("acked/a", b"%d" % number, event_time_ns=BEGUN_NS)
        for topic in ("gone", "again", "purged", "plain"):
            await bus.publish(topic, b"%d" % number, event_time_ns=BEGUN_NS)


async def _remove_some(bus: Bus) -> None:
    await bus.purge_topic("purged")
    await bus.publish("purged", b"after the purge", event_time_ns=BEGUN_NS)
    await bus.delete_topic("gone")
    await bus.delete_topic("again")
    for number in range(3):
        await bus.publish("again", b"again %d" % number, event_time_ns=BEGUN_NS)


async def _consume(bus: Bus) -> None:
    async with bus.consume(
        "billing", "orders/b", mode="shared", deliveries_max=1, window_messages=6
    ) as consumer:
        for number in range(6):
            item = await anext(consumer)
            await (item.nack(reason="no such order") if number == 2 else item.ack())
        await consumer.flush()
    while not [letter async for letter in bus.dead_letters("billing")]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await bus.make_subscription("fleet", "acked/*", mode="multicast")
    for member, count in (("first", 8), ("second", 3)):
        async with bus.consume("fleet", member=member) as consumer:
            await bus.move_subscription("fleet", "earliest", member=member)
            for _ in range(count):
                await (await anext(consumer)).ack()
            await consumer.flush()
    async with bus.consume("by key", "orders/a", mode="key_shared") as consumer:
        for _ in range(7):
            await (await anext(consumer)).ack()
        await consumer.flush()
    await bus.make_subscription("resting", "plain", start="latest")
    await bus.pause_subscription("resting")
    await bus.make_subscription("gone", "plain")
    await bus.delete_subscription("gone")


async def _trim(broker: Broker, journal: str) -> None:
    log = broker._core._stores.main
    for shard in log.shards():
        if shard.journal == journal:
            await log.trim_shard(shard)


def _pack(directory: Path, archive: Path) -> None:
    with tarfile.open(archive, "w:gz") as packed:
        for path in sorted(directory.rglob("*")):
            if path.is_file() and path.name not in ("lock", "audit"):
                packed.add(path, str(path.relative_to(directory)))


def unpack(archive: Path, directory: Path) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(directory, filter="data")


# --- What is in it ---


async def facts(directory: str) -> dict[str, Any]:
    """What a broker on this directory tells its clients."""
    async with Broker.open(settings(directory, 4)) as broker, broker.connect() as bus:
        topics = [*await bus.topics("*"), *await bus.topics("!dead/*")]
        found: dict[str, Any] = {"topics": {}, "messages": {}}
        for listed in topics:
            topic = await bus.topic(listed.name)
            found["topics"][topic.name] = {
                "keep": topic.keep,
                "journal": topic.journal,
                "rule": topic.rule,
                "partitions": [[part.first_offset, part.next_offset] for part in topic.partitions],
                "shards": [part.owner.shard for part in topic.partitions],
            }
            for number, part in enumerate(topic.partitions):
                place = f"{topic.name}[{number}]"
                found["messages"][place] = await _messages(
                    bus, topic.name, number, part.first_offset
                )
        found["cursors"] = msgspec.to_builtins(await bus.cursors())
        found["subscriptions"] = {}
        for listed_subscription in await bus.subscriptions():
            name = listed_subscription.name
            state = msgspec.structs.replace(await bus.subscription(name), redelivered=0)
            found["subscriptions"][name] = msgspec.to_builtins(_without_absence(state))
        found["last values"] = await _last_values(bus)
        found["publisher"] = await _publisher_facts(bus)
    told: dict[str, Any] = json.loads(json.dumps(found))
    return told


def _without_absence(state: Any) -> Any:
    members = [msgspec.structs.replace(member, absent_ns=0) for member in state.members]
    return msgspec.structs.replace(state, members=members)


async def _messages(bus: Bus, topic: str, partition: int, offset: int) -> list[list[Any]]:
    found: list[list[Any]] = []
    while True:
        page = await bus.fetch(topic, offset, partition=partition)
        if page.next_offset == offset:
            return found
        found += [
            [
                message.offset,
                message.payload.hex(),
                None if message.key is None else message.key.decode(),
                dict(message.tags),
                message.event_time_ns,
                message.receive_time_ns,
            ]
            for message in page.messages
        ]
        offset = page.next_offset


async def _last_values(bus: Bus) -> dict[str, str]:
    found: dict[str, str] = {}
    async with bus.subscribe("state/*", start="last") as subscription:
        while len(found) < len(STATES):
            message = await anext(subscription)
            found[message.topic] = message.payload.hex()
    return found


async def _publisher_facts(bus: Bus) -> list[Any]:
    """What is answered to batches that were stored already, to one behind a gap, and to another one of a number."""
    answers: list[Any] = []
    for batch in (numbered(1), numbered(2), numbered(4), numbered(2, b"another")):
        try:
            answer = await bus.publish_batch(batch)
        except RunnelError as error:
            answers.append(type(error).__name__)
        else:
            answers.append([list(answer.base_offsets), answer.is_repeated])
    return answers


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as made:
        directory, killed, closed = (
            f"{made}/data",
            folder / "killed.tar.gz",
            folder / "closed.tar.gz",
        )
        asyncio.run(make(directory, str(killed)))
        _pack(Path(directory), closed)
        told = []
        for archive in (closed, killed):
            unpack(archive, Path(made) / archive.name)
            told.append(asyncio.run(facts(f"{made}/{archive.name}")))
    assert told[0] == told[1], "a killed broker's directory is not as the closed one"
    (folder / "facts.json").write_text(json.dumps(told[0], indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main(Path(sys.argv[1]))
