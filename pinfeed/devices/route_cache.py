"""File that keeps the measured rates of routes from process to process."""

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


def cached_rates(
    key: str, measure: Callable[[], Rates], folder: pathlib.Path | None = None
) -> Rates:
    """Return the rates under ``key``, measured if the file does not have them.

    Args:
        key: Name of what is measured.
        measure: Measures the rates, which are then written to the file if that is possible.
        folder: Folder of the file; by default, the user's cache folder.
    """
    path = (folder or _cache_folder()) / "routes.json"
    known = _read(path)
    rates = _parsed(known.get(key))
    if rates is None:
        rates = measure()
        _write(path, {**known, "format": _FORMAT, key: asdict(rates)})
    return rates


def _parsed(entry: Any) -> Rates | None:
    """Return the rates of an entry of the file, or None if it is damaged or missing."""
    try:
        fields = dict(entry)
        direct = {int(n_blocks): float(rate) for n_blocks, rate in fields.pop("direct").items()}
        rates = Rates(direct, **{name: float(rate) for name, rate in fields.items()})
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    values = (*direct.values(), rates.staged, rates.both, rates.in_turn)
    return rates if direct and all(map(math.isfinite, values)) else None


def _read(path: pathlib.Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(path.read_text())
        if isinstance(known, dict) and known.get("format") == _FORMAT:
            return known
    return {}


def _write(path: pathlib.Path, known: dict[str, Any]) -> None:
    """Replace the file. If that fails, the rates are measured again next time."""
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            aside.write_text(json.dumps(known))
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)


def _cache_folder() -> pathlib.Path:
    try:
        parent = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    except RuntimeError:
        # The user has no home, as in some containers, so nothing can be kept.
        return pathlib.Path(os.devnull)
    return parent / "pinfeed"
