"""A Spark Connect server that tests share: a process with a Spark of its own.

Usage: python connect_server.py PORT TOKEN DIRECTORY. It says when it is ready, and ends when its standard input does.
Tables of Declarative Pipelines are kept in DIRECTORY.
"""

from __future__ import annotations

import sys
from pathlib import Path

from runnel.spark.pipelines.project import catalogue_settings, server_settings
from runnel.spark.runtime.session import session


def main(port: int, token: str, directory: Path) -> None:
    settings = {
        **server_settings(port, token),
        **catalogue_settings(directory),
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.extraJavaOptions": f"-Dderby.stream.error.file={directory / 'derby.log'}",
    }
    spark = session("connect", "local[2]", settings)
    print("ready", flush=True)
    sys.stdin.read()
    spark.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
