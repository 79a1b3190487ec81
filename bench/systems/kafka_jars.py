"""Kafka's jars: resolved by Maven with the machine's own settings, once, into the user's cache."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

VERSION = "4.1.0"
_SCALA = "2.13"
_LOGGER = "1.7.36"  # of the line that Kafka is built against; without one it would say nothing of its errors
_FETCH_SECONDS_MAX = 300
_DONE = "complete"
_POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>runnel.bench</groupId>
  <artifactId>kafka</artifactId>
  <version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>kafka_{_SCALA}</artifactId>
      <version>{VERSION}</version>
    </dependency>
    <dependency>
      <groupId>org.slf4j</groupId>
      <artifactId>slf4j-simple</artifactId>
      <version>{_LOGGER}</version>
    </dependency>
  </dependencies>
</project>
"""


def folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "runnel" / "bench" / f"kafka-{VERSION}"


def are_here() -> bool:
    return (folder() / _DONE).exists()


def fetch() -> str | None:
    """Make sure of them. Why that was not possible, or nothing."""
    if are_here():
        return None
    maven = shutil.which("mvn")
    if maven is None:
        return "its jars are not here, and there is no Maven (mvn) to fetch them"
    place = folder()
    place.mkdir(parents=True, exist_ok=True)
    (place / "pom.xml").write_text(_POM)
    goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", "-DoutputDirectory=jars"]
    try:
        answer = subprocess.run(
            [maven, "--batch-mode", "--quiet", *goal],
            cwd=place,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_FETCH_SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"Maven did not fetch its jars within {_FETCH_SECONDS_MAX} s"
    if answer.returncode:
        errors = [line for line in answer.stdout.splitlines() if "ERROR" in line]
        return f"Maven could not fetch its jars: {errors[0] if errors else answer.returncode}"
    (place / _DONE).touch()
    return None


def class_path() -> str:
    return str(folder() / "jars" / "*")
