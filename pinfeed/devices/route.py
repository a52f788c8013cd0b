"""Route: the way of rows between page-locked stores and a GPU, decided from measured rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pinfeed.memory.units import human_rate

# Fewer blocks that reach this share of the best rate leave more of the GPU to the model.
_ENOUGH = 0.97


@dataclass(frozen=True)
class Rates:
    """Measured throughput of each route, in GB/s."""

    direct: Mapping[int, float]
    """Rates by number of blocks, if a kernel reads the rows from page-locked memory."""
    staged: float
    """Rate if the CPU gathers the rows, and they are copied."""
    both: float
    """Sum of both directions, if kernels gather and scatter at the same time, in two streams."""
    in_turn: float
    """Sum of both directions, if kernels gather and scatter in turn, in one stream."""


@dataclass(frozen=True)
class Route:
    """Route of the rows of page-locked stores.

    Attributes:
        n_blocks: Blocks of the kernels; 0 if rows are staged.
        duplex: Whether rows are gathered and scattered at the same time.
        why: Reason for the route, as a sentence for the plan.
    """

    n_blocks: int
    duplex: bool
    why: str


STAGED = Route(0, True, "")
"""Route if nothing was measured."""


def decide(rates: Rates, wanted: str | None) -> Route:
    """Return the fastest route, or the fastest direct route if ``wanted`` is given."""
    n_blocks = fewest_blocks(rates.direct)
    direct = human_rate(1e9 * rates.direct[n_blocks])
    staged = human_rate(1e9 * rates.staged)
    measured = f"{direct} by {n_blocks} blocks of a kernel, {staged} gathered by the CPU and copied"
    if wanted is None and rates.direct[n_blocks] < rates.staged:
        return Route(0, True, f"page-locked rows are staged: {measured}")
    duplex = rates.both >= rates.in_turn
    order = "at the same time" if duplex else "in turn"
    reason = (
        f"the GPU reads page-locked rows itself: {measured}; "
        f"rows are gathered and scattered {order}"
    )
    return Route(n_blocks, duplex, reason)


def fewest_blocks(rates: Mapping[int, float]) -> int:
    """Return the smallest number of blocks that is nearly as fast as the fastest."""
    enough = _ENOUGH * max(rates.values())
    return min(n_blocks for n_blocks, rate in rates.items() if rate >= enough)
