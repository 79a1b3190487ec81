"""What the log may rely on from any disk, tried on the real one and on the fake without faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from runnel.errors import LockedError
from runnel.platform.disk import IOV_MAX, Disk, File, FileAccess, RealDisk
from tests.fakes.disk import FakeDisk


@pytest.fixture(params=["real", "fake"])
def disk(request: pytest.FixtureRequest) -> Disk:
    return RealDisk() if request.param == "real" else FakeDisk(Random(1))


@pytest.fixture
def directory(disk: Disk, tmp_path: Path) -> str:
    disk.make_directory(str(tmp_path))
    return str(tmp_path)


@pytest.fixture
def file(disk: Disk, directory: str) -> Iterator[File]:
    file = disk.open(f"{directory}/file", FileAccess.CREATE)
    yield file
    file.close()


def test_what_was_written_is_read_back(file: File) -> None:
    file.write(0, [b"one", bytearray(b"two"), memoryview(b"three")], sync=False)
    assert file.read(0, 11) == b"onetwothree"
    assert file.read(3, 3) == b"two"
    assert file.size() == 11


@pytest.mark.parametrize("sync", [False, True])
def test_more_buffers_than_one_call_takes_are_written_in_order(file: File, sync: bool) -> None:
    buffers = [b"%05d" % number for number in range(2 * IOV_MAX + 7)]
    file.write(10, buffers, sync=sync)
    assert file.read(0, 20_000) == bytes(10) + b"".join(buffers)


def test_writing_nothing_changes_nothing(file: File) -> None:
    file.write(100, [], sync=True)
    file.write(100, [b"", b""], sync=True)
    assert file.size() == 0


def test_views_of_wider_items_are_written_whole(file: File) -> None:
    view = memoryview(bytes(range(16))).cast("Q")
    file.write(0, [view], sync=False)
    assert file.read(0, 100) == bytes(range(16))


def test_a_synced_write_over_older_bytes_replaces_only_its_range(file: File) -> None:
    file.write(0, [b"a" * 2000], sync=False)
    file.write(600, [b"b" * 100], sync=True)
    file.sync()
    assert file.read(0, 2000) == b"a" * 600 + b"b" * 100 + b"a" * 1300


def test_reads_are_short_only_at_the_end_of_the_file(file: File) -> None:
    file.write(0, [b"0123456789"], sync=False)
    assert file.read(8, 5) == b"89"
    assert file.read(10, 5) == b""
    assert file.read(50, 5) == b""
    assert file.read(3, 0) == b""


def test_read_nowait_gives_the_same_bytes_or_none(file: File) -> None:
    file.write(0, [b"0123456789"], sync=True)
    for position, size in [(0, 10), (2, 3), (8, 5), (10, 5), (50, 5)] * 20:
        found = file.read_nowait(position, size)
        assert found is None or bytes(found) == file.read(position, size)


def test_writing_beyond_the_end_leaves_zeros_between(file: File) -> None:
    file.write(5, [b"x"], sync=False)
    assert file.read(0, 10) == b"\0\0\0\0\0x"


def test_allocate_grows_with_zeros_and_never_shrinks(file: File) -> None:
    file.write(0, [b"abc"], sync=False)
    file.allocate(10_000)
    assert file.size() == 10_000
    assert file.read(0, 10_000) == b"abc" + bytes(9_997)
    file.allocate(100)
    assert file.size() == 10_000


def test_truncate_cuts_and_what_was_cut_comes_back_as_zeros(file: File) -> None:
    file.write(0, [b"abcdef"], sync=True)
    file.truncate(2)
    assert file.read(0, 10) == b"ab"
    file.truncate(4)
    assert file.read(0, 10) == b"ab\0\0"


def test_create_refuses_an_existing_file(disk: Disk, directory: str, file: File) -> None:
    with pytest.raises(FileExistsError) as caught:
        disk.open(file.path, FileAccess.CREATE)
    assert caught.value.filename == file.path


@pytest.mark.parametrize("access", [FileAccess.READ, FileAccess.WRITE])
def test_open_refuses_a_missing_file(disk: Disk, directory: str, access: FileAccess) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        disk.open(f"{directory}/none", access)
    assert caught.value.filename == f"{directory}/none"


def test_a_file_opened_for_reading_cannot_be_changed(disk: Disk, file: File) -> None:
    file.write(0, [b"abc"], sync=False)
    reader = disk.open(file.path, FileAccess.READ)
    assert reader.read(0, 3) == b"abc"
    with pytest.raises(OSError) as caught:
        reader.write(0, [b"x"], sync=False)
    assert caught.value.filename == file.path
    assert file.read(0, 3) == b"abc"
    reader.close()


def test_a_file_opened_for_writing_keeps_its_content(disk: Disk, file: File) -> None:
    file.write(0, [b"abc"], sync=False)
    again = disk.open(file.path, FileAccess.WRITE)
    again.write(1, [b"X"], sync=False)
    assert file.read(0, 3) == b"aXc"
    again.close()


def test_a_closed_file_raises_with_its_name_and_closes_again(file: File) -> None:
    file.close()
    file.close()
    for call in (file.size, file.sync, lambda: file.read(0, 1), lambda: file.truncate(0)):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.filename == file.path


def test_list_is_sorted_and_empty_for_a_missing_directory(disk: Disk, directory: str) -> None:
    for name in ("b", "c", "a"):
        disk.open(f"{directory}/{name}", FileAccess.CREATE).close()
    assert disk.list(directory) == ["a", "b", "c"]
    assert disk.list(f"{directory}/none") == []


def test_make_directory_makes_parents_and_may_be_repeated(disk: Disk, directory: str) -> None:
    for _ in range(2):
        disk.make_directory(f"{directory}/x/y/z")
    assert disk.list(f"{directory}/x") == ["y"]
    assert disk.list(f"{directory}/x/y") == ["z"]


def test_make_directory_refuses_the_name_of_a_file(disk: Disk, file: File) -> None:
    with pytest.raises(FileExistsError):
        disk.make_directory(file.path)


def test_rename_replaces_the_target_and_open_files_follow(
    disk: Disk, directory: str, file: File
) -> None:
    file.write(0, [b"new"], sync=True)
    old = disk.open(f"{directory}/target", FileAccess.CREATE)
    old.write(0, [b"old"], sync=True)
    disk.rename(file.path, old.path)
    disk.sync_directory(directory)
    assert disk.list(directory) == ["target"]
    found = disk.open(f"{directory}/target", FileAccess.READ)
    assert found.read(0, 10) == b"new"
    assert old.read(0, 10) == b"old"
    found.close()
    old.close()


def test_rename_of_a_missing_file_is_refused(disk: Disk, directory: str) -> None:
    with pytest.raises(FileNotFoundError):
        disk.rename(f"{directory}/none", f"{directory}/target")


def test_a_removed_file_is_gone_but_its_readers_go_on(disk: Disk, file: File) -> None:
    file.write(0, [b"abc"], sync=True)
    disk.remove(file.path)
    assert file.read(0, 3) == b"abc"
    with pytest.raises(FileNotFoundError):
        disk.open(file.path, FileAccess.READ)
    with pytest.raises(FileNotFoundError):
        disk.remove(file.path)


def test_only_an_empty_directory_is_removed(disk: Disk, directory: str) -> None:
    disk.make_directory(f"{directory}/inner")
    disk.open(f"{directory}/inner/file", FileAccess.CREATE).close()
    with pytest.raises(OSError):
        disk.remove(f"{directory}/inner")
    disk.remove(f"{directory}/inner/file")
    disk.remove(f"{directory}/inner")
    disk.sync_directory(directory)
    assert disk.list(directory) == []


def test_sync_directory_refuses_a_missing_one(disk: Disk, directory: str) -> None:
    with pytest.raises(FileNotFoundError):
        disk.sync_directory(f"{directory}/none")


def test_free_bytes_tells_of_a_directory_that_exists(disk: Disk, directory: str) -> None:
    assert disk.free_bytes(directory) > 0
    with pytest.raises(FileNotFoundError):
        disk.free_bytes(f"{directory}/none")


def test_free_files_are_a_number_or_without_limit(disk: Disk, directory: str) -> None:
    free = disk.free_files(directory)
    assert free is None or free > 0


def test_a_lock_is_held_once_and_names_its_holder(disk: Disk, directory: str) -> None:
    path = f"{directory}/LOCK"
    lock = disk.lock(path)
    with pytest.raises(LockedError, match=r"LOCK is locked by process \d+"):
        disk.lock(path)
    assert "LOCK" in disk.list(directory)
    lock.release()
    lock.release()
    disk.lock(path).release()


def test_locks_of_two_directories_do_not_meet(disk: Disk, directory: str) -> None:
    for name in ("one", "two"):
        disk.make_directory(f"{directory}/{name}")
    one, two = disk.lock(f"{directory}/one/lock"), disk.lock(f"{directory}/two/lock")
    one.release()
    two.release()
