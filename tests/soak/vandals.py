"""Clients that mean no good, or cannot do better: each is one way of being a burden to the native door.

All they do comes from a seed. None of them minds being thrown out: that is what they come for.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from random import Random
from typing import Final

from runnel.formats import wire, work_heads
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from tests.fuzz.formats import mutate, seeds
from tests.soak.lines import (
    CROWD,
    Entrance,
    Vandal,
    crowd,
    drip,
    end_writing,
    hear_out,
    hear_something,
    line,
    push,
)

HELLO: Final = wire.encode(wire.Hello(1, 1, (), "vandal"))
_LATEST: Final = wire.Start("latest")
_EARLIEST: Final = wire.Start("earliest")


def conversation(random: Random) -> list[bytes]:
    """What a client might say after its hello, with something of everything."""
    topic = f"vandal/{random.randrange(20)}"
    block = Batch.from_messages([Message(topic, random.randbytes(random.randrange(2000)))]).pack()
    start = random.choice((_LATEST, _EARLIEST, wire.Start("last"), wire.Start("time", (), 1)))
    heads: Sequence[wire.Head] = (
        wire.Send(2, None, topic, b"1", b"k", {"a": "b"}),
        wire.Subscribe(3, 1, (topic, "vandal/*"), start, random.choice((0, 1, 2**20, 2**62))),
        wire.Credit(1, 2**60),
        wire.Fetch(4, topic, None, 1, None, 0, 2**20, random.choice((0, 0, 100, 2**40))),
        wire.Routes(5, (topic, "live/x")),
        wire.Producer(6, f"p{random.randrange(5)}"),
        wire.Topics(7, "*", "", 2**40),
        wire.DescribeTopic(8, topic),
        wire.SetCursor(9, f"c{random.randrange(5)}", (wire.CursorPlace(topic, 0, 1),)),
        wire.Cursors(10),
        wire.RemoveCursor(11, f"c{random.randrange(5)}"),
        wire.PurgeTopic(12, topic),
        wire.DeleteTopic(13, topic),
        wire.Statistics(14),
        wire.Unsubscribe(15, 1),
        wire.Ping(16),
    )
    frames = [wire.encode(head) for head in heads]
    frames.append(wire.encode(wire.Publish(17, None), len(block)) + block)
    random.shuffle(frames)
    return frames


# --- The ways ---


async def say_rubbish(entrance: Entrance, random: Random) -> None:
    """Random bytes, before or instead of a hello, or behind one."""
    async with line(entrance) as (reader, writer):
        if random.random() < 0.5:
            writer.write(HELLO)
        if random.random() < 0.3:  # lengths that a frame could have
            writer.write(struct.pack("<II", random.randrange(300), random.randrange(300)))
        writer.write(random.randbytes(random.choice((1, 7, 8, 9, 100, 5000, 300_000))))
        if random.random() < 0.5:
            await hear_out(reader)


async def announce_too_much(entrance: Entrance, random: Random) -> None:
    """Lengths that are too large, or contradict themselves; or a large frame that never comes."""
    lengths = (0, 1, 7, 8, 2**16, 2**24, 2**24 + 1, 2**31, 2**32 - 1)
    async with line(entrance) as (reader, writer):
        writer.write(HELLO + struct.pack("<II", random.choice(lengths), random.choice(lengths)))
        writer.write(bytes(random.choice((0, 1, 1000))))
        await hear_out(reader)


async def speak_brokenly(entrance: Entrance, random: Random) -> None:
    """A sensible conversation, in which bytes have changed on the way."""
    frames = conversation(random)
    vectors = seeds()
    async with line(entrance) as (reader, writer):
        writer.write(HELLO)
        for frame in frames:
            if random.random() < 0.2:
                frame = mutate(random, frame, random.choice(vectors))
            elif random.random() < 0.2:
                head = random.choice(vectors)
                frame = wire.encode(wire.Publish(18, None), len(head)) + head
            if random.random() < 0.1:
                frame = frame[: random.randrange(len(frame) + 1)]
            await push(writer, frame)
        if random.random() < 0.3:
            end_writing(writer)
        await hear_out(reader)


async def ask_everything_at_once(entrance: Entrance, random: Random) -> None:
    """Valid requests by the hundred, whose answers are read late, or by nobody."""
    async with line(entrance) as (reader, writer):
        frames = [frame for _ in range(20) for frame in conversation(random)]
        await push(writer, HELLO + b"".join(frames))
        if random.random() < 0.5:
            end_writing(writer)
        if random.random() < 0.7:
            await hear_out(reader)


async def never_read(entrance: Entrance, random: Random) -> None:
    """Subscribes to everything with all the credit there is, asks on and on, and reads nothing."""
    async with line(entrance) as (reader, writer):
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        start = random.choice((_LATEST, _EARLIEST))
        requests = [wire.Subscribe(n, n, ("*", "!*"), start, 2**62) for n in range(1, 20)]
        writer.write(HELLO + b"".join(map(wire.encode, requests)))
        questions = b"".join(wire.encode(wire.Statistics(number)) for number in range(100, 300))
        for _ in range(10):
            await push(writer, questions)


async def dawdle(entrance: Entrance, random: Random) -> None:
    """Many connections that say what they have to say a byte at a time, and never get to the end."""

    async def one() -> None:
        said = HELLO if random.random() < 0.5 else HELLO + struct.pack("<II", 2**24, 100)
        await drip(entrance, random, said[:-1] + bytes(20))

    await crowd(one, CROWD)


async def send_most_of_a_frame(entrance: Entrance, random: Random) -> None:
    """Large frames on several connections that never come whole, before a hello or behind one."""

    async def one() -> None:
        async with line(entrance) as (_, writer):
            if random.random() < 0.7:
                writer.write(HELLO)
            await push(writer, struct.pack("<II", 2**24, 100) + bytes(2**24 - 1))

    await crowd(one, CROWD // 10)


async def come_and_go(entrance: Entrance, random: Random) -> None:
    """Many connections at once, dropped in every way and at every moment of their beginning."""

    async def one() -> None:
        async with line(entrance) as (reader, writer):
            match random.randrange(6):
                case 0:
                    return
                case 1:
                    writer.write(HELLO[: random.randrange(len(HELLO))])
                case 2:
                    writer.write(HELLO)
                    await hear_something(reader)
                case 3:
                    writer.write(HELLO + b"".join(conversation(random)))
                case 4:
                    end_writing(writer)
                    await hear_out(reader)
                case _:
                    writer.write(HELLO)
                    writer.close()

    await crowd(one, 4 * CROWD)


async def take_work_and_keep_it(entrance: Entrance, random: Random) -> None:
    """A consumer that takes all the work it can get, acknowledges nothing, and is gone."""
    async with line(entrance) as (reader, writer):
        writer.write(HELLO)
        name = f"vandal-{random.randrange(5)}"
        mode = random.choice(("shared", "key_shared", "multicast"))
        window = random.choice((1, 100, 10_000))
        consume = work_heads.Consume(2, 1, name, ("vandal/*",), mode, window, 2**30)
        writer.write(wire.encode(consume))
        for frame in conversation(random):
            await push(writer, frame)
        await hear_something(reader)


VANDALS: Final[Sequence[Vandal]] = (
    say_rubbish,
    announce_too_much,
    speak_brokenly,
    ask_everything_at_once,
    never_read,
    dawdle,
    send_most_of_a_frame,
    come_and_go,
    take_work_and_keep_it,
)
