"""The holder of a lock is found, and looking for it does not prevent locking."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runnel.platform.disk import FileLock
from runnel.platform.lock_holder import LockHolder, find_lock_holder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is only doubt")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "lock")


def test_without_a_file_nobody_holds_it(path: str) -> None:
    assert find_lock_holder(path) is None


def test_this_process_is_a_holder_too(path: str) -> None:
    lock = FileLock(path)
    assert find_lock_holder(path) == LockHolder(os.getpid(), is_certain=True)
    lock.release()
    assert find_lock_holder(path) is None


def test_another_process_holds_it_until_it_is_killed(path: str) -> None:
    code = (
        "import sys\n"
        "from runnel.platform.disk import FileLock\n"
        f"lock = FileLock({path!r})\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        assert find_lock_holder(path) == LockHolder(process.pid, is_certain=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert Path(path).read_text().strip() == str(process.pid)  # no process was left to clear it
        assert find_lock_holder(path) is None


def test_asking_never_keeps_anybody_from_locking(path: str) -> None:
    ended = threading.Event()
    Path(path).write_text("1\n")  # as a killed process leaves it: the case that is looked into

    def ask() -> None:
        while not ended.is_set():
            find_lock_holder(path)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(300):
            FileLock(path).release()  # LockedError would fail the test
            Path(path).write_text("1\n")
    finally:
        ended.set()
        asking.join()


def test_file_that_may_not_be_leased_is_looked_up_among_the_locks(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runnel.platform.lock_holder._is_open_for_writing", lambda _: None)
    lock = FileLock(path)
    assert find_lock_holder(path) == LockHolder(os.getpid(), is_certain=True)
    lock.release()


def test_doubt_counts_as_held(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runnel.platform.lock_holder._is_open_for_writing", lambda _: None)
    monkeypatch.setattr("runnel.platform.lock_holder._is_listed", lambda _: None)
    Path(path).write_text("4711\n")
    assert find_lock_holder(path) == LockHolder(4711, is_certain=False)
