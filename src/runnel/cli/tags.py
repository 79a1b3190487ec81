"""Tags as people write them: NAME=VALUE."""

from __future__ import annotations

from collections.abc import Iterable

from runnel.errors import ClientFault


def parse_tags(option: str, texts: Iterable[str]) -> dict[str, str]:
    """Of two for the same name the later one holds."""
    return dict(_parse(option, text) for text in texts)


def _parse(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ClientFault(f"{option} {text!r}: write it as NAME=VALUE, such as unit=C")
    return name, value
