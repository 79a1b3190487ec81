"""One Spark session for the whole folder: it takes long to start, and the first of everything in it is slow."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.find_spark_home import _find_spark_home
from pyspark.sql import SparkSession

from runnel.client import BlockingBus
from runnel.spark.read.page_connection import close_page_connections
from runnel.spark.runtime.session import session
from tests.conftest import running_children
from tests.spark.brokers import DiskBroker
from tests.spark.row_batches import ROWS

# For every Java that these tests start. They are over before its better compiler and its other threads pay.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With pytest-xdist, all of these run in one process, where they share the session."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("spark"))


@pytest.fixture(autouse=True, scope="session")
def spark_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Spark as pip brought it, but for its Python as a zip: its Java puts that first on every worker's path.

    There is no bytecode in it, so that each of some hundred processes would compile PySpark anew, for longer than most
    of them have anything else to do; without it they find what is installed.
    """
    found, home = Path(_find_spark_home()), tmp_path_factory.mktemp("spark") / "home"
    home.mkdir()
    for path in found.iterdir():
        if path.name != "python":
            (home / path.name).symlink_to(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_HOME", str(home))
        yield


@pytest.fixture(scope="session")
def spark(spark_home: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pyspark and pandas, when they are first imported
        found = session(
            "tests",
            "local[2]",
            {
                "spark.sql.shuffle.partitions": "2",
                "spark.driver.memory": "1g",
                "spark.sql.session.timeZone": "UTC",
                "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
            },
        )
        yield found
        found.stop()


@pytest.fixture(autouse=True, scope="module")
def no_process_stays_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """As everywhere; but Spark's Java stays for the modules behind, so it is there before this one looks."""
    if any(
        "spark" in item.fixturenames
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
    ):
        request.getfixturevalue("spark")
    before = running_children()
    yield
    left = {pid: line for pid, line in running_children().items() if pid not in before}
    assert not left, f"processes still running after the module's tests: {left}"


@pytest.fixture(autouse=True)
def no_line_stays_open() -> Iterator[None]:
    """Where a test does what tasks do, in its own process."""
    yield
    close_page_connections()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[DiskBroker]:
    """A broker of its own for one test."""
    with DiskBroker(tmp_path / "data") as serving:
        yield serving


@pytest.fixture
def bus(broker: DiskBroker) -> Iterator[BlockingBus]:
    with broker.connect() as connected:
        yield connected


@pytest.fixture
def rows_directory(tmp_path: Path) -> Path:
    """Where a stream finds its rows: 25,000 of them, in a file."""
    directory = tmp_path / "rows"
    directory.mkdir()
    lines = (f'{{"payload": "{number}"}}\n' for number in range(ROWS))
    (directory / "first.json").write_text("".join(lines))
    return directory
