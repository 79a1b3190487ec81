"""A page of a shard is read in pieces, some of them without waiting; the result is the same."""

from __future__ import annotations

import pytest

from runnel.log.disk import reader
from runnel.log.disk.disk_log import DiskLog
from runnel.log.disk.reader import ShardReader
from runnel.log.log import Position, ShardId
from tests.fakes.disk import FakeDisk, FakeFile
from tests.log.home import Home, run
from tests.log.samples import one, read_payloads

MAIN = ShardId("main")
PAYLOADS = [b"%03d" % number * 40 for number in range(20)]


async def filled(home: Home) -> DiskLog:
    log = await home.open()
    for payload in PAYLOADS:
        await log.append(one("a", payload))
    return log


def cached_for(monkeypatch: pytest.MonkeyPatch, reads: int) -> None:
    """So many reads are answered without waiting, and then none."""
    left = iter(range(reads))

    def read_nowait(file: FakeFile, position: int, size: int) -> bytes | None:
        return None if next(left, None) is None else file.read(position, size)

    monkeypatch.setattr(FakeFile, "read_nowait", read_nowait)


@pytest.mark.parametrize("piece_bytes", [1, 1_000, 2**19])
@pytest.mark.parametrize("nowait_probability", [0.0, 0.5, 1.0])
def test_page_is_the_same_in_however_many_pieces_it_is_read(
    monkeypatch: pytest.MonkeyPatch, piece_bytes: int, nowait_probability: float
) -> None:
    monkeypatch.setattr(reader, "PIECE_BYTES", piece_bytes)
    home = Home(disk=FakeDisk(7, nowait_probability=nowait_probability))

    async def scenario() -> None:
        log = await filled(home)
        page = await log.read_shard(MAIN, Position(0, 1))
        assert read_payloads(page) == PAYLOADS
        assert page.next_position.entry == 21
        content = home.content(home.shard_files(".segment")[0])
        blocks = b"".join([bytes(found.block) for found in page.found])
        assert content[64 : 64 + len(blocks)] == blocks

        block_bytes = len(page.found[0].block)
        small = await log.read_shard(MAIN, Position(0, 3), bytes_max=5 * block_bytes)
        assert read_payloads(small) == PAYLOADS[2:7]
        assert small.next_position.entry == 8
        await log.close()

    run(scenario)


@pytest.mark.parametrize("damaged", [0, 7, 19])
@pytest.mark.parametrize("reads", [0, 2, 100])
def test_damaged_batch_is_passed_in_whichever_piece_it_lies(
    monkeypatch: pytest.MonkeyPatch, damaged: int, reads: int
) -> None:
    monkeypatch.setattr(reader, "PIECE_BYTES", 1_000)
    home = Home()

    async def scenario() -> None:
        log = await filled(home)
        page = await log.read_shard(MAIN, Position(0, 1))
        sizes = [len(found.block) for found in page.found]
        [path] = home.shard_files(".segment")
        home.disk.flip_bit(path, 64 + sum(sizes[: damaged + 1]) - 20, 3)
        cached_for(monkeypatch, reads)
        page = await log.read_shard(MAIN, Position(0, 1))
        assert read_payloads(page) == PAYLOADS[:damaged] + PAYLOADS[damaged + 1 :]
        assert page.next_position.entry == 21
        [gap] = page.gaps
        assert gap.position == 64 + sum(sizes[:damaged])
        assert (gap.first_offset, gap.next_offset) == (damaged + 1, damaged + 2)
        await log.close()

    run(scenario)


def test_file_that_goes_while_the_rest_is_waited_for_leaves_what_was_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = Home()

    def gone(_: ShardReader, path: str, position: int, size: int) -> bytes:
        raise FileNotFoundError(path)

    async def scenario() -> None:
        log = await filled(home)
        monkeypatch.setattr(reader, "PIECE_BYTES", 1)
        monkeypatch.setattr(ShardReader, "_read_waiting", gone)
        cached_for(monkeypatch, 3)
        page = await log.read_shard(MAIN, Position(0, 1))
        assert read_payloads(page) == PAYLOADS[:3]
        assert page.next_position.entry == 4
        with pytest.raises(FileNotFoundError):
            await log.read_shard(MAIN, page.next_position)
        await log.close()

    run(scenario)
