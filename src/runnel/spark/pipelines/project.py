"""Creates and runs projects of Declarative Pipelines.

A separate process loads the project's files and runs them through Spark Connect. This module starts Spark with a
Connect server that listens on loopback and requires a token, or uses a server that runs elsewhere.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template
from typing import Final, TypeAlias

from pyspark.sql import SparkSession

from runnel.errors import ClientFault
from runnel.spark.connections import default_url
from runnel.spark.pipelines import project_process
from runnel.spark.pipelines.project_process import (
    ProjectOutput,
    ProjectProblem,
    ProjectRequest,
    parse_line,
)
from runnel.spark.pipelines.streaming_query import PipelineFailedError
from runnel.spark.runtime.session import session
from runnel.topics.names import Label, check_label, dead_letter_topic

SPEC_NAMES: Final = ("spark-pipeline.yml", "spark-pipeline.yaml")
_STORAGE: Final = "storage"
_TEMPLATE: Final = "project_template"
_TEMPLATE_SUFFIX: Final = ".template"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

_CONNECT: Final = "sc://"
_LOOPBACK: Final = "127.0.0.1"
_JAVA_OPTIONS: Final = "SPARK_SUBMIT_OPTS"
_URL_VARIABLE: Final = "RUNNEL_URL"
_END_TIMEOUT_S: Final = 10.0
_LINES_TOLD_MAX: Final = 20

OnEvent: TypeAlias = Callable[[str], object]


# --- A new project ---


def init_project(directory: Path | str) -> list[Path]:
    """Create a project that runs as it is, in a directory that does not exist yet; returns its files."""
    root = Path(directory)
    name = root.absolute().name
    if not _NAME.fullmatch(name):
        raise ClientFault(
            f"project name {name!r}: it must be of letters, digits, _, - and ., and begin with a letter or digit"
        )
    check_label(Label.SUBSCRIPTION, name)  # its dead-letter topic is named after it
    if root.exists():
        raise ClientFault(f"{root} is there already: choose another name")
    words = {
        "name": name,
        "storage": (root.absolute() / _STORAGE / "checkpoints").as_uri(),
        "dead_letters": dead_letter_topic(name),
    }
    root.mkdir(parents=True)
    return _fill(resources.files(__package__) / _TEMPLATE, root, words)


def _fill(template: Traversable, directory: Path, words: Mapping[str, str]) -> list[Path]:
    made = []
    for entry in sorted(template.iterdir(), key=lambda each: each.name):
        path = directory / entry.name.removesuffix(_TEMPLATE_SUFFIX)
        if entry.is_dir():
            path.mkdir()
            made += _fill(entry, path, words)
        elif entry.name.endswith(_TEMPLATE_SUFFIX):
            path.write_text(Template(entry.read_text("utf-8")).substitute(words), "utf-8")
            made.append(path)
    return made


# --- Running a project ---


def run_project(
    directory: Path | str = ".",
    *,
    master: str = "local[*]",
    url: str | None = None,
    conf: Mapping[str, str] | None = None,
    tables: Sequence[str] = (),
    full_refresh: bool = False,
    dry_run: bool = False,
    on_event: OnEvent | None = None,
) -> None:
    """Run a project once: process everything that came since the last run, and end.

    `master`: a master of Spark, or sc://HOST:PORT of a Connect server. `url`: the broker, which the project finds in
    the variable RUNNEL_URL. `conf`: settings of Spark. `tables`: run only these. `full_refresh`: discard earlier
    results and begin again. `dry_run`: only check. `on_event` is called with each event's text. PipelineFailedError
    says what went wrong.
    """
    spec = find_spec(Path(directory))
    request = ProjectRequest(
        spec=str(spec), tables=tuple(tables), full_refresh=full_refresh, dry_run=dry_run
    )
    environment = {_URL_VARIABLE: url or default_url()}
    if master.startswith(_CONNECT):
        _run(request, environment | {"SPARK_REMOTE": master}, on_event)
        return
    if SparkSession.getActiveSession() is not None:
        raise ClientFault(
            "this process has a Spark session already, and a project needs one of its own: stop that one, or run the "
            "project on a Connect server, master sc://HOST:PORT"
        )
    token, port = secrets.token_hex(), _free_port()
    settings = catalogue_settings(spec.parent) | server_settings(port, token) | dict(conf or {})
    with _without_derby_log():
        spark = session(f"runnel {spec.parent.name}", master, settings)
    try:
        remote = {
            "SPARK_REMOTE": f"{_CONNECT}localhost:{port}",
            "SPARK_CONNECT_AUTHENTICATE_TOKEN": token,
        }
        _run(request, environment | remote, on_event)
    finally:
        spark.stop()


def find_spec(directory: Path) -> Path:
    """The specification file of a project."""
    found = [directory / name for name in SPEC_NAMES if (directory / name).is_file()]
    if not found:
        raise ClientFault(
            f"{directory} has no {SPEC_NAMES[0]}, so it is no project: runnel pipeline init NAME makes one"
        )
    return found[0].absolute()


def catalogue_settings(project: Path) -> dict[str, str]:
    """Settings that keep the tables for the next run: Spark's own catalogue is lost when Spark ends."""
    storage = project.absolute() / _STORAGE
    return {
        "spark.sql.catalogImplementation": "hive",
        "spark.sql.warehouse.dir": str(storage / "tables"),
        "spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:derby:;databaseName={storage / 'catalogue'};create=true",
    }


@contextmanager
def _without_derby_log() -> Iterator[None]:
    """Prevent the catalogue's database from writing derby.log into the current directory. Set before Java starts."""
    before = os.environ.get(_JAVA_OPTIONS)
    os.environ[_JAVA_OPTIONS] = f"{before or ''} -Dderby.stream.error.file={os.devnull}".strip()
    try:
        yield
    finally:
        if before is None:
            del os.environ[_JAVA_OPTIONS]
        else:
            os.environ[_JAVA_OPTIONS] = before


def server_settings(port: int, token: str) -> dict[str, str]:
    """Settings that make a session a Connect server too, for clients on this machine that have the token."""
    return {
        "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
        "spark.connect.grpc.binding.address": _LOOPBACK,
        "spark.connect.grpc.binding.port": str(port),
        "spark.connect.authenticate.token": token,
    }


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((_LOOPBACK, 0))
        port: int = listener.getsockname()[1]
        return port


def _run(request: ProjectRequest, environment: Mapping[str, str], on_event: OnEvent | None) -> None:
    """Run the process that loads the project's files, which is a client of Spark Connect."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", project_process.__name__, request.encode()],
            env=_without_gateway(os.environ) | dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
        )
        problem = None
        try:
            assert process.stdout is not None
            for line in process.stdout:
                match parse_line(line):
                    case ProjectProblem(text):
                        problem = text
                    case ProjectOutput(text) if on_event is not None:
                        on_event(text)
            process.wait()
        finally:
            _end(process)
        if problem is not None:
            raise PipelineFailedError(problem)
        if process.returncode:
            errors.seek(0)
            last = "".join(deque(errors, _LINES_TOLD_MAX))
            raise PipelineFailedError(
                f"the process that ran the project ended with {process.returncode}:\n{last}"
            )


def _without_gateway(environment: Mapping[str, str]) -> dict[str, str]:
    """Remove variables of this process's own session, which would connect the client to its JVM."""
    return {
        name: value for name, value in environment.items() if not name.startswith("PYSPARK_GATEWAY")
    }


def _end(process: subprocess.Popen[str]) -> None:
    """End the process: it gets an interrupt, as by Ctrl-C, and is killed if it does not end in time."""
    assert process.stdout is not None
    process.stdout.close()
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
