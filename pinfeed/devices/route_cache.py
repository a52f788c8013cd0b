"""Measured rates of routes, remembered in a file."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from pinfeed.devices.route import Rates

_FORMAT = 1


def remembered(key: str, measure: Callable[[], Rates], folder: pathlib.Path | None = None) -> Rates:
    """The rates under ``key``; measured, and written down where that can be, if they are not known."""
    path = (folder or _cache_folder()) / "routes.json"
    known = _read(path)
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        found = dict(known[key])
        direct = {int(n_blocks): float(rate) for n_blocks, rate in found.pop("direct").items()}
        rates = Rates(direct, **{name: float(rate) for name, rate in found.items()})
        if direct and all(
            map(math.isfinite, (*direct.values(), rates.staged, rates.both, rates.in_turn))
        ):
            return rates
    rates = measure()
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        # It is measured again next time.
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            aside.write_text(json.dumps({**known, "format": _FORMAT, key: asdict(rates)}))
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    return rates


def _read(path: pathlib.Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(path.read_text())
        if isinstance(known, dict) and known.get("format") == _FORMAT:
            return known
    return {}


def _cache_folder() -> pathlib.Path:
    try:
        return (
            pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
            / "pinfeed"
        )
    except RuntimeError:
        # A user without a home, as in some containers: nothing is remembered.
        return pathlib.Path(os.devnull)
