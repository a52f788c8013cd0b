"""SamplerEpochs: the epoch of a loop, and that of the sampler whose rows it has."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from pinfeed.errors import ArgumentError
from pinfeed.rows.batches import EpochHooks

_EPOCHS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""The epoch to which a feeder last set each sampler. Several feeders may share one sampler.

If a sampler reports another epoch, its owner has set it.
"""


class SamplerEpochs(EpochHooks):
    """Base class that sets samplers to the epoch of the loop, and follows their owner.

    If a sampler reports its epoch, the feeder sets it to the epoch of the loop, and after the loop
    to the next one, unless its owner sets another epoch. If a sampler has ``set_epoch`` but does
    not report its epoch, only the user sets it, as with a DataLoader.
    """

    # The samplers that have ``set_epoch``, and their name in errors.
    _samplers: Sequence[Any] = ()
    _name: str

    def set_epoch(self, epoch: int) -> None:
        """Set the samplers to an epoch.

        Raises:
            ArgumentError: If a sampler's attribute ``epoch`` differs afterwards, because its
                epoch would be unknown.
        """
        for sampler in self._samplers:
            sampler.set_epoch(epoch)
            if _epoch_of(sampler) not in (None, epoch):
                raise ArgumentError(
                    f"{self._name}: after set_epoch({epoch}), its attribute epoch is "
                    f"{sampler.epoch}; expected a sampler that keeps the epoch, or one without "
                    "this attribute"
                )
        self._remember_epochs()

    def epoch_changed(self, epoch: int) -> None:
        """Set the samplers to an epoch if they report another one.

        A sampler that does not report its epoch stays as it is, because its owner may have set it.
        """
        if any(_epoch_of(sampler) not in (None, epoch) for sampler in self._samplers):
            self.set_epoch(epoch)
        self._remember_epochs()

    @property
    def chosen_epoch(self) -> int | None:
        """Epoch that a sampler's owner has set since a feeder set one, or None."""
        for sampler in self._samplers:
            epoch = _epoch_of(sampler)
            if epoch is not None and epoch != _EPOCHS.get(sampler, 0):
                return epoch
        return None

    def _remember_epochs(self) -> None:
        for sampler in self._samplers:
            if (epoch := _epoch_of(sampler)) is not None:
                _EPOCHS[sampler] = epoch


def _epoch_of(sampler: Any) -> int | None:
    """Return the epoch that a sampler reports; None if it reports none, or cannot be a weak key."""
    epoch: Any = getattr(sampler, "epoch", None)
    try:
        hash(weakref.ref(sampler))
    except TypeError:
        return None
    return int(epoch) if hasattr(epoch, "__index__") and not isinstance(epoch, bool) else None
