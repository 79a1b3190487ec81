"""What a scan makes of a file that was cut, torn or damaged."""

from __future__ import annotations

from random import Random

import pytest

from runnel.formats import block
from runnel.formats.batch import Batch
from runnel.log.segments import segment
from runnel.log.segments.scan import Scanned, ScanWindow
from runnel.log.segments.segment import HEADER_BYTES
from tests.log.samples import batch, one
from tests.log.segment_samples import Numbers, segment_bytes

PATH = "x.segment"


def stored(count: int, payload: bytes = b"payload") -> list[Batch]:
    numbers = Numbers()
    return [numbers.store(one("a", payload, b"%d" % number)) for number in range(count)]


def scan(content: bytes, *, durable: int = 0) -> tuple[list[int], Scanned]:
    """The entries that were found, and the outcome."""

    def read(position: int, size: int) -> bytes:
        return content[position : position + size]

    scanner = segment.scanner(
        PATH, ScanWindow(read, len(content)), search_bytes=1 << 20, durable=durable
    )
    entries = [unit.content.envelope.entry for unit in scanner if unit.content is not None]
    return entries, scanner.result()


def ends_of(content: bytes) -> list[int]:
    """Where each block ends, the header's end first."""
    ends = [HEADER_BYTES]
    while ends[-1] < len(content):
        ends.append(ends[-1] + block.read_header(content, ends[-1]).block_bytes)
    return ends


def test_whole_file_is_found_whole() -> None:
    content = segment_bytes(stored(4))
    entries, scanned = scan(content)
    assert entries == [1, 2, 3, 4]
    assert scanned.end == len(content)
    assert scanned.durable == ends_of(content)[-2]  # nothing vouches for the last
    assert scanned.torn is None
    assert not scanned.damage


def test_file_cut_at_any_byte_keeps_what_is_whole_before_it() -> None:
    content = segment_bytes(stored(3))
    ends = ends_of(content)
    for length in range(HEADER_BYTES, len(content)):
        entries, scanned = scan(content[:length])
        whole = sum(end <= length for end in ends[1:])
        assert entries == list(range(1, whole + 1))
        assert scanned.end == ends[whole]
        assert not scanned.damage
        is_at_end = length in ends
        assert (scanned.torn is None) == is_at_end
        if scanned.torn is not None:
            assert scanned.torn.position == ends[whole]
            assert "torn tail cut" in scanned.torn.problem


def test_preallocated_zeros_are_no_tail() -> None:
    content = segment_bytes(stored(2))
    entries, scanned = scan(content + bytes(4096))
    assert entries == [1, 2]
    assert scanned.end == len(content)
    assert scanned.torn is None


def test_mark_ends_the_file_and_vouches_for_it() -> None:
    content = segment_bytes(stored(2))
    entries, scanned = scan(content + block.pack_mark(len(content)) + bytes(64))
    assert entries == [1, 2]
    assert scanned.end == scanned.durable == len(content)
    assert scanned.torn is None


def test_bytes_that_a_later_block_vouches_for_are_damage_and_are_passed() -> None:
    content = bytearray(segment_bytes(stored(5)))
    ends = ends_of(bytes(content))
    for position in range(ends[1], ends[2]):  # every byte of the second of five
        damaged = bytearray(content)
        damaged[position] ^= 0x10
        entries, scanned = scan(bytes(damaged))
        assert entries == [1, 3, 4, 5]
        assert scanned.end == len(content)
        [damage] = scanned.damage
        assert (damage.path, damage.position, damage.size) == (PATH, ends[1], ends[2] - ends[1])
        assert str(damage).startswith(f"{PATH}:{ends[1]}: ")
        assert scanned.torn is None


def test_torn_block_cuts_the_whole_group_that_was_written_with_it() -> None:
    """Whole blocks behind a torn one of the same group vouch for nothing: they were never synced."""
    content = bytearray(segment_bytes(stored(6), group=3))
    ends = ends_of(bytes(content))
    content[ends[4] + 30] ^= 1  # the second block of the second group
    entries, scanned = scan(bytes(content))
    assert entries == [1, 2, 3, 4]
    assert scanned.end == ends[4]
    assert scanned.torn is not None
    assert scanned.torn.position == ends[4]
    assert not scanned.damage


def test_damage_to_the_last_block_is_damage_if_a_mark_vouches_for_it() -> None:
    content = bytearray(segment_bytes(stored(3)))
    ends = ends_of(bytes(content))
    content += block.pack_mark(len(content))
    content[ends[2] + 40] ^= 4
    entries, scanned = scan(bytes(content))
    assert entries == [1, 2]
    [damage] = scanned.damage
    assert damage.position == ends[2]
    assert scanned.end == ends[3]
    assert scanned.torn is None


def test_damage_at_the_end_of_what_is_known_to_be_stored_is_not_a_tail() -> None:
    content = bytearray(segment_bytes(stored(3)))
    ends = ends_of(bytes(content))
    content[ends[2] + 40] ^= 4
    entries, scanned = scan(bytes(content), durable=len(content))
    assert entries == [1, 2]
    assert [damage.position for damage in scanned.damage] == [ends[2]]
    assert scanned.end == len(content)


def test_damage_reaches_as_far_as_what_is_known_to_be_stored() -> None:
    content = segment_bytes(stored(3))
    ends = ends_of(content)
    for length in range(ends[1] + 1, len(content)):
        entries, scanned = scan(content[:length], durable=len(content))
        begin = max(end for end in ends if end <= length)
        assert entries == [1, 2][: ends.index(begin)]
        assert [(bad.position, bad.size) for bad in scanned.damage] == [
            (begin, len(content) - begin)
        ]
        assert scanned.end == len(content)


def test_several_damaged_places_are_each_reported() -> None:
    content = bytearray(segment_bytes(stored(8)))
    ends = ends_of(bytes(content))
    for number in (1, 2, 5):
        content[ends[number] + 26] ^= 1
    entries, scanned = scan(bytes(content))
    assert entries == [1, 4, 5, 7, 8]
    assert [damage.position for damage in scanned.damage] == [ends[1], ends[5]]


def test_payload_that_looks_like_a_block_is_not_taken_for_one() -> None:
    numbers = Numbers(entry=70)
    inner = segment_bytes([numbers.store(one("evil", b"x"))])[HEADER_BYTES:]
    content = bytearray(segment_bytes(stored(3, payload=bytes(4) + inner + inner)))
    entries, _ = scan(bytes(content))
    assert entries == [1, 2, 3]
    ends = ends_of(bytes(content))
    content[ends[1] + 3] ^= 1
    entries, scanned = scan(bytes(content))
    assert entries[0] == 1
    assert entries[-1] == 3
    assert scanned.damage


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_never_lead_astray(seed: int) -> None:
    random = Random(seed)
    content = segment_bytes(stored(2))
    noise = random.randbytes(random.randint(1, 3000))
    entries, scanned = scan(content + noise)
    assert entries == [1, 2]
    assert scanned.end == len(content)
    assert scanned.torn is not None


def test_window_gives_any_part_of_a_file_larger_than_itself() -> None:
    numbers = Numbers()
    large = [numbers.store(batch(("a", [b"%d" % n * 1_500_000]))) for n in range(4)]
    content = segment_bytes(large)
    assert len(content) > 5 * 2**20
    entries, scanned = scan(content)
    assert entries == [1, 2, 3, 4]
    assert scanned.end == len(content)
