"""ProgressBar: a progress bar that shows rates of late, computed whenever it is drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tqdm.auto import tqdm

from pinfeed.memory.units import human_rate
from pinfeed.profiling.stats import Totals

_LATELY_S = 1.0


class ProgressBar(tqdm):  # type: ignore[type-arg]  # at runtime it takes none
    """A tqdm bar with rows and bytes per second, and the share of the time that the loop waited.

    Args:
        totals: What was counted until now.
        kwargs: Of tqdm.
    """

    def __init__(self, *, totals: Callable[[], Totals], **kwargs: Any) -> None:
        self._totals = totals
        self._since = totals()
        self._said = ""
        super().__init__(**kwargs)

    @property
    def format_dict(self) -> Any:
        """What tqdm draws from: asked for when it draws, not per batch."""
        totals = self._totals()
        lately = totals - self._since
        if lately.seconds >= _LATELY_S or not self._said:
            moved = f", {human_rate(1e9 * lately.gb_per_s)}" if lately.bytes else ""
            rates = f"{_short(lately.rows_per_s)} rows/s{moved}"
            self._said = f"{rates}, waited {lately.starved:.0%}" if lately.batches else ""
        if lately.seconds >= _LATELY_S:
            self._since = totals
        return {**super().format_dict, "postfix": self._said}


def _short(number: float) -> str:
    return f"{number:,.0f}" if number < 1e4 else f"{number / 1e3:,.0f}k"
