"""Attacks on the native listener."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from random import Random
from typing import Final

from runnel.formats import wire, work_heads
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from tests.fuzz.formats import mutate, seeds
from tests.soak.vandals.vandal import CROWD, Attack, AttackTarget, Vandal, connected, crowd

HELLO: Final = wire.encode(wire.Hello(1, 1, (), "vandal"))
_LATEST: Final = wire.Start("latest")
_EARLIEST: Final = wire.Start("earliest")
# Lengths that a frame's head may announce, valid or not.
_LENGTHS: Final = (0, 1, 7, 8, 2**16, 2**24, 2**24 + 1, 2**31, 2**32 - 1)


class NativeVandal(Vandal):
    """Frames that are malformed, too large, too many, or never read."""

    greeting = HELLO
    rounds = (1, 20)
    workers = CROWD // 5

    def noise(self, random: Random) -> Sequence[bytes]:
        noise = random.randbytes(random.choice((1, 7, 8, 9, 100, 5000, 300_000)))
        lengths = struct.pack("<II", random.randrange(300), random.randrange(300))
        return noise, lengths + noise, HELLO + noise, HELLO + lengths + noise

    def requests(self, random: Random) -> list[bytes]:
        topic = f"vandal/{random.randrange(20)}"
        payload = random.randbytes(random.randrange(2000))
        block = Batch.from_messages([Message(topic, payload)]).pack()
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

    def broken_requests(self, random: Random) -> list[bytes]:
        vectors = seeds()
        frames = []
        for frame in self.requests(random):
            if random.random() < 0.2:
                frame = mutate(random, frame, random.choice(vectors))
            elif random.random() < 0.2:
                block = random.choice(vectors)
                frame = wire.encode(wire.Publish(18, None), len(block)) + block
            if random.random() < 0.1:
                frame = frame[: random.randrange(len(frame) + 1)]
            frames.append(frame)
        return frames

    def streams(self, random: Random) -> bytes:
        topic = f"vandal/{random.randrange(20)}"
        start = random.choice((_LATEST, _EARLIEST))
        heads: Sequence[wire.Head] = (
            wire.Subscribe(2, 1, (random.choice(("*", "!*", topic)),), start, 2**62),
            wire.Fetch(3, topic, None, 1, None, 0, 2**20, 2**40),
        )
        return b"".join(map(wire.encode, heads))

    def work(self, random: Random) -> bytes:
        name = f"vandal-{random.randrange(5)}"
        mode = random.choice(("shared", "key_shared", "multicast"))
        window = random.choice((1, 100, 10_000))
        consume = work_heads.Consume(2, 1, name, ("vandal/*",), mode, window, 2**30)
        return wire.encode(consume) + b"".join(self.requests(random))

    @property
    def own_attacks(self) -> Sequence[Attack]:
        return self.announce_too_much, self.send_most_of_a_frame, self.never_read

    async def announce_too_much(self, target: AttackTarget, random: Random) -> None:
        """Lengths that are too large or contradict each other, or a large frame that never comes."""
        async with connected(target) as connection:
            lengths = struct.pack("<II", random.choice(_LENGTHS), random.choice(_LENGTHS))
            connection.write(HELLO + lengths + bytes(random.choice((0, 1, 1000))))
            await connection.read_until_closed()

    async def send_most_of_a_frame(self, target: AttackTarget, random: Random) -> None:
        """Large frames on several connections that never come whole, with a hello or without."""

        async def one() -> None:
            async with connected(target) as connection:
                if random.random() < 0.7:
                    connection.write(HELLO)
                await connection.push(struct.pack("<II", 2**24, 100) + bytes(2**24 - 1))

        await crowd(one, CROWD // 10)

    async def never_read(self, target: AttackTarget, random: Random) -> None:
        """Subscribes to everything with unlimited credit, keeps asking, and reads nothing."""
        async with connected(target) as connection:
            connection.pause_reading()
            start = random.choice((_LATEST, _EARLIEST))
            requests = [wire.Subscribe(n, n, ("*", "!*"), start, 2**62) for n in range(1, 20)]
            connection.write(HELLO + b"".join(map(wire.encode, requests)))
            questions = b"".join(wire.encode(wire.Statistics(number)) for number in range(100, 300))
            for _ in range(10):
                await connection.push(questions)
