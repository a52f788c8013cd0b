"""Route: the route of rows between page-locked stores and a GPU, chosen by measured times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pinfeed.devices.kernels import THIN, Grid
from pinfeed.memory.units import human_rate

# Times that differ by less count as equal. The route that uses less of the machine then wins: fewer
# threads leave more of the GPU to the model, and a direct route leaves the CPU free.
_TOLERANCE = 1.03
# Thin blocks must be faster than thick ones by this factor. Even if they fit next to the measured
# products, the model may have kernels that leave no room for them on any multiprocessor.
_THIN_MARGIN = 1.1

Mover = Literal["kernel", "copy engine"]


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
        copy_engine: Speed if the copy engine reads long rows, and kernels read the others; None if
            the driver does not support it, or gave wrong rows.
        staged: Speed if the CPU gathers the rows, and they are copied.
        products_s: Seconds of the matrix products of ``joint_s`` alone.
        both: Sum of both directions in GB/s, if rows are gathered and scattered directly at the
            same time, in two streams.
        in_turn: Sum of both directions in GB/s, if rows are gathered and scattered directly in
            turn, in one stream.
    """

    kernel: Mapping[Grid, Timing]
    copy_engine: Timing | None
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
        mover: Mover of long rows, ``"kernel"`` or ``"copy engine"``. Kernels move the other rows.
    """

    grid: Grid | None
    duplex: bool
    why: str
    mover: Mover = "kernel"


STAGED = Route(None, True, "")
"""Route if nothing was measured."""


def decide(rates: Rates, wanted: str | None) -> Route:
    """Return the fastest route, or the fastest direct route if ``wanted`` is given.

    The fastest route is the one that completes the transfer and the model's work first.
    """
    route = fastest_direct(rates.kernel, rates.copy_engine)
    assert route.grid is not None
    direct, how = rates.kernel[route.grid], f"a kernel with {route.grid}"
    if route.mover == "copy engine" and rates.copy_engine is not None:
        direct, how = rates.copy_engine, "the copy engine"
    measured = (
        f"{human_rate(1e9 * direct.rate)} by {how}, {human_rate(1e9 * rates.staged.rate)} gathered "
        f"by the CPU and copied ({_ms(direct.joint_s)} and {_ms(rates.staged.joint_s)} together "
        f"with matrix products of {_ms(rates.products_s)})"
    )
    if wanted is None and rates.staged.joint_s * _TOLERANCE < direct.joint_s:
        return Route(None, True, f"page-locked rows take the staged route: {measured}")
    duplex = rates.both >= rates.in_turn
    order = "at the same time" if duplex else "in turn"
    reason = (
        f"the GPU reads page-locked rows directly: {measured}; rows are gathered and scattered "
        f"{order}"
    )
    return Route(route.grid, duplex, reason, route.mover)


def fastest_direct(kernel: Mapping[Grid, Timing], copy_engine: Timing | None) -> Route:
    """Return the fastest direct route: the copy engine, or as few threads as are fast."""
    thick = {grid: timing for grid, timing in kernel.items() if grid.n_threads != THIN}
    thick_s = min((timing.joint_s for timing in thick.values()), default=math.inf)
    if min(timing.joint_s for timing in kernel.values()) * _THIN_MARGIN >= thick_s:
        kernel = thick
    enough_s = _TOLERANCE * min(timing.joint_s for timing in kernel.values())
    fast = [grid for grid, timing in kernel.items() if timing.joint_s <= enough_s]
    grid = min(fast, key=lambda grid: grid.n_blocks * grid.n_threads)
    most_s = _TOLERANCE * kernel[grid].joint_s
    is_fast = copy_engine is not None and copy_engine.joint_s <= most_s
    return Route(grid, True, "", "copy engine" if is_fast else "kernel")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
