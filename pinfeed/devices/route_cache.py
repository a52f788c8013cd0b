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

from pinfeed.devices.route import Rates, Timing

_FORMAT = 2


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
        rates = Rates(
            kernel={int(n_blocks): _timing(one) for n_blocks, one in entry["kernel"].items()},
            copy_engine=None if entry["copy_engine"] is None else _timing(entry["copy_engine"]),
            staged=_timing(entry["staged"]),
            products_s=_finite(entry["products_s"]),
            both=_finite(entry["both"]),
            in_turn=_finite(entry["in_turn"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return rates if rates.kernel else None


def _timing(entry: Any) -> Timing:
    return Timing(_finite(entry["rate"]), _finite(entry["joint_s"]))


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not a measured number")
    return number


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
        # The user has no home folder, as in some containers, so nothing can be kept.
        return pathlib.Path(os.devnull)
    return parent / "pinfeed"
