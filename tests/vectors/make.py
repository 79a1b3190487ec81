"""Writes the test vectors next to this file: `python -m tests.vectors.make`. The output is always the same.

The meaning of each vector is written from its input values, not read back from its bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from runnel.formats import block, envelope
from runnel.formats.batch import Batch
from runnel.formats.checksum import crc32c
from runnel.formats.envelope import Codec, pack32, pack64
from runnel.formats.frames import pack_head
from runnel.formats.message import Message
from tests.vectors import heads

FOLDER = Path(__file__).parent
Vector = dict[str, Any]

T0 = 1_700_000_000_000_000_000
UID = bytes.fromhex("0669F7EFB5A1CD34B5F99D1154FB6853345C9735")


# --- Meanings ---


def _message(message: Message) -> Vector:
    partition_key = message.key if message.partition_key is None else message.partition_key
    return {
        "payload": message.payload.hex(),
        "key": _hex(message.key),
        "partition_key": _hex(partition_key),
        "tags": dict(message.tags),
        "event_time_ns": str(message.event_time_ns),
        "transmit_time_ns": str(message.transmit_time_ns),
        "uid": _hex(message.uid),
    }


def _hex(data: bytes | None) -> str | None:
    return None if data is None else data.hex()


def _run(topic: str, partition: int, count: int, row: int, stored: Sequence[int] = ()) -> Vector:
    names = ("base_offset", "receive_time_ns", "epoch", "entry")
    values = map(str, stored or (0, 0, 0, 0))
    run = {"topic": topic, "partition": partition, "count": count, "row": row}
    return run | dict(zip(names, values, strict=True))


def _batch(
    name: str, about: str, batch: Batch, messages: Sequence[Message], runs: Sequence[Vector]
) -> Vector:
    head = batch.envelope
    return {
        "name": name,
        "about": about,
        "kind": "batch",
        "codec": ["none", "lz4", "zstd"][head.codec],
        "shard": head.shard,
        "producer": head.producer,
        "term": head.term,
        "number": head.number,
        "runs": list(runs),
        "messages": list(map(_message, messages)),
        "hex": batch.pack().hex(),
    }


def _published(
    name: str,
    about: str,
    messages: Sequence[Message],
    runs: Sequence[Vector] | None = None,
    **options: Any,
) -> Vector:
    whole = [_run(messages[0].topic, messages[0].partition, len(messages), 0)]
    return _batch(name, about, Batch.from_messages(messages, **options), messages, runs or whole)


def _malformed(name: str, about: str, place: str, data: bytes) -> Vector:
    return {"name": name, "about": about, "kind": "malformed", "place": place, "hex": data.hex()}


# --- Batches ---


def _plain(count: int) -> list[Message]:
    return [
        Message("sensors/a", b"%d" % row, event_time_ns=T0 + row, transmit_time_ns=T0 + 1_000)
        for row in range(count)
    ]


def _published_batches() -> list[Vector]:
    one = Message("sensors/a", b"21.5", event_time_ns=T0, transmit_time_ns=T0 + 1_000)
    change = msgspec.structs.replace
    kelvin = {"unit": "K", "site": "Düsseldorf"}
    gateway = [
        Message("sensors/a", b"1", event_time_ns=T0),
        Message("sensors/a", b"2", event_time_ns=T0 + 1),
        Message("sensors/b", b"3", event_time_ns=T0 + 2),
        Message("sensors/a", b"4", event_time_ns=T0 + 3, partition=3),
        Message("sensors/a", b"5", event_time_ns=T0 + 4),
    ]
    return [
        _published("one-message", "One message with a payload and times, nothing else.", [one]),
        _published(
            "empty-payloads",
            "Payloads may be empty; times may be 0 or before 1970.",
            [Message("größe", b"", event_time_ns=-1), Message("größe", b"")],
        ),
        _published(
            "keys",
            "A key for every row, so there is no validity. One of them is empty.",
            [change(one, key=b"a"), change(one, key=b""), change(one, key=b"bcd")],
        ),
        _published(
            "keys-partly-absent",
            "Rows 0, 2 and 65 have keys, the others have none: validity takes two words.",
            [
                change(message, key=b"k%d" % row if row in (0, 2, 65) else None)
                for row, message in enumerate(_plain(66))
            ],
        ),
        _published(
            "partition-keys",
            "Partition keys that differ from the keys; the second row's is its key.",
            [change(one, key=b"a", partition_key=b"x"), change(one, key=b"b")],
        ),
        _published(
            "tags-shared",
            "All rows have the same tags: one set, and a single 0 for all of them.",
            [change(message, tags=kelvin) for message in _plain(3)],
        ),
        _published(
            "tags-of-two-rows",
            "Two rows, two sets: the index is as long as a single number and its padding.",
            [change(one, tags={"unit": "C"}), change(one, tags={"unit": "F"})],
        ),
        _published(
            "tags-some",
            "Two sets of tags for four rows, two of which have none.",
            [
                change(message, tags=kelvin if row % 2 else {})
                for row, message in enumerate(_plain(4))
            ],
        ),
        _published(
            "uids",
            "The second row has no uid: zeros.",
            [change(one, uid=UID), one, change(one, uid=b"\xff" * 20)],
        ),
        _published(
            "many-runs",
            "Five messages in four runs: neighbours of one topic and partition share a run.",
            gateway,
            [
                _run("sensors/a", 0, 2, 0),
                _run("sensors/b", 0, 1, 2),
                _run("sensors/a", 3, 1, 3),
                _run("sensors/a", 0, 1, 4),
            ],
        ),
        _published(
            "named-producer",
            "The eighth batch of the third term of a named publisher.",
            [one],
            producer="billing",
            term=3,
            number=7,
        ),
        _published("lz4", "A body in an LZ4 block.", _plain(50), codec=Codec.LZ4),
        _published("zstd", "A body in a zstd frame.", _plain(50), codec=Codec.ZSTD),
    ]


def _stored(batch: Batch) -> Batch:
    head = msgspec.structs.replace(
        batch.envelope,
        base_offsets=pack64([101, 7]),
        receive_times=pack64([T0 + 5_000]),
        epochs=pack64([2]),
        entries=pack64([31]),
    )
    return Batch(head, batch.body)


def _stored_batches() -> list[Vector]:
    messages = [
        Message(f"sensors/{'a' if row < 4 else 'b'}", b"%d" % row, event_time_ns=T0 + row)
        for row in range(6)
    ]
    batch = _stored(Batch.from_messages(messages))
    return [
        _batch(
            "stored",
            "Two runs as the broker stored them; what is the same for both stands once.",
            batch,
            messages,
            [
                _run("sensors/a", 0, 4, 0, (101, T0 + 5_000, 2, 31)),
                _run("sensors/b", 0, 2, 4, (7, T0 + 5_000, 2, 31)),
            ],
        ),
        _batch(
            "cut",
            "Rows 1, 2 and 5 of the batch `stored`: each run still knows its row in the entry.",
            batch.take([1, 2, 5]),
            [messages[row] for row in (1, 2, 5)],
            [
                _run("sensors/a", 0, 2, 1, (102, T0 + 5_000, 2, 31)),
                _run("sensors/b", 0, 1, 5, (8, T0 + 5_000, 2, 31)),
            ],
        ),
    ]


# --- Marks and frames ---


def _others() -> list[Vector]:
    one = Batch.from_messages(_plain(1)).pack()
    frames = [
        (msgspec.msgpack.encode(["ping", 1]), b""),
        (msgspec.msgpack.encode(["publish", 2, "stored"]), one),
    ]
    return [
        {
            "name": "mark",
            "about": "A file that is durable up to byte 4,096.",
            "kind": "mark",
            "durable_position": "4096",
            "hex": block.pack_mark(4096).hex(),
        },
        {
            "name": "frames",
            "about": "Two frames; the tail of the second is a block.",
            "kind": "frames",
            "frames": [{"head": head.hex(), "tail": tail.hex()} for head, tail in frames],
            "hex": b"".join(pack_head(head, len(tail)) + tail for head, tail in frames).hex(),
        },
    ]


# --- Malformed ---

_BASE = Batch.from_messages(
    [
        Message("sensors/a", b"21.5", tags={"unit": "C"}, event_time_ns=T0),
        Message("sensors/a", b"21.75", tags={"unit": "F"}, event_time_ns=T0 + 1),
    ]
)


def _changed(data: bytes, position: int, byte: int) -> bytes:
    return data[:position] + bytes([byte]) + data[position + 1 :]


def _with_body(change: Callable[[bytes], bytes], **fields: Any) -> bytes:
    """A block with another body and correct checksums."""
    body = change(bytes(_BASE.body))
    head = msgspec.structs.replace(
        _BASE.envelope, **({"body_bytes": len(body), "body_crc": crc32c(body)} | fields)
    )
    return b"".join(block.pack(envelope.encode(head), body))


def _with_head(**fields: Any) -> bytes:
    head = msgspec.structs.replace(_BASE.envelope, **fields)
    return b"".join(block.pack(envelope.encode(head), _BASE.body))


def _replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(body: bytes) -> bytes:
        if body.count(old) != 1:
            raise AssertionError(f"{old.hex()} is not there exactly once")
        return body.replace(old, new)

    return change


def _malformed_ones() -> list[Vector]:
    whole = _BASE.pack()
    offsets = struct.pack("<3i", 0, 4, 9)
    topics = envelope.encode(_BASE.envelope).replace(b"sensors/a", b"sensors\xff\xff")
    packed = bytes(Batch.from_messages(_plain(50), codec=Codec.ZSTD).body)
    body_bytes = len(_BASE.body)
    return [
        _malformed("bad-truncated", "The last byte is missing.", "block", whole[:-1]),
        _malformed("bad-version", "A block of version 2.", "block magic", _changed(whole, 3, 0x02)),
        _malformed(
            "bad-header-crc",
            "One flipped bit in the envelope.",
            "block crc",
            _changed(whole, 40, whole[40] ^ 0x01),
        ),
        _malformed(
            "bad-body-crc",
            "One flipped bit in the body.",
            "block body",
            _changed(whole, len(whole) - 20, whole[-20] ^ 0x10),
        ),
        _malformed(
            "bad-padding",
            "The last byte, behind the body, is not zero.",
            "block padding",
            _changed(whole, len(whole) - 1, 0x01),
        ),
        _malformed(
            "bad-envelope-version",
            "An envelope of version 9.",
            "envelope version",
            _with_head(version=9),
        ),
        _malformed("bad-codec", "Codec 7.", "envelope codec", _with_head(codec=7)),
        _malformed(
            "bad-count",
            "More messages than the body can hold.",
            "envelope counts",
            _with_head(counts=pack32([2**31 - 1])),
        ),
        _malformed(
            "bad-topic-utf8",
            "A topic that is not UTF-8.",
            "envelope",
            b"".join(block.pack(topics, _BASE.body)),
        ),
        _malformed(
            "bad-offsets-fall",
            "Payload offsets 0, 12, 9.",
            "body payload_offsets",
            _with_body(_replaced(offsets, struct.pack("<3i", 0, 12, 9))),
        ),
        _malformed(
            "bad-offsets-beyond",
            "Payload offsets that end behind the payload bytes.",
            "body payload_bytes",
            _with_body(_replaced(offsets, struct.pack("<3i", 0, 4, 900))),
        ),
        _malformed(
            "bad-short-header",
            "A buffer with msgpack's bin 8 header: all behind it are out of line.",
            "body byte 3",
            _with_body(lambda body: body[:3] + b"\xc4\x13" + body[8:], body_bytes=body_bytes - 3),
        ),
        _malformed(
            "bad-tag-index",
            "A row points at the third of two tag sets.",
            "body tag_index",
            _with_body(_replaced(struct.pack("<2i", 0, 1) + bytes(3), b"\2" + bytes(10))),
        ),
        _malformed(
            "bad-tag-repeated",
            "A set with two tags of one name.",
            "body tag_sets",
            _with_body(_replaced(b"\x81\xa4unit\xa1C", b"\x82\xa4unit\xa1C\xa4unit\xa1D")),
        ),
        _malformed(
            "bad-zstd-size",
            "A body that unpacks to more than the envelope says.",
            "body",
            _with_body(lambda _: packed, codec=Codec.ZSTD, body_bytes=200),
        ),
    ]


def vectors() -> list[Vector]:
    """All vectors, in the order of the README."""
    stored = _stored_batches()
    return [
        *_published_batches(),
        *stored,
        *_others(),
        *heads.vectors(bytes.fromhex(stored[0]["hex"])),
        *_malformed_ones(),
    ]


def text_of(vector: Vector) -> str:
    return json.dumps(vector, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    for vector in vectors():
        (FOLDER / f"{vector['name']}.json").write_text(text_of(vector), encoding="utf-8")


if __name__ == "__main__":
    main()
