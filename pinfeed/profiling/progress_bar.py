"""ProgressBar: a progress bar with recent rates, which are computed when it is drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tqdm.auto import tqdm

from pinfeed.memory.units import human_rate
from pinfeed.profiling.stats import FeederStats

# Minimum time, in seconds, over which rates are averaged.
_RECENT_S = 1.0


class ProgressBar(tqdm):  # type: ignore[type-arg]  # at runtime it takes none
    """A tqdm bar with rows and bytes per second, and the share of the time that the loop waited.

    Args:
        stats: Returns the statistics until now.
        kwargs: Arguments of tqdm.
    """

    def __init__(self, *, stats: Callable[[], FeederStats], **kwargs: Any) -> None:
        self._stats = stats
        self._earlier = stats()
        self._text = ""
        super().__init__(**kwargs)

    @property
    def format_dict(self) -> Any:
        """The values that tqdm draws; it reads them when it draws, not for every batch."""
        stats = self._stats()
        recent = stats - self._earlier
        if recent.seconds >= _RECENT_S or not self._text:
            moved = f", {human_rate(1e9 * recent.gb_per_s)}" if recent.bytes else ""
            rates = f"{_short(recent.rows_per_s)} rows/s{moved}"
            self._text = f"{rates}, waited {recent.starved:.0%}" if recent.batches else ""
        if recent.seconds >= _RECENT_S:
            self._earlier = stats
        return {**super().format_dict, "postfix": self._text}


def _short(number: float) -> str:
    return f"{number:,.0f}" if number < 1e4 else f"{number / 1e3:,.0f}k"
