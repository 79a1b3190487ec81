"""The test vectors: the code reads each to its meaning, and writes the same bytes."""

from __future__ import annotations

import json
from typing import Any, get_args

import msgspec
import pytest

from runnel.errors import MalformedError
from runnel.formats import block, columns, wire
from runnel.formats.batch import Batch, Run
from runnel.formats.envelope import Codec, pack32, pack64
from runnel.formats.frames import FrameReader
from runnel.formats.message import Message
from tests.vectors.heads import meaning
from tests.vectors.make import FOLDER, text_of, vectors

FILES = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.json")}


def of_kind(kind: str) -> list[str]:
    return sorted(name for name, vector in FILES.items() if vector["kind"] == kind)


def from_hex(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)


def meant_runs(vector: dict[str, Any]) -> list[Run]:
    return [
        Run(
            topic=run["topic"],
            partition=run["partition"],
            count=run["count"],
            base_offset=int(run["base_offset"]),
            receive_time_ns=int(run["receive_time_ns"]),
            epoch=int(run["epoch"]),
            entry=int(run["entry"]),
            row=run["row"],
        )
        for run in vector["runs"]
    ]


def meant_messages(vector: dict[str, Any]) -> list[Message]:
    places = [(run, number) for run in meant_runs(vector) for number in range(run.count)]
    return [
        Message(
            topic=run.topic,
            payload=bytes.fromhex(row["payload"]),
            key=from_hex(row["key"]),
            tags=row["tags"],
            event_time_ns=int(row["event_time_ns"]),
            transmit_time_ns=int(row["transmit_time_ns"]),
            receive_time_ns=run.receive_time_ns,
            partition=run.partition,
            offset=run.base_offset + number if run.base_offset else 0,
            uid=from_hex(row["uid"]),
            partition_key=from_hex(row["partition_key"]),
        )
        for row, (run, number) in zip(vector["messages"], places, strict=True)
    ]


def test_there_are_vectors_of_every_kind() -> None:
    assert {vector["kind"] for vector in FILES.values()} == {
        "batch",
        "mark",
        "frames",
        "heads",
        "malformed",
    }
    assert len(of_kind("batch")) >= 12


def test_the_files_are_those_that_the_script_writes() -> None:
    made = {vector["name"]: vector for vector in vectors()}
    assert made.keys() == FILES.keys()
    for name, vector in made.items():
        # Another release of a compressor may write other bytes of the same meaning.
        if vector.get("codec", "none") != "none" or "zstd" in name:
            vector = vector | {"hex": FILES[name]["hex"]}
        path = FOLDER / f"{name}.json"
        assert path.read_text(encoding="utf-8") == text_of(vector), f"write anew: {name}"


@pytest.mark.parametrize("name", of_kind("batch"))
def test_a_batch_is_read_to_its_meaning(name: str) -> None:
    vector = FILES[name]
    batch = Batch.unpack(bytes.fromhex(vector["hex"]))
    assert batch.messages() == meant_messages(vector)
    assert batch.runs() == meant_runs(vector)
    head = batch.envelope
    assert Codec(head.codec).name.lower() == vector["codec"]
    for field in ("shard", "producer", "term", "number"):
        assert getattr(head, field) == vector[field]


@pytest.mark.parametrize("name", of_kind("batch"))
def test_its_meaning_is_written_to_the_same_bytes(name: str) -> None:
    vector = FILES[name]
    data = bytes.fromhex(vector["hex"])
    read = Batch.unpack(data)
    assert read.pack() == data
    if vector["codec"] != "none":
        return
    assert columns.encode(read.columns) == read.body
    runs = meant_runs(vector)
    again = Batch.from_columns(
        Batch.from_messages(meant_messages(vector)).columns,
        [run.topic for run in runs],
        [run.count for run in runs],
        partitions=[run.partition for run in runs],
        shard=vector["shard"],
        producer=vector["producer"],
        term=vector["term"],
        number=vector["number"],
    )
    if read.envelope.is_stored:
        again.envelope = msgspec.structs.replace(
            again.envelope,
            base_offsets=pack64([run.base_offset for run in runs]),
            receive_times=pack64([run.receive_time_ns for run in runs]),
            epochs=pack64([run.epoch for run in runs]),
            entries=pack64([run.entry for run in runs]),
            rows=pack32([run.row for run in runs]) if read.envelope.rows else b"",
        )
    assert again.pack() == data


@pytest.mark.parametrize("name", of_kind("mark"))
def test_a_mark_is_read_to_its_meaning(name: str) -> None:
    vector = FILES[name]
    data = bytes.fromhex(vector["hex"])
    header = block.read_header(data)
    block.check_mark(data, 0, header)
    assert header.is_mark
    assert header.durable_position == int(vector["durable_position"])
    assert block.pack_mark(header.durable_position) == data


@pytest.mark.parametrize("name", of_kind("frames"))
def test_frames_are_read_to_their_meaning(name: str) -> None:
    vector = FILES[name]
    frames = FrameReader(2**20).feed(bytes.fromhex(vector["hex"]))
    assert [{"head": frame.head.hex(), "tail": frame.tail.hex()} for frame in frames] == vector[
        "frames"
    ]


def test_there_is_a_vector_of_every_head() -> None:
    for sender, heads in (("client", wire.Request), ("broker", wire.Answer)):
        shown = [
            head["head"]
            for name in of_kind("heads")
            for head in FILES[name]["heads"]
            if FILES[name]["from"] == sender
        ]
        assert set(shown) == {kind.__struct_config__.tag for kind in get_args(heads)}


@pytest.mark.parametrize("name", of_kind("heads"))
def test_heads_are_read_to_their_meaning(name: str) -> None:
    vector = FILES[name]
    decode = wire.decode_request if vector["from"] == "client" else wire.decode_answer
    frames = FrameReader(2**20).feed(bytes.fromhex(vector["hex"]))
    for frame, head in zip(frames, vector["heads"], strict=True):
        assert (frame.head.hex(), frame.tail.hex()) == (head["encoded"], head["tail"])
        read = decode(frame)
        assert type(read).__struct_config__.tag == head["head"]
        assert meaning(read) == head["fields"]


@pytest.mark.parametrize("name", ["heads-client", "heads-broker"])
def test_heads_are_written_to_the_same_bytes(name: str) -> None:
    vector = FILES[name]
    decode = wire.decode_request if vector["from"] == "client" else wire.decode_answer
    data = bytes.fromhex(vector["hex"])
    again = (
        wire.encode(decode(frame), len(frame.tail)) + bytes(frame.tail)
        for frame in FrameReader(2**20).feed(data)
    )
    assert b"".join(again) == data


@pytest.mark.parametrize("name", of_kind("malformed"))
def test_a_malformed_block_is_refused_at_its_place(name: str) -> None:
    vector = FILES[name]
    with pytest.raises(MalformedError) as caught:
        Batch.unpack(bytes.fromhex(vector["hex"])).messages()
    assert caught.value.place == vector["place"]
