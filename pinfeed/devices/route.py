"""Route: the way of rows between page-locked stores and a GPU, decided from measured rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pinfeed.memory.limits import human_rate

# Fewer blocks that reach this share of the best rate leave more of the GPU to the model.
_ENOUGH = 0.97


@dataclass(frozen=True)
class Rates:
    """What was measured, in GB/s."""

    direct: Mapping[int, float]
    """A kernel reads the rows where they are, by number of blocks."""
    staged: float
    """The CPU gathers the rows, and they are copied."""
    both: float
    """Rows to the device and others back, by kernels in two streams: sum of both directions."""
    in_turn: float
    """The same, in one stream."""


@dataclass(frozen=True)
class Route:
    """How rows go.

    Attributes:
        n_blocks: Of the kernels; 0: rows are staged.
        duplex: Whether rows come and go at the same time.
        why: A sentence for the plan.
    """

    n_blocks: int
    duplex: bool
    why: str


STAGED = Route(0, True, "")
"""Nothing was measured."""


def decide(rates: Rates, wanted: str | None) -> Route:
    """The fastest way; or, if that is ``wanted``, the best of the direct ones."""
    n_blocks = fewest_blocks(rates.direct)
    direct, staged = human_rate(1e9 * rates.direct[n_blocks]), human_rate(1e9 * rates.staged)
    said = f"{direct} by {n_blocks} blocks of a kernel, {staged} gathered by the CPU and copied"
    if wanted is None and rates.direct[n_blocks] < rates.staged:
        return Route(0, True, f"page-locked rows are staged: {said}")
    duplex = rates.both >= rates.in_turn
    order = "at the same time" if duplex else "in turn"
    return Route(
        n_blocks, duplex, f"the GPU reads page-locked rows itself: {said}; rows come and go {order}"
    )


def fewest_blocks(rates: Mapping[int, float]) -> int:
    """Blocks that are nearly as fast as the fastest."""
    return min(
        n_blocks for n_blocks, rate in rates.items() if rate >= _ENOUGH * max(rates.values())
    )
