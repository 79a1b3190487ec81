"""What only the real disk can do wrong: short writes, missing flags, other processes."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from runnel.errors import LockedError
from runnel.platform import disk as disk_module
from runnel.platform.disk import IOV_MAX, Buffer, File, FileAccess, RealDisk

real_pwritev = os.pwritev
real_pread = os.pread


@pytest.fixture
def file(tmp_path: Path) -> Iterator[File]:
    file = RealDisk().open(str(tmp_path / "file"), FileAccess.CREATE)
    yield file
    file.close()


@pytest.fixture
def sync_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which system calls were made to get data to the platter, in order."""
    calls: list[str] = []
    real_fdatasync = os.fdatasync

    def pwritev(descriptor: int, buffers: Sequence[Buffer], position: int, flags: int = 0) -> int:
        calls.append("pwritev+dsync" if flags & os.RWF_DSYNC else "pwritev")
        return real_pwritev(descriptor, buffers, position, flags)

    def fdatasync(descriptor: int) -> None:
        calls.append("fdatasync")
        real_fdatasync(descriptor)

    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    return calls


def refuse(error_number: int) -> Callable[..., int]:
    def call(*args: object) -> int:
        raise OSError(error_number, os.strerror(error_number))

    return call


def test_a_synced_write_is_one_system_call(file: File, sync_calls: list[str]) -> None:
    file.write(0, [b"x"] * IOV_MAX, sync=True)
    assert sync_calls == ["pwritev+dsync"]


def test_a_synced_write_of_several_calls_is_synced_once(file: File, sync_calls: list[str]) -> None:
    file.write(0, [b"x"] * (2 * IOV_MAX + 1), sync=True)
    assert sync_calls == ["pwritev", "pwritev", "pwritev", "fdatasync"]


def test_an_unsynced_write_is_not_synced(file: File, sync_calls: list[str]) -> None:
    file.write(0, [b"x", b"y"], sync=False)
    assert sync_calls == ["pwritev"]


@pytest.mark.parametrize("error_number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_system_without_synced_writes_gets_a_sync_behind(
    file: File, sync_calls: list[str], monkeypatch: pytest.MonkeyPatch, error_number: int
) -> None:
    counted = os.pwritev

    def pwritev(descriptor: int, buffers: Sequence[Buffer], position: int, flags: int = 0) -> int:
        if flags:
            raise OSError(error_number, os.strerror(error_number))
        return counted(descriptor, buffers, position)

    monkeypatch.setattr(os, "pwritev", pwritev)
    for position in (0, 3):
        file.write(position, [b"abc"], sync=True)
    assert file.read(0, 10) == b"abcabc"
    assert sync_calls == ["pwritev", "fdatasync"] * 2


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("took_max", [1, 2, 3, 4, 5, 9])
def test_a_write_goes_on_where_the_system_stopped(
    file: File, monkeypatch: pytest.MonkeyPatch, sync: bool, took_max: int
) -> None:
    def pwritev(descriptor: int, buffers: Sequence[Buffer], position: int, flags: int = 0) -> int:
        return real_pwritev(descriptor, [b"".join(buffers)[:took_max]], position, flags)

    monkeypatch.setattr(os, "pwritev", pwritev)
    buffers: list[Buffer] = [b"abc", b"", bytearray(b"defgh"), memoryview(b"ijklmnop"), b"q"]
    file.write(7, buffers, sync=sync)
    assert file.read(7, 100) == b"abcdefghijklmnopq"


def test_a_write_that_gets_nowhere_is_an_error(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *args: 0)
    with pytest.raises(OSError) as caught:
        file.write(0, [b"abc"], sync=False)
    assert caught.value.errno == errno.EIO
    assert caught.value.filename == file.path


def test_a_read_goes_on_where_the_system_stopped(
    file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write(0, [b"0123456789"], sync=False)
    monkeypatch.setattr(os, "pread", lambda fd, size, at: real_pread(fd, min(size, 3), at))
    assert file.read(1, 8) == b"12345678"
    assert file.read(5, 100) == b"56789"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("sync", [False, True])
def test_a_full_disk_is_an_error_that_names_the_file(sync: bool) -> None:
    full = RealDisk().open("/dev/full", FileAccess.WRITE)
    with pytest.raises(OSError) as caught:
        full.write(0, [b"abc"], sync=sync)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == "/dev/full"
    full.close()


def test_a_failed_sync_is_an_error_that_names_the_file(
    file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fdatasync", refuse(errno.EIO))
    with pytest.raises(OSError) as caught:
        file.sync()
    assert caught.value.errno == errno.EIO
    assert caught.value.filename == file.path


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="needs RWF_NOWAIT")
@pytest.mark.parametrize("has_dsync", [True, False])
def test_what_is_synced_into_a_file_that_was_removed_is_not_stored(
    file: File, monkeypatch: pytest.MonkeyPatch, has_dsync: bool
) -> None:
    if not has_dsync:
        monkeypatch.setattr(file, "_dsync", None)
    file.write(0, [b"here"], sync=True)
    Path(file.path).unlink()
    file.write(4, [b"nowhere"], sync=False)
    told = f"removed while it was in use.*{file.path}"
    with pytest.raises(FileNotFoundError, match=told):
        file.write(4, [b"nowhere"], sync=True)
    with pytest.raises(FileNotFoundError, match=told):
        file.sync()


def test_read_nowait_finds_what_was_just_written(file: File) -> None:
    file.write(0, [b"0123456789"], sync=False)
    found = file.read_nowait(5, 100)
    assert found is None or bytes(found) == b"56789"


def test_read_nowait_of_a_partly_cached_range_is_none(
    file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write(0, [b"0123456789"], sync=False)
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, position, flags: 4)
    assert file.read_nowait(0, 8) is None
    assert file.read_nowait(6, 8) is not None  # position 10 is the end of the file


def test_read_nowait_that_would_wait_is_none_and_is_tried_again(
    file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write(0, [b"0123456789"], sync=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse(errno.EAGAIN))
        assert file.read_nowait(0, 4) is None
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, position, flags: 4)
    assert file.read_nowait(0, 4) is not None


def test_read_nowait_where_unsupported_is_none_ever_after(
    file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write(0, [b"0123456789"], sync=False)
    monkeypatch.setattr(os, "preadv", refuse(errno.EOPNOTSUPP))
    assert file.read_nowait(0, 4) is None
    monkeypatch.setattr(os, "preadv", refuse(errno.EIO))
    assert file.read_nowait(0, 4) is None


def test_read_nowait_reports_a_broken_disk(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", refuse(errno.EIO))
    with pytest.raises(OSError) as caught:
        file.read_nowait(0, 4)
    assert caught.value.filename == file.path


def test_allocated_space_is_really_reserved(file: File) -> None:
    file.allocate(1 << 20)
    assert Path(file.path).stat().st_blocks * 512 >= 1 << 20


def test_allocate_writes_zeros_where_the_system_cannot_reserve(
    file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", refuse(errno.EOPNOTSUPP))
    monkeypatch.setattr(disk_module, "ZEROS_BYTES", 1000)
    file.write(0, [b"abc"], sync=False)
    file.allocate(4500)
    assert file.read(0, 5000) == b"abc" + bytes(4497)


def test_allocate_without_room_raises(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", refuse(errno.ENOSPC))
    with pytest.raises(OSError) as caught:
        file.allocate(4500)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == file.path


def test_make_directory_syncs_every_directory_it_adds_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = RealDisk()
    synced: list[str] = []
    monkeypatch.setattr(RealDisk, "sync_directory", lambda self, path: synced.append(path))
    disk.make_directory(str(tmp_path / "a" / "b"))
    assert synced == [str(tmp_path), str(tmp_path / "a")]


HOLD_LOCK = """
import sys
from runnel.platform.disk import RealDisk
lock = RealDisk().lock(sys.argv[1])
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_lock_excludes_other_processes_until_they_end(tmp_path: Path) -> None:
    path = str(tmp_path / "LOCK")
    source = str(Path(disk_module.__file__).parents[2])
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": source},
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(LockedError, match=f"locked by process {holder.pid};"):
            RealDisk().lock(path)
        holder.send_signal(signal.SIGKILL)
    RealDisk().lock(path).release()


def test_a_lock_whose_file_was_removed_still_excludes(tmp_path: Path) -> None:
    path = tmp_path / "LOCK"
    held = RealDisk().lock(str(path))
    path.unlink()
    with pytest.raises(LockedError, match="is locked by process"):
        RealDisk().lock(str(path))
    held.release()
    RealDisk().lock(str(path)).release()


def test_a_file_system_that_cannot_lock_a_directory_is_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_flock = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real_flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    path = str(tmp_path / "LOCK")
    held = RealDisk().lock(path)
    with pytest.raises(LockedError, match=f"locked by process {os.getpid()};"):
        RealDisk().lock(path)
    held.release()


def test_a_lock_in_a_missing_directory_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RealDisk().lock(str(tmp_path / "none" / "LOCK"))
