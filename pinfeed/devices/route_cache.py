"""File that keeps measured rates of routes, and trials of drivers, from process to process."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from pinfeed.devices.kernels import THICK, THIN, Grid
from pinfeed.devices.route import Rates, Timing

_FORMAT = 3


@dataclass(frozen=True)
class Trial:
    """Result of a trial of the driver.

    Attributes:
        failure: Fault of the driver, as a clause; empty if it has none.
    """

    failure: str


_Entry = TypeVar("_Entry", Rates, Trial)


def cached_rates(
    key: str, measure: Callable[[], Rates], folder: pathlib.Path | None = None
) -> Rates:
    """Return the rates under ``key``, measured if the file does not have them.

    Args:
        key: Name of what is measured.
        measure: Measures the rates, which are then written to the file if that is possible.
        folder: Folder of the file; by default, the user's cache folder.
    """
    return _cached(key, _parsed, measure, routes_file(folder))


def cached_trial(key: str, run: Callable[[], Trial], folder: pathlib.Path | None = None) -> Trial:
    """Return the result of a trial of the driver, which is run if the file does not have it.

    Args:
        key: Name of what is tried, with the GPU and the driver.
        run: Runs the trial. Its errors are not kept.
        folder: Folder of the file; by default, the user's cache folder.
    """
    return _cached(key, _parsed_trial, run, routes_file(folder))


def routes_file(folder: pathlib.Path | None = None) -> pathlib.Path:
    """Return the path of the file; by default, in the user's cache folder."""
    return (folder or _cache_folder()) / "routes.json"


def _cached(
    key: str, parse: Callable[[Any], _Entry | None], make: Callable[[], _Entry], path: pathlib.Path
) -> _Entry:
    found = parse(_read(path).get(key))
    if found is None:
        found = make()
        # The file is read again, because other processes may have written to it since.
        _write(path, {**_read(path), "format": _FORMAT, key: _entry(found)})
    return found


def _parsed_trial(entry: Any) -> Trial | None:
    """Return the trial of an entry of the file, or None if it is damaged or missing."""
    failure = entry.get("failure") if isinstance(entry, dict) else None
    return Trial(failure) if isinstance(failure, str) else None


def _entry(found: Rates | Trial) -> dict[str, Any]:
    """Return rates or a trial as JSON."""
    entry = asdict(found)
    if isinstance(found, Rates):
        # The key of an object of JSON cannot be a grid.
        entry["kernel"] = [(grid, asdict(timing)) for grid, timing in found.kernel.items()]
    return entry


def _parsed(entry: Any) -> Rates | None:
    """Return the rates of an entry of the file, or None if it is damaged or missing."""
    try:
        rates = Rates(
            kernel={_grid(*grid): _timing(timing) for grid, timing in entry["kernel"]},
            copy_engine=None if entry["copy_engine"] is None else _timing(entry["copy_engine"]),
            staged=_timing(entry["staged"]),
            products_s=_finite(entry["products_s"]),
            both=_finite(entry["both"]),
            in_turn=_finite(entry["in_turn"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return rates if rates.kernel else None


def _grid(n_blocks: Any, n_threads: Any) -> Grid:
    if n_threads not in (THICK, THIN):
        raise ValueError(f"no kernel has blocks of {n_threads!r} threads")
    return Grid(int(n_blocks), n_threads)


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
