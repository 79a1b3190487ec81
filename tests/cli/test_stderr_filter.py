"""The lines of Java and Spark's Python processes that a pipeline's command passes on."""

from __future__ import annotations

import subprocess
import sys

from runnel.cli.commands.pipeline.stderr_filter import worth_telling

DAEMON = [
    b"Traceback (most recent call last):\n",
    b'  File "/x/pyspark.zip/pyspark/daemon.py", line 264, in manager\n',
    b"    outfile.flush()\n",
    b"BrokenPipeError: [Errno 32] Broken pipe\n",
]
MINE = [
    b"Traceback (most recent call last):\n",
    b'  File "/x/mine.py", line 1, in <module>\n',
    b"ValueError: of mine\n",
]


def test_traces_of_sparks_daemon_are_left_out_and_all_others_told() -> None:
    said = [b"one\n", *DAEMON, *MINE, b"  indented\n", *DAEMON, b"two\n"]
    assert list(worth_telling(said)) == [b"one\n", *MINE, b"  indented\n", b"two\n"]


def test_a_trace_that_breaks_off_is_left_out() -> None:
    assert list(worth_telling([b"one\n", *DAEMON[:2]])) == [b"one\n"]
    assert list(worth_telling([*DAEMON[:2], *MINE])) == MINE


def test_javas_word_about_incubator_modules_is_left_out() -> None:
    assert list(worth_telling([b"WARNING: Using incubator modules: jdk.incubator.vector\n"])) == []


def test_what_a_process_says_later_is_heard_and_ones_own_standard_error_stays() -> None:
    program = """
import subprocess, sys
from runnel.cli.commands.pipeline.stderr_filter import filtered_stderr
with filtered_stderr():
    said = subprocess.Popen(["sh", "-c", "read line; echo WARNING: Using incubator modules >&2; echo $line >&2"],
                            stdin=subprocess.PIPE, text=True)
print("mine", file=sys.stderr, flush=True)
said.communicate("theirs\\n")
import threading
[thread.join(10) for thread in threading.enumerate() if thread.name == "runnel-stderr-filter"]
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == "mine\ntheirs\n"
