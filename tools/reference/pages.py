"""Which pages are generated, and by what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from runnel.config.renderer import reference_page as settings_page
from tools.reference.command_line import command_line_page
from tools.reference.python_api import python_page
from tools.reference.rest import rest_page

ROOT: Final = Path(__file__).resolve().parents[2]

PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "docs/settings.md": settings_page,
    "docs/reference/cli.md": command_line_page,
    "docs/reference/python.md": python_page,
    "docs/reference/http.md": rest_page,
}
