"""Rules for every test: how examples and seeds are chosen, and that a test leaves nothing running."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests.simulation.seeds import fix_seed_of_the_day

# grpcio warns of forks and threads, which does not matter here. It reads this variable when it is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# numpy starts threads for linear algebra, which no test needs, and they keep a core busy when a process starts.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Hypothesis tries the same examples on every run, so that a failure belongs to the change that made it. bin/soak tries
# new ones. There are no deadlines: a slow machine is not a fault.
settings.register_profile("test", derandomize=True, deadline=None, database=None, print_blob=True)
settings.register_profile(
    "soak",
    deadline=None,
    max_examples=5_000,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "test"))

# How long threads and processes of a test may take to end after it.
END_SECONDS_MAX = 2.0

# Before test processes start: they inherit it.
SEEDS_LINE = fix_seed_of_the_day()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Print the seeds of the day, also with --quiet, which leaves out pytest's header."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if isinstance(reporter, pytest.TerminalReporter) and not session.config.option.collectonly:
        reporter.write_line(SEEDS_LINE)


def running_children() -> dict[int, str]:
    """Live child processes of this one by id, without Python's own resource tracker."""
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    children = {}
    for child in psutil.Process().children():
        try:
            if child.pid != tracker and child.status() != psutil.STATUS_ZOMBIE:
                children[child.pid] = " ".join(child.cmdline())
        except psutil.NoSuchProcess:
            continue
    return children


@pytest.fixture(autouse=True)
def no_thread_stays_behind() -> Iterator[None]:
    """A test that leaves a thread running fails: another test would meet it."""
    before = set(threading.enumerate())
    yield
    ends_at = time.monotonic() + END_SECONDS_MAX
    for thread in set(threading.enumerate()) - before:
        thread.join(max(0.0, ends_at - time.monotonic()))
    left = [thread.name for thread in set(threading.enumerate()) - before]
    assert not left, f"threads still running after the test: {left}"


@pytest.fixture(autouse=True, scope="module")
def no_process_stays_behind() -> Iterator[None]:
    """A module that leaves a child process running fails."""
    before = running_children()
    yield
    ends_at = time.monotonic() + END_SECONDS_MAX
    while left := {pid: line for pid, line in running_children().items() if pid not in before}:
        if time.monotonic() > ends_at:
            pytest.fail(f"processes still running after the module's tests: {left}")
        time.sleep(0.01)
