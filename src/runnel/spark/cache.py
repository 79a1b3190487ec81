"""Where small things that Spark needs may stay from one session to the next."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path


def cache_directory(environment: Mapping[str, str]) -> Path:
    """Of this user, for Runnel alone. It need not exist yet."""
    if chosen := environment.get("XDG_CACHE_HOME"):
        return Path(chosen) / "runnel"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "runnel"
    return Path.home() / ".cache" / "runnel"
