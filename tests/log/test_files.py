"""A bounded number of open files."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from runnel.log.segments.files import OpenFiles
from runnel.platform.disk import File, FileAccess
from tests.fakes.disk import FakeDisk


def made(count: int, open_files_max: int) -> tuple[FakeDisk, OpenFiles]:
    disk = FakeDisk(1)
    for number in range(count):
        file = disk.open(f"f{number}", FileAccess.CREATE)
        file.write(0, [b"%d" % number], sync=True)
        file.close()
    return disk, OpenFiles(disk, open_files_max)


def is_open(file: File) -> bool:
    try:
        file.size()
    except OSError:
        return False
    return True


def test_file_stays_open_for_the_next_who_uses_it() -> None:
    _, files = made(1, 4)
    with files.use("f0") as first:
        pass
    with files.use("f0") as second:
        assert second is first
    assert len(files) == 1


def test_least_recently_used_is_closed_for_the_next() -> None:
    _, files = made(4, 2)
    opened: list[File] = []
    for name in ("f0", "f1", "f0", "f2"):
        with files.use(name) as file:
            opened.append(file)
    assert len(files) == 2
    assert [is_open(file) for file in opened] == [True, False, True, True]


def test_file_in_use_is_not_closed_though_the_limit_is_passed() -> None:
    _, files = made(5, 2)
    with ExitStack() as stack:
        used = [stack.enter_context(files.use(f"f{number}")) for number in range(5)]
        assert all(is_open(file) for file in used)
        assert len(files) == 5
    with files.use("f0"):
        pass
    with files.use("f4"):
        pass
    assert len(files) <= 5
    files.close()
    assert not any(is_open(file) for file in used)


def test_limit_holds_again_once_files_are_given_back() -> None:
    _, files = made(6, 2)
    with ExitStack() as stack:
        for number in range(5):
            stack.enter_context(files.use(f"f{number}"))
    with files.use("f5"):
        pass
    assert len(files) == 2


def test_forgotten_path_is_opened_anew_and_old_readers_may_finish() -> None:
    disk, files = made(2, 4)
    with files.use("f0") as old:
        disk.rename("f1", "f0")
        files.forget("f0")
        assert old.read(0, 9) == b"0"
        with files.use("f0") as new:
            assert new.read(0, 9) == b"1"
    assert not is_open(old)
    assert is_open(new)


def test_forgetting_closes_a_file_that_nobody_uses() -> None:
    _, files = made(1, 4)
    with files.use("f0") as file:
        pass
    files.forget("f0")
    assert not is_open(file)
    files.forget("f0")  # once more does no harm
    assert len(files) == 0


def test_file_that_cannot_be_opened_leaves_nothing_behind() -> None:
    _, files = made(1, 4)
    with pytest.raises(FileNotFoundError), files.use("nowhere"):
        pass
    assert len(files) == 0


def test_file_is_given_back_when_its_user_fails() -> None:
    _, files = made(2, 1)
    with pytest.raises(ValueError, match="mine"), files.use("f0") as file:
        raise ValueError("mine")
    with files.use("f1"):
        pass
    assert not is_open(file)
