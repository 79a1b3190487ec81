"""The unit, the image and the compose file of docs/howto/systemd-and-container.md do what they are for.

Neither systemd nor a container engine is needed: what they would start is started, with what they would give it.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import yaml  # type: ignore[import-untyped]

from runnel.config import Settings
from tests.cli.conftest import START_SECONDS_MAX
from tests.server.server_process import held_port

ROOT: Final = Path(__file__).parents[1]
DEPLOY: Final = ROOT / "examples/deploy"
PAGE: Final = ROOT / "docs/howto/systemd-and-container.md"
UNIT: Final = (DEPLOY / "runnel.service").read_text()
IMAGE: Final = (DEPLOY / "Containerfile").read_text()
COMPOSE: Final = (DEPLOY / "compose.yaml").read_text()
DATA: Final = "/var/lib/runnel"


def unit() -> Mapping[str, str]:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # keys have capitals
    parser.read_string(UNIT)
    return dict(parser.items("Service"))


def instructions() -> list[tuple[str, str]]:
    """Of the image, in order, with lines that go on joined."""
    joined = IMAGE.replace("\\\n", " ")
    lines = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(word, " ".join(rest.split())) for word, rest in lines]


@contextmanager
def started(
    words: Sequence[str], environment: Mapping[str, str], directory: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A broker that has said that it is ready, as a service manager starts it."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RUNNEL_")}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(START_SECONDS_MAX)
        manager.bind("notify")
        with subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=directory,
            env=own | dict(environment) | {"NOTIFY_SOCKET": "notify"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as broker:
            try:
                assert manager.recv(100) == b"READY=1"
                yield broker
                broker.send_signal(signal.SIGTERM)
                _, told = broker.communicate(timeout=START_SECONDS_MAX)
                assert broker.returncode == 0, told
                assert manager.recv(100) == b"STOPPING=1"
                # Every line is an object: journals and collectors of logs take them apart.
                assert all(json.loads(line)["level"] for line in told.splitlines())
            finally:
                broker.kill()


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def held() -> Iterator[ExitStack]:
    """Ports that no other test gets meanwhile."""
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("text", [UNIT, IMAGE, COMPOSE], ids=["unit", "image", "compose"])
def test_the_page_shows_the_files(text: str) -> None:
    assert f"\n{text}```\n" in PAGE.read_text(), f"{PAGE.name} and examples/deploy differ"


def test_the_unit_starts_a_broker_that_says_when_it_is_ready(directory: Path) -> None:
    service = unit()
    program, *words = shlex.split(service["ExecStart"])
    assert service["Type"] == "notify"
    (directory / "runnel.toml").write_text(
        '[native]\nlisten = "127.0.0.1:0"\n[http]\nlisten = "none"\n[grpc]\nlisten = "none"\n'
    )
    places = {"/etc/runnel/runnel.toml": "runnel.toml", DATA: "data"}
    with started([Path(program).name, *(places.get(word, word) for word in words)], {}, directory):
        assert (directory / "data/runnel.json").exists()


def test_the_unit_leaves_time_and_files_enough() -> None:
    settings, service = Settings(), unit()
    drains_ns = [
        listener.drain_timeout_ns for listener in (settings.native, settings.http, settings.grpc)
    ]
    assert int(service["TimeoutStopSec"]) * 10**9 > max(drains_ns)
    connections = settings.native.connections_max + settings.http.connections_max
    files = connections + settings.grpc.calls_max + settings.limits.open_files_max
    assert int(service["LimitNOFILE"]) > files
    assert f"{files + 256:,} open files" in PAGE.read_text()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_knows_every_word_of_the_unit(tmp_path: Path) -> None:
    path = tmp_path / "runnel.service"
    path.write_text(re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={sys.executable}", UNIT))
    verify = ["systemd-analyze", "verify", "--man=no", str(path)]
    told = subprocess.run(verify, capture_output=True, text=True, check=False).stderr
    assert [line for line in told.splitlines() if path.name in line and "nknown" in line] == []


def test_the_image_starts_a_broker_that_its_health_check_finds_well(
    directory: Path, held: ExitStack
) -> None:
    given = instructions()
    environment = dict(
        pair.split("=", 1) for word, rest in given if word == "ENV" for pair in rest.split()
    )
    assert environment.pop("PATH").startswith("/opt/runnel/bin:")
    assert environment["RUNNEL_DATA"] == DATA
    ports = {each: held.enter_context(held_port()) for each in ("7470", "7480", "7490")}
    for name, value in environment.items():
        for documented, port in ports.items():
            value = value.replace(f":{documented}", f":{port}")
        environment[name] = value.replace(DATA, str(directory / "data"))
    words = [
        each for word, rest in given if word in ("ENTRYPOINT", "CMD") for each in json.loads(rest)
    ]
    health = next(rest for word, rest in given if word == "HEALTHCHECK")
    program, *check = json.loads(health.partition("CMD ")[2])
    assert program == "python"
    check = [word.replace("7480", str(ports["7480"])) for word in check]
    with started(words, environment, directory):
        subprocess.run([sys.executable, *check], check=True, timeout=START_SECONDS_MAX)
        assert (directory / "data/runnel.json").exists()


def test_the_image_is_built_from_what_is_there_and_serves_as_nobody_in_particular() -> None:
    given = instructions()
    for word, rest in given:
        if word == "COPY" and not rest.startswith("--from"):
            assert all((ROOT / name).exists() for name in rest.split()[:-1]), rest
    installed = next(rest for word, rest in given if word == "RUN" and "pip install" in rest)
    assert "'.[http,grpc]'" in installed
    assert dict(given)["USER"] == "10470"
    assert dict(given)["VOLUME"] == DATA


def test_the_compose_file_keeps_data_and_gives_time_to_drain() -> None:
    service: dict[str, Any] = yaml.safe_load(COMPOSE)["services"]["runnel"]
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).samefile(
        DEPLOY / "Containerfile"
    )
    assert service["volumes"] == [f"data:{DATA}"]
    assert service["stop_grace_period"] == "30s"
    assert service["read_only"] is True
