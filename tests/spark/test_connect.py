"""Spark Connect: a user's session that is somewhere else, and Declarative Pipelines, which know no other."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from deltalake import DeltaTable

from runnel.client import BlockingBus
from runnel.spark.pipelines.project import init_project, run_project
from runnel.spark.pipelines.streaming_query import PipelineFailedError
from tests.spark import connect_client, connect_server
from tests.spark.brokers import DiskBroker
from tests.spark.read_results import stored

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOKEN_VARIABLE = "SPARK_CONNECT_AUTHENTICATE_TOKEN"
SECONDS_MAX = 400.0


class Server(NamedTuple):
    remote: str
    token: str

    @property
    def environment(self) -> dict[str, str]:
        others = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("PYSPARK_GATEWAY")
        }
        return others | {TOKEN_VARIABLE: self.token}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all of these: a Java of its own takes long to start."""
    directory = tmp_path_factory.mktemp("connect")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    token = secrets.token_hex()
    errors = directory / "stderr"
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, connect_server.__file__, str(port), token, str(directory)],
            cwd=directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n", errors.read_text()[-3000:]
        yield Server(f"sc://localhost:{port}", token)
    finally:
        process.stdin.close()
        process.wait(SECONDS_MAX)
        process.stdout.close()


def publish(bus: BlockingBus) -> None:
    for number in range(10):
        payload = b"?" if number == 9 else b'{"celsius": %d.5, "station": "n"}' % number
        bus.publish("sensors", payload, key=b"%d" % number, tags={"n": str(number)})


def test_a_session_of_connect_reads_writes_and_runs_statements_as_any_other(
    server: Server, broker: DiskBroker, bus: BlockingBus, tmp_path: Path
) -> None:
    publish(bus)
    client = subprocess.run(
        [sys.executable, connect_client.__file__, server.remote, broker.url, str(tmp_path)],
        env=server.environment,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    said = [line for line in client.stderr.splitlines() if not line.startswith("\tat ")]
    assert client.returncode == 0, "\n".join(said[-40:])
    seen = json.loads(client.stdout.splitlines()[-1])
    assert seen["session"] == "pyspark.sql.connect.session"
    assert seen["offsets"] == [8, 9, 10]
    assert (seen["topic"], seen["table"]) == (10, 10)
    assert "`topc` cannot be resolved" in seen["error"]
    assert "line 1: SELECT topc FROM sensors" in seen["error"]

    assert [m.payload for m in stored(bus, "written")] == [b"5.5", b"6.5", b"7.5", b"8.5"]
    given = stored(bus, "sensors")
    assert [(m.payload, m.key, m.tags, m.event_time_ns) for m in stored(bus, "copied")] == [
        (m.payload, m.key, m.tags, m.event_time_ns) for m in given
    ]
    hot = [json.loads(m.payload)["celsius"] for m in stored(bus, "hot")]
    assert hot == [5.5, 6.5, 7.5, 8.5]
    assert DeltaTable(tmp_path / "hot").to_pyarrow_table()["celsius"].to_pylist() == hot
    for topic in ("dead/topic", "dead/table"):
        assert [m.payload for m in stored(bus, topic)] == [b"?"]


def test_a_new_project_runs_as_it_is_and_again_and_shows_its_mistakes(
    server: Server,
    broker: DiskBroker,
    bus: BlockingBus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, server.token)
    project = tmp_path / "greenhouse"
    init_project(project)
    topics = project / "transformations" / "topics.py"
    events: list[str] = []

    def run(*, dry_run: bool = False) -> None:
        run_project(
            project, master=server.remote, url=broker.url, dry_run=dry_run, on_event=events.append
        )

    for first in (0, 10):
        for number in range(first, first + 10):
            device = "ab"[number % 2]
            bus.publish(
                f"events/{device}",
                b'{"device": "%s", "celsius": %d}' % (device.encode(), number + 25),
            )
        bus.publish("events/a", b"cold")
        run()
        alerts = [json.loads(m.payload)["celsius"] for m in stored(bus, "alerts")]
        assert sorted(alerts) == list(range(31, first + 35))
        assert len(stored(bus, "!dead/greenhouse")) == first // 10 + 1
    assert "Run is COMPLETED." in events
    assert stored(bus, "!dead/greenhouse")[0].tags["dead.error"] == "the payload is not JSON"

    sql = project / "transformations" / "readings.sql"
    sql.write_text(sql.read_text().replace("event_time, device", "event_time, devic"))
    with pytest.raises(PipelineFailedError, match=r"Flows with errors: .*readings"):
        run(dry_run=True)
    (told,) = [event for event in events if "devic`" in event]
    assert told.endswith("[`device`, `topic`, `celsius`, `event_time`]. (line 3, column 27)")
    topics.write_text(f"{topics.read_text()}\nraise ValueError('of mine')\n")
    with pytest.raises(
        PipelineFailedError, match=r"^transformations/topics\.py, line \d+: ValueError: of mine$"
    ):
        run(dry_run=True)
