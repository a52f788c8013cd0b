"""Loops that change between prefetching and the synchronous loop where a test says so."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from support.internals import runner_of

from pinfeed.pipeline.depth_choice import DepthChoice


class ScriptedChoice(DepthChoice):
    """Choice that is never made: each slot of the loop is filled in the way that is given for it.

    Args:
        schedule: Schedule of a loop with a depth of at least 1.
        ways: For each slot that is lent whether the loop is synchronous from then on; the last one
            holds for all slots after it.
    """

    def __init__(self, schedule: Any, ways: Iterable[bool]) -> None:
        super().__init__(dataclasses.replace(schedule, measures_depth=True))
        self._ways = iter(ways)
        self.count(1, 0.0)

    def count(self, n_batches: int, now: float) -> None:
        self.is_synchronous = next(self._ways, self.is_synchronous)

    def begin(self) -> None:
        pass

    def end(self, n_batches: int, seconds: float) -> None:
        pass


def script(feeder: Any, ways: Iterable[bool]) -> None:
    """Let the loops over a feeder change as ``ways`` says, whether or not they write rows back."""
    ways = list(ways)
    planned = runner_of(feeder)._schedule
    for schedule in {planned, getattr(feeder, "_write_schedule", planned)}:
        runner_of(feeder)._choices[schedule] = ScriptedChoice(schedule, ways)
