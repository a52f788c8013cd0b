"""PartialEpoch: the progress of an epoch, and the batches with which a resumed epoch continues."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pinfeed.errors import ArgumentError
from pinfeed.feeders.loader_feeder import STATE_METHODS
from pinfeed.tensors import rng_state


@dataclass
class PartialEpoch:
    """Progress of an epoch; all zero at its beginning.

    Attributes:
        n_batches: Number of batches that the loop has received.
        n_backward: Number of backward passes whose losses are in ``loss``.
        n_samples: Number of samples of these backward passes.
        loss: Sum of their losses, each times its number of samples.
        has_ended: Whether the loader was resumed after the last batch of the epoch, and would begin
            the next one; None if only its next batch can show this.
    """

    n_batches: int = 0
    n_backward: int = 0
    n_samples: int = 0
    loss: float = 0.0
    has_ended: bool | None = False


def has_state(loader: Any) -> bool:
    """Return whether a loader can save and load its position."""
    return all(callable(getattr(loader, name, None)) for name in STATE_METHODS)


def load_position(loader: Any, state: Any, done: PartialEpoch) -> None:
    """Load a position into a loader, and note in ``done`` whether the epoch has ended.

    After the last batch of an epoch, a Feeder and a loop over ``train_rows`` resume with the next
    epoch. Other loaders resume with an epoch without batches.

    Args:
        loader: The loader.
        state: State of the loader; None if it has none.
        done: Progress of the epoch.

    Raises:
        ArgumentError: If the loader of the save had a state and this one has not, or vice versa.
    """
    if has_state(loader) != (state is not None):
        then, now = ("a", "no") if state is not None else ("no", "a")
        raise ArgumentError(
            f"the Trainer was saved with a loader that had {then} state_dict(), and "
            f"loader={loader!r} has {now} state_dict(); expected the same kind of loader"
        )
    if state is None:
        return
    loader.load_state_dict(state)
    counts_epochs = isinstance(state, Mapping) and {"epoch", "batch", "checksum"} <= set(state)
    if counts_epochs and done.n_batches and not done.has_ended:
        is_next = loader.epoch != state["epoch"]
        done.has_ended = is_next if is_next or _is_sized(loader) else None


def remaining_batches(loader: Any, done: PartialEpoch) -> Iterable[Any]:
    """Return the batches that remain in an epoch."""
    if done.has_ended or (done.has_ended is None and _begins_next_epoch(loader)):
        return ()
    batches: Iterable[Any] = iter(loader)
    return batches


def _begins_next_epoch(loader: Any) -> bool:
    """Return whether the next batch of a loader that counts its epochs is in another epoch.

    Afterwards, the loader and the random generators are as before.
    """
    epoch = loader.epoch
    state = loader.state_dict()
    random = rng_state.capture()
    with contextlib.closing(iter(loader)) as batches:
        next(batches, None)
        begins_next: bool = loader.epoch != epoch
    loader.load_state_dict(state)
    rng_state.restore(random)
    return begins_next


def _is_sized(loader: Any) -> bool:
    try:
        len(loader)
    except TypeError:
        return False
    return True
