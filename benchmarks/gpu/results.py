"""Results of parts, which say what they were measured with."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gpu.recorder import Fields

_REQUIRED = {
    "environment": "the machine and the versions",
    "commit": "the commit of the source tree",
    "compiled_part": 'whether the compiled part was used: "used", or why not',
}


def load(path: Path) -> Fields:
    """Return the result of a part.

    Raises:
        ValueError: If it is incomplete, or does not say what it was measured with. Rates without
            the compiled part are several times lower, so such a result decides nothing.
    """
    try:
        record: Fields = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no complete result: {error}") from error
    missing = [f"{name!r}, {what}" for name, what in _REQUIRED.items() if not record.get(name)]
    if missing and record.get("status") != "not started":
        raise ValueError(f"{path} lacks {'; '.join(missing)}: measure it again")
    return record
