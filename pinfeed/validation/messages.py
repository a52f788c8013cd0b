"""Text for people: wrapped paragraphs, and warnings in the log."""

from __future__ import annotations

import contextlib
import logging
import sys
import textwrap

from pinfeed.errors import logger

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


class _Handler(logging.Handler):
    """Prints warnings to stderr, unless the program handles them itself.

    Without any handler, ``logging`` prints them without the name of the logger.
    """

    def emit(self, record: logging.LogRecord) -> None:
        handlers = [*logger.handlers, *(logging.root.handlers if logger.propagate else ())]
        if handlers == [self]:
            # A loop continues without an output for warnings, as with the handlers of logging.
            with contextlib.suppress(OSError, ValueError):
                print(self.format(record), file=sys.stderr)


def install_log_output() -> None:
    """Let warnings begin with ``pinfeed:``."""
    handler = _Handler(logging.WARNING)
    handler.setFormatter(logging.Formatter("pinfeed: %(message)s"))
    logger.addHandler(handler)
