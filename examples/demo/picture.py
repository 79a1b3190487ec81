"""A screen as an SVG without references to other files."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rich.console import Console
from rich.terminal_theme import TerminalTheme

# Rich fills in the braces. Its own template fetches a font from the network; this one takes what the reader has, and
# every stretch of text has a length of its own, so that columns stand in line in any of them.
_TEMPLATE: Final = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="bin/demo in a terminal">
    <!-- Made by bin/demo, of one of its runs -->
    <style>
    .{unique_id}-matrix {{
        font-family: ui-monospace, "SFMono-Regular", Menlo, Consolas, "DejaVu Sans Mono", "Liberation Mono", monospace;
        font-size: {char_height}px;
        line-height: {line_height}px;
        font-variant-east-asian: full-width;
    }}
    .{unique_id}-title {{
        font-size: 18px;
        font-weight: bold;
        font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
    }}
    {styles}
    </style>
    <defs>
    <clipPath id="{unique_id}-clip-terminal">
      <rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
    </clipPath>
    {lines}
    </defs>
    {chrome}
    <g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
    {backgrounds}
    <g class="{unique_id}-matrix">
    {matrix}
    </g>
    </g>
</svg>
"""
_THEME: Final = TerminalTheme(
    (18, 22, 30),
    (214, 220, 228),
    [
        (18, 22, 30),
        (240, 98, 98),
        (110, 200, 120),
        (222, 184, 96),
        (104, 158, 240),
        (190, 140, 230),
        (86, 190, 200),
        (214, 220, 228),
    ],
)


def write_picture(recorded: Console, path: Path, title: str) -> None:
    """The SVG of everything that a console with `record=True` has printed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    svg = recorded.export_svg(
        title=title, theme=_THEME, code_format=_TEMPLATE, unique_id="runnel", clear=False
    )
    path.write_text(svg, encoding="utf-8")
