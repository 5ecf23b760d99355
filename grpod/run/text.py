"""Text for a terminal, in one place: rich markup in, plain or coloured text out, whichever the terminal takes."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Mapping

from rich.console import Console, RenderableType

_WIDE = 160  # columns where no terminal says how many


def to_text(content: RenderableType) -> str:
    out, terminal = io.StringIO(), sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else _WIDE
    console = Console(file=out, force_terminal=terminal, width=width, highlight=False, emoji=False)
    console.print(content, soft_wrap=isinstance(content, str))
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def counts(values: Mapping[str, int]) -> str:
    """`68 (stale 64, zero_spread 4)`"""
    total = sum(values.values())
    return f"{total} ({', '.join(f'{name} {count}' for name, count in values.items())})" if values else "0"


def ago(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
