"""wrapped(): text for terminals of 80 columns."""

from __future__ import annotations

import textwrap

_WIDTH = 80


def wrapped(text: str, first: str = "", rest: str = "") -> str:
    """Wrap a paragraph at 80 columns; a path or a command is never broken.

    Args:
        text: The paragraph.
        first: Indent of the first line.
        rest: Indent of the other lines.
    """
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
