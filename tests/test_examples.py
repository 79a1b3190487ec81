"""Every program in examples/ does what it says, against a real broker."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import environment, serving

EXAMPLES = Path(__file__).parents[1] / "examples"
SECONDS_MAX = 60

SAID = {
    "publish_subscribe": "sensors/a 1 21.5 C\nsensors/b 1 1013 hPa\n",
    "last_values": "{'house/kitchen': '22.0'}\n"
    "{'house/cellar': '14.0', 'house/kitchen': '22.0'}\n"
    "{'house/cellar': '14.0', 'house/kitchen': '23.5'}\n",
    "replay": "order 991 to order 1000\n"
    "1000 in the last five minutes, first offset 1\n"
    "billed 400 orders, next is 401\n"
    "billed 400 orders, next is 801\n"
    "billed 200 orders, next is 1001\n",
    "blocking": "10000 messages in log/web\nthe last is at offset 10000\n",
}
WITHOUT_A_BROKER = {"demo", "embedded", "test_orders"}


@pytest.fixture(scope="module")
def broker_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("broker")) as (_, url):
        yield url


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """A program that warns of nothing, such as a connection that was left open."""
    return subprocess.run(
        [sys.executable, "-W", "error", *words],
        env=environment(),
        capture_output=True,
        text=True,
        cwd=EXAMPLES.parent,
        timeout=SECONDS_MAX,
        check=False,
    )


@pytest.mark.parametrize("name", SAID)
def test_example_says_what_it_found(name: str, broker_url: str) -> None:
    ended = run(str(EXAMPLES / f"{name}.py"), broker_url)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, SAID[name], "")


def test_broker_inside_a_program_keeps_what_it_is_given_a_directory_for(tmp_path: Path) -> None:
    where = str(tmp_path / "data")
    assert "offset 1 stored\nresize cat.jpg\n" in run(str(EXAMPLES / "embedded.py"), where).stdout
    assert "offset 2 stored\nresize cat.jpg\n" in run(str(EXAMPLES / "embedded.py"), where).stdout


def test_broker_inside_a_test() -> None:
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLES / "test_orders.py"))
    ended = run(*words)
    assert ended.returncode == 0, ended.stdout
    assert "2 passed" in ended.stdout


def test_demo_survives_the_kill_of_its_broker_and_every_count_agrees(tmp_path: Path) -> None:
    ended = run(str(EXAMPLES / "demo.py"), "--readings", "1000", "--data", str(tmp_path / "demo"))
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    for row in ("published", "read slowly", "replayed"):
        assert re.search(rf"^{row} +48,000 ", ended.stdout, re.MULTILINE), ended.stdout
    assert re.search(r"^lost, twice, misplaced +0, 0, 0 ", ended.stdout, re.MULTILINE)
    assert "Everything adds up." in ended.stdout


def test_demo_that_is_interrupted_takes_its_broker_along(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--data", str(tmp_path / "demo")]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None
        url = demo.stdout.readline().split()[4].rstrip(",")
        while not demo.stdout.readline().startswith("Started it again"):
            assert demo.poll() is None
        demo.send_signal(signal.SIGINT)
        _, told = demo.communicate(timeout=SECONDS_MAX)
    assert (demo.returncode, told) == (130, "interrupted\n")
    ended = run("-m", "runnel", "topics", "--url", url)
    assert "cannot connect" in ended.stderr


@pytest.mark.parametrize(
    ("words", "problem"),
    [(("--readings", "10"), "at least 500"), (("--data", ""), "the name is empty")],
)
def test_demo_says_what_it_cannot_do(words: tuple[str, ...], problem: str) -> None:
    ended = run(str(EXAMPLES / "demo.py"), *words)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert problem in ended.stderr


def test_every_example_is_run_here() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == SAID.keys() | WITHOUT_A_BROKER
