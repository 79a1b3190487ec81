"""Frames: fed whole, in pieces, with bytes behind; limits before memory."""

from __future__ import annotations

import struct
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnel.errors import LimitExceededError, MalformedError
from runnel.formats.frames import PREFIX_BYTES, Frame, FrameReader, pack_head

FRAMES = [(b"\xc0", b""), (b"\x93\x01\x02\x03", b"tail of 16 bytes"), (b"12345678", b"!")]
STREAM = b"".join(pack_head(head, len(tail)) + tail for head, tail in FRAMES)


def plain(frames: list[Frame]) -> list[tuple[bytes, bytes]]:
    return [(bytes(frame.head), bytes(frame.tail)) for frame in frames]


def read(*chunks: bytes) -> list[tuple[bytes, bytes]]:
    reader = FrameReader(1_000)
    return [frame for chunk in chunks for frame in plain(reader.feed(chunk))]


def test_frames_that_come_at_once_are_read_at_once() -> None:
    assert read(STREAM) == FRAMES


def test_frames_may_be_split_at_every_byte() -> None:
    assert read(*(STREAM[at : at + 1] for at in range(len(STREAM)))) == FRAMES


def test_frames_may_be_split_at_any_two_bytes() -> None:
    for first, second in combinations(range(len(STREAM) + 1), 2):
        assert read(STREAM[:first], STREAM[first:second], STREAM[second:]) == FRAMES


@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=20), st.binary(max_size=40)), max_size=5),
    st.lists(st.integers(0, 400), max_size=6),
)
def test_any_frames_survive_any_splits(frames: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    stream = b"".join(pack_head(head, len(tail)) + tail for head, tail in frames)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    chunks = [stream[begin:end] for begin, end in pairwise(edges)]
    assert read(*chunks) == frames


def test_bytes_behind_a_frame_are_held_for_the_next() -> None:
    reader = FrameReader(1_000)
    assert plain(reader.feed(STREAM + STREAM[:5])) == FRAMES
    assert reader.held_bytes == 5
    assert plain(reader.feed(STREAM[5:])) == FRAMES
    assert reader.held_bytes == 0


def test_frames_outlive_the_memory_they_came_in_and_the_frames_after_them() -> None:
    reader = FrameReader(1_000)
    memory = bytearray(STREAM[:30])
    frames = reader.feed(memory)
    memory[:] = bytes(30)
    frames += reader.feed(STREAM[30:] + STREAM)
    frames += reader.feed(STREAM)
    assert plain(frames) == FRAMES * 3
    for frame in frames:
        assert frame.head.readonly
        assert frame.tail.readonly


def test_tails_begin_on_multiples_of_8_from_the_start_of_the_frame() -> None:
    for head_bytes in range(1, 20):
        packed = pack_head(b"h" * head_bytes, 3)
        assert len(packed) % 8 == 0
        assert struct.unpack("<II", packed[:8]) == (len(packed) - PREFIX_BYTES + 3, head_bytes)
        assert set(packed[8 + head_bytes :]) <= {0}


def test_a_frame_of_exactly_the_limit_is_read() -> None:
    frame = pack_head(b"h", 92) + bytes(92)
    assert len(FrameReader(100).feed(frame)) == 1
    with pytest.raises(LimitExceededError):
        FrameReader(99).feed(frame)


def test_a_frame_above_the_limit_is_refused_by_its_first_8_bytes() -> None:
    reader = FrameReader(100)
    prefix = struct.pack("<II", 2**32 - 1, 8)
    assert reader.feed(prefix[:7]) == []
    with pytest.raises(LimitExceededError, match="a frame of 4294967295 bytes; at most 100"):
        reader.feed(prefix[7:])


@pytest.mark.parametrize(("frame_bytes", "head_bytes"), [(8, 0), (8, 9), (10, 10), (0, 0), (7, 1)])
def test_a_head_that_does_not_fit_its_frame_is_refused(frame_bytes: int, head_bytes: int) -> None:
    with pytest.raises(MalformedError) as caught:
        FrameReader(100).feed(struct.pack("<II", frame_bytes, head_bytes))
    assert caught.value.place == "frame head_bytes"


def test_after_an_error_everything_is_refused() -> None:
    reader = FrameReader(100)
    with pytest.raises(LimitExceededError):
        reader.feed(struct.pack("<II", 101, 8))
    for chunk in (b"", STREAM):
        with pytest.raises(MalformedError, match="follows an error in the stream: a frame of 101"):
            reader.feed(chunk)


# --- Receiving into the reader's own memory ---


def received(stream: bytes, chunk_bytes: int, trusted_bytes: int = 0) -> list[tuple[bytes, bytes]]:
    """Read as a socket's owner would: into the reader's room where it offers one, else into a shared buffer."""
    reader = FrameReader(10_000_000, trusted_bytes=trusted_bytes)
    frames: list[Frame] = []
    shared = bytearray(chunk_bytes)
    position = 0
    while position < len(stream):
        room = reader.room()
        buffer = memoryview(shared) if room is None else room
        chunk = stream[position : position + min(chunk_bytes, len(buffer))]
        buffer[: len(chunk)] = chunk
        frames += reader.feed(buffer[: len(chunk)]) if room is None else reader.fill(len(chunk))
        position += len(chunk)
    assert reader.held_bytes == 0
    return plain(frames)


@pytest.mark.parametrize("chunk_bytes", [1_000, 65_536, 200_000])
@pytest.mark.parametrize("tail_bytes", [65_000, 65_536, 70_000, 131_072, 1_000_001])
def test_a_large_frame_is_received_where_it_stays(chunk_bytes: int, tail_bytes: int) -> None:
    large = (b"head", bytes(range(256)) * (tail_bytes // 256) + bytes(tail_bytes % 256))
    frames = [*FRAMES, large, *FRAMES, large, large, *FRAMES]
    stream = b"".join(pack_head(head, len(tail)) + tail for head, tail in frames)
    assert received(stream, chunk_bytes) == frames


def test_a_small_frame_has_no_room_of_its_own() -> None:
    reader = FrameReader(1_000_000)
    assert reader.room() is None
    reader.feed(pack_head(b"h", 50_000))
    assert reader.room() is None


def test_room_grows_with_what_has_come_and_not_with_what_was_announced() -> None:
    reader = FrameReader(2**30)
    reader.feed(struct.pack("<II", 2**30, 8))
    sizes = []
    for _ in range(5):
        room = reader.room()
        assert room is not None
        sizes.append(len(room))
        reader.fill(len(room))
    assert sizes[0] <= 65_536
    assert all(after <= 2 * sum(sizes[: at + 1]) for at, after in enumerate(sizes[1:]))


def test_room_for_what_is_trusted_is_made_at_once_and_no_more() -> None:
    for trusted_bytes, first_bytes in ((300_000, 300_000), (2**30, 500_016)):
        reader = FrameReader(2**30, trusted_bytes=trusted_bytes)
        reader.feed(pack_head(b"h", 500_000)[:8])
        room = reader.room()
        assert room is not None
        assert len(room) + reader.held_bytes == first_bytes


@pytest.mark.parametrize("chunk_bytes", [1000, 65_536, 100_000, 150_000, 500_000])
def test_large_frames_arrive_whole_whether_they_are_trusted_or_not(chunk_bytes: int) -> None:
    frames = [(b"head", bytes([number]) * 200_003) for number in range(3)]
    stream = b"".join(pack_head(head, len(tail)) + tail for head, tail in frames)
    for trusted_bytes in (0, 100_000, 2**20):
        assert received(stream, chunk_bytes, trusted_bytes) == frames


def test_room_may_still_be_lent_out_when_the_frame_is_whole() -> None:
    reader = FrameReader(1_000_000)
    head = pack_head(b"h", 70_000)
    reader.feed(head)
    room = reader.room()
    assert room is not None
    lent = [memoryview(room)]
    while room is not None:
        reader.fill(len(room) // 2)
        room = reader.room()
        if room is not None:
            lent.append(memoryview(room))
    (frame,) = reader.feed(bytes(70_000 + len(head) - reader.held_bytes))
    assert len(frame.tail) == 70_000
    assert lent
