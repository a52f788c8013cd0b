"""Log output of a program without logging handlers: its warnings say that pinfeed wrote them."""

from __future__ import annotations

import contextlib
import logging
import sys

_logger = logging.getLogger("pinfeed")


class _Handler(logging.Handler):
    """Prints warnings to stderr, unless the program handles them itself.

    Without any handler, ``logging`` prints them without the name of the logger.
    """

    def emit(self, record: logging.LogRecord) -> None:
        handlers = [*_logger.handlers, *(logging.root.handlers if _logger.propagate else ())]
        if handlers == [self]:
            # A loop continues without an output for warnings, as with the handlers of logging.
            with contextlib.suppress(OSError, ValueError):
                print(self.format(record), file=sys.stderr)


def install() -> None:
    """Let warnings begin with ``pinfeed:``."""
    handler = _Handler(logging.WARNING)
    handler.setFormatter(logging.Formatter("pinfeed: %(message)s"))
    _logger.addHandler(handler)
