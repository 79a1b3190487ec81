"""Tells which extras of the package are installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

_MODULES: Final = {
    "http": ("litestar", "uvicorn", "httptools", "prometheus_client"),
    "grpc": ("grpc", "grpc_health", "grpc_reflection", "google.protobuf"),
}


def has_extra(name: str) -> bool:
    return all(_is_there(module) for module in _MODULES[name])


def how_to_install(name: str) -> str:
    return f"install Runnel with its extra {name!r}: pip install '.[{name}]' in its source"


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False
