"""Route: the route of rows between page-locked stores and a GPU, chosen by measured times.

A file keeps the measured rates of routes from process to process.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pinfeed.devices.kernels import THIN, Grid
from pinfeed.memory.units import human_rate

# Times that differ by less count as equal. The route that uses less of the machine then wins: fewer
# threads leave more of the GPU to the model, and a direct route leaves the CPU free.
_TOLERANCE = 1.03
# Thin blocks must be faster than thick ones by this factor. Even if they fit next to the measured
# products, the model may have kernels that leave no room for them on any multiprocessor.
_THIN_MARGIN = 1.1


@dataclass(frozen=True)
class Timing:
    """Speed of one way to move a batch.

    Attributes:
        rate: Throughput while the GPU does nothing else, in GB/s.
        joint_s: Seconds until a batch is moved and matrix products are computed, if both begin at
            the same time.
    """

    rate: float
    joint_s: float


@dataclass(frozen=True)
class Rates:
    """Measured speed of each route.

    Attributes:
        kernel: Speed by grid, if kernels read the rows from page-locked memory.
        staged: Speed if the CPU gathers the rows, and they are copied.
        products_s: Seconds of the matrix products of ``joint_s`` alone.
        both: Sum of both directions in GB/s, if rows are gathered and scattered directly at the
            same time, in two streams.
        in_turn: Sum of both directions in GB/s, if rows are gathered and scattered directly in
            turn, in one stream.
    """

    kernel: Mapping[Grid, Timing]
    staged: Timing
    products_s: float
    both: float
    in_turn: float


@dataclass(frozen=True)
class Route:
    """Route of the rows of page-locked stores.

    Attributes:
        grid: Blocks of the kernels; None if rows are staged.
        duplex: Whether rows are gathered and scattered at the same time.
        why: Reason for the route, as a sentence for the plan.
    """

    grid: Grid | None
    duplex: bool
    why: str


STAGED = Route(None, True, "")
"""Route if nothing was measured."""


def decide(rates: Rates, wanted: str | None) -> Route:
    """Return the fastest route, or the fastest direct route if ``wanted`` is given.

    The fastest route is the one that completes the transfer and the model's work first.
    """
    grid = fastest_grid(rates.kernel)
    direct = rates.kernel[grid]
    measured = (
        f"{human_rate(1e9 * direct.rate)} by a kernel with {grid}, "
        f"{human_rate(1e9 * rates.staged.rate)} gathered by the CPU and copied "
        f"({_ms(direct.joint_s)} and {_ms(rates.staged.joint_s)} together with matrix products of "
        f"{_ms(rates.products_s)})"
    )
    if wanted is None and rates.staged.joint_s * _TOLERANCE < direct.joint_s:
        return Route(None, True, f"page-locked rows take the staged route: {measured}")
    duplex = rates.both >= rates.in_turn
    order = "at the same time" if duplex else "in turn"
    reason = (
        f"the GPU reads page-locked rows directly: {measured}; rows are gathered and scattered "
        f"{order}"
    )
    return Route(grid, duplex, reason)


def fastest_grid(kernel: Mapping[Grid, Timing]) -> Grid:
    """Return the grid with the fewest threads of those that are nearly the fastest."""
    thick = {grid: timing for grid, timing in kernel.items() if grid.n_threads != THIN}
    thick_s = min((timing.joint_s for timing in thick.values()), default=math.inf)
    if min(timing.joint_s for timing in kernel.values()) * _THIN_MARGIN >= thick_s:
        kernel = thick
    enough_s = _TOLERANCE * min(timing.joint_s for timing in kernel.values())
    fast = [grid for grid, timing in kernel.items() if timing.joint_s <= enough_s]
    return min(fast, key=lambda grid: grid.n_blocks * grid.n_threads)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


_FORMAT = 4


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
    found = _parsed(_read(path).get(key))
    if found is None:
        found = measure()
        # The file is read again, because other processes may have written to it since.
        _write(path, {**_read(path), "format": _FORMAT, key: _entry(found)})
    return found


def _entry(rates: Rates) -> dict[str, Any]:
    """Return rates as JSON, in which the key of an object cannot be a grid."""
    kernel = [(grid, asdict(timing)) for grid, timing in rates.kernel.items()]
    return asdict(rates) | {"kernel": kernel}


def _parsed(entry: Any) -> Rates | None:
    """Return the rates of an entry of the file, or None if it is damaged or missing."""
    try:
        return Rates(
            {Grid(*grid): Timing(**timing) for grid, timing in entry["kernel"]},
            Timing(**entry["staged"]),
            *(float(entry[name]) for name in ("products_s", "both", "in_turn")),
        )
    except (KeyError, TypeError, ValueError):
        return None


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
