"""LoaderReplay: repeats an epoch of a loader with the same batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pinfeed.tensors import rng_state
from pinfeed.training.row_loop.row_source import TableRowSource


class LoaderReplay:
    """State of the loader's random generators at the beginning of its epoch.

    A resumed loop begins the epoch of the loader again with this state, and drops the batches that
    were done.

    Args:
        source: Source that iterates the loader.

    Attributes:
        set_epoch_number: Epoch of the last call of ``set_epoch``; None if there was none.
    """

    def __init__(self, source: TableRowSource) -> None:
        self.set_epoch_number: int | None = None
        self._source = source
        self._generators: dict[str, Any] = {}
        # A loaded state from the end of an epoch, when all its batches had been lent. The end of
        # the epoch is also replayed, because the loader may draw random numbers there.
        self._finished: Mapping[str, Any] | None = None

    def note_epoch(self, number: int) -> None:
        """Note a call of ``set_epoch``."""
        self.set_epoch_number = number
        if self._finished is not None and number != self._finished["epoch"] + 1:
            self._finished = None

    def state(self, position: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a loop at ``position``."""
        if self._finished is not None:
            return dict(self._finished)
        return {**position, "told": self.set_epoch_number, "random": self._generators}

    def load(self, state: Mapping[str, Any], *, is_finished: bool) -> None:
        """Take the generators from a state.

        Args:
            state: State of a loop.
            is_finished: Whether all batches of its epoch had been lent.
        """
        self._generators = dict(state["random"])
        self._finished = dict(state) if is_finished else None

    def begin(self, start: int) -> None:
        """Begin an epoch of the loader at batch ``start``."""
        if self._finished is not None:
            self._replay(self._finished["batch"], finish=True)
            self._finished = None
        if start:
            self._replay(start, finish=False)
        else:
            self._generators = self._captured()
            self._source.begin()

    def _captured(self) -> dict[str, Any]:
        """Return the present state of all generators from which the loader may draw."""
        own = [rng_state.state_of(one) for one in rng_state.own_generators(self._source.loader)]
        return {**rng_state.capture(), "loader": own}

    def _replay(self, n_done: int, *, finish: bool) -> None:
        """Begin the epoch in the same way again, and drop the batches that were done.

        Args:
            n_done: Number of batches that were done.
            finish: Whether to exhaust the loader, because the whole epoch was done.
        """
        generators = rng_state.own_generators(self._source.loader)
        for generator, state in zip(generators, self._generators["loader"], strict=True):
            rng_state.set_state(generator, state)
        with rng_state.replayed(self._generators):
            self._source.begin()
            self._source.skip(n_done)
            if finish:
                self._source.finish()
