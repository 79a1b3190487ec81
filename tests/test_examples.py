"""Every program in examples/ does what it says, against a real broker. The demo has tests/test_demo.py."""

from __future__ import annotations

import shutil
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
WITHOUT_A_BROKER = {"embedded", "test_orders"}


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


def test_every_example_is_run_here() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == SAID.keys() | WITHOUT_A_BROKER


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
@pytest.mark.parametrize("example", ["node-client", "node-grpc"])
def test_command_line_of_node_says_how_it_is_used(example: str, tmp_path: Path) -> None:
    """Also before `npm install`: in a copy of the folder without its packages."""
    for name in ("cli.js", "runnel.js", "package.json"):
        shutil.copy(EXAMPLES / example / name, tmp_path)

    def node(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["node", "cli.js", *words]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=SECONDS_MAX
        )

    helped = node("--help")
    assert (helped.returncode, helped.stderr) == (0, "")
    assert helped.stdout.startswith("node cli.js publish TOPIC PAYLOAD")
    assert node("-h").stdout == helped.stdout
    mistaken = node("publish", "a", "x", "--lvel", "none")
    assert mistaken.returncode == 2
    assert mistaken.stderr.startswith("Unknown option '--lvel'")
    assert mistaken.stderr.endswith(helped.stdout)
