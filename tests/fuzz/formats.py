"""Fuzzing of every decoder: whatever the input is, it may raise only the two errors.

`run` mutates the test vectors from a seed, and also runs atheris where that is installed. Alone:

    python -m tests.fuzz.formats [libFuzzer's options] [FILE to try again]
"""

from __future__ import annotations

import importlib.util
import json
import random
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from runnel.errors import LimitExceededError, MalformedError
from runnel.formats import block, columns, envelope, ksuid
from runnel.formats.batch import Batch
from runnel.formats.checksum import crc32c
from runnel.formats.frames import FrameReader

VECTORS: Final = Path(__file__).parents[1] / "vectors"
REFUSALS: Final = (MalformedError, LimitExceededError)

_BODY_BYTES_MAX: Final = 2**16
_FRAME_BYTES_MAX: Final = 2**16
_INPUT_BYTES_MAX: Final = 2**14
_EXTREMES: Final = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
)


def seeds() -> list[bytes]:
    """The bytes of all test vectors, malformed ones too."""
    return [
        bytes.fromhex(json.loads(path.read_text(encoding="utf-8"))["hex"])
        for path in sorted(VECTORS.glob("*.json"))
    ]


# --- Checks of every input ---


def check(data: bytes) -> None:
    """Give these bytes to every decoder. Any error but a refusal is our bug."""
    _unpack_and_look(data)
    for repaired in _repaired(data):
        _unpack_and_look(repaired)
    _read_frames(data)
    with suppress(*REFUSALS):
        envelope.decode(data)
    with suppress(*REFUSALS):
        columns.decode(data, data[0] if data else 1)
    with suppress(*REFUSALS):
        ksuid.to_text(ksuid.from_text(data[:27].decode("latin-1")))


def _unpack_and_look(data: bytes) -> None:
    try:
        batch = Batch.unpack(data, body_bytes_max=_BODY_BYTES_MAX)
        messages = batch.messages()
    except REFUSALS:
        return
    # Accepted bytes must survive every other form, too.
    assert len(messages) == len(batch) == sum(run.count for run in batch.runs())
    assert repr(batch)
    table = batch.to_arrow()
    table.validate(full=True)
    assert table.num_rows == len(batch)
    assert Batch.unpack(batch.uncompressed().pack()).messages() == messages
    half = len(batch) // 2
    tail = Batch.unpack(batch.slice(half).pack())
    assert tail.messages() == messages[half:]
    odd = Batch.unpack(batch.take(range(0, len(batch), 2)).pack())
    assert odd.messages() == messages[::2]
    assert Batch.unpack(Batch.join([odd, tail]).pack()).messages() == [*odd, *tail]


def _repaired(data: bytes) -> list[bytes]:
    """The same envelope and body with correct lengths and checksums, so that mutations get past these."""
    if len(data) < block.HEADER_BYTES:
        return []
    envelope_bytes = struct.unpack_from("<I", data, 4)[0] % (len(data) + 1)
    encoded = data[block.HEADER_BYTES :][:envelope_bytes]
    body_bytes = struct.unpack_from("<I", data, 8)[0]
    body = data[block.HEADER_BYTES + envelope_bytes + -envelope_bytes % 8 :][:body_bytes]
    repaired = [b"".join(block.pack(encoded, body))]
    try:
        fields = msgspec.msgpack.decode(encoded, type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return repaired
    if len(fields) == len(envelope.Envelope.__struct_fields__):
        fields[-1] = msgspec.Raw(msgspec.msgpack.encode(crc32c(body)))
        repaired.append(b"".join(block.pack(msgspec.msgpack.encode(fields), body)))
        fields[-2] = msgspec.Raw(msgspec.msgpack.encode(len(body)))
        repaired.append(b"".join(block.pack(msgspec.msgpack.encode(fields), body)))
    return repaired


def _read_frames(data: bytes) -> None:
    whole = _frames(data, step=len(data) or 1)
    assert whole is None or whole == _frames(data, step=7)


def _frames(data: bytes, step: int) -> list[tuple[bytes, bytes]] | None:
    reader = FrameReader(_FRAME_BYTES_MAX)
    frames: list[tuple[bytes, bytes]] = []
    try:
        for begin in range(0, len(data), step):
            chunk = data[begin : begin + step]
            frames += [(bytes(frame.head), bytes(frame.tail)) for frame in reader.feed(chunk)]
    except REFUSALS:
        return None
    return frames


# --- Mutations ---


def mutate(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """A few random changes of the kinds that break parsers."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        position = chance.randrange(len(changed) + 1)
        length = chance.choice((1, 2, 4, 8, 16, chance.randrange(64)))
        match chance.randrange(8):
            case 0 if position < len(changed):
                changed[position] ^= 1 << chance.randrange(8)
            case 1 if position < len(changed):
                changed[position] = chance.choice((0, 1, 0x7F, 0x80, 0x90, 0xC0, 0xC6, 0xDD, 0xFF))
            case 2:
                width = chance.choice((1, 2, 4, 8))
                number = chance.choice(_EXTREMES) % 256**width
                order = chance.choice(("little", "big"))
                changed[position : position + width] = number.to_bytes(width, order)
            case 3:
                del changed[position : position + length]
            case 4:
                changed[position:position] = chance.randbytes(length)
            case 5:
                changed[position:position] = changed[position : position + length]
            case 6:
                begin = chance.randrange(len(other) + 1)
                changed[position : position + length] = other[begin : begin + length]
            case _:
                del changed[position + length :]
    return bytes(changed[:_INPUT_BYTES_MAX])


def run(seconds: float, seed: int) -> int:
    """Try inputs for so long, and return their number. A bug raises an error with its input.

    Where atheris is installed it gets half of the time, in a process of its own that takes some
    seconds more to start.
    """
    if seconds >= 10 and importlib.util.find_spec("atheris"):
        seconds /= 2
        _run_atheris(int(seconds), seed)
    ends_at = time.monotonic() + seconds
    chance = random.Random(seed)
    inputs = seeds()
    tried = 0
    while tried < len(inputs) or time.monotonic() < ends_at:
        data = inputs[tried] if tried < len(inputs) else chance.choice(inputs)
        if tried >= len(inputs):
            data = mutate(chance, data, chance.choice(inputs))
        try:
            check(data)
        except Exception as error:  # whatever it is, the error must contain the input
            raise AssertionError(f"seed {seed}, input {tried}: {data.hex()}") from error
        tried += 1
    return tried


# --- atheris ---


def _run_atheris(seconds: int, seed: int) -> None:
    with tempfile.TemporaryDirectory(prefix="runnel-fuzz-") as folder:
        for number, data in enumerate(seeds()):
            (Path(folder) / f"seed-{number}").write_bytes(data)
        options = [f"-max_total_time={seconds}", f"-seed={seed % 2**31 or 1}"]
        limits = [f"-max_len={_INPUT_BYTES_MAX}", "-rss_limit_mb=1024", "-timeout=10"]
        command = [sys.executable, "-m", "tests.fuzz.formats", *options, *limits, folder]
        # In its own process group: Ctrl-C is for this process, which ends it in any case.
        subprocess.run(command, check=True, cwd=VECTORS.parents[1], process_group=0)


def main() -> None:
    """Hand `check` to atheris, with the options of the command line."""
    import atheris  # here only: the rest runs without it

    atheris.instrument_all()
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
