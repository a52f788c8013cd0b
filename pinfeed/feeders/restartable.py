"""restartable(): a feeder whose older loop ends without an error when a new loop begins."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic

from pinfeed.errors import ArgumentError
from pinfeed.feeders.base_feeder import T_co, no_items
from pinfeed.validation.safe_repr import safe_repr


def restartable(feeder: Iterable[T_co]) -> Restartable[T_co]:
    """Wrap a feeder, so that a new loop ends the previous one as if its epoch were over.

    A new loop over a feeder ends the previous one, unless the feeder was made with
    ``again="refuse"``. ``next()`` of the older iterator then raises ClosedError. An iterator of the
    wrapper stops instead, as at the end of an epoch, because some frameworks request another batch
    from it. All other attributes are those of the feeder. Each loop is the feeder's next epoch. The
    wrapper can be resumed if the feeder can.

    Examples:
        >>> loader = torch.utils.data.DataLoader(torch.zeros(100, 8), batch_size=10)
        >>> batches = pinfeed.restartable(pinfeed.wrap_loader(loader))
        >>> older = iter(batches)
        >>> newer = iter(batches)
        >>> next(older, "ended")
        'ended'

    Args:
        feeder: A Feeder, or what ``wrap_loader`` or ``wrap_readers`` returned. The caller closes
            it.

    Raises:
        ArgumentError: If ``feeder`` is none of these.
    """
    # Only a feeder's loops can be ended from outside. A list and a DataLoader have no close().
    if not hasattr(feeder, "__iter__") or not callable(getattr(feeder, "close", None)):
        raise ArgumentError(
            f"restartable({feeder!r}): expected a Feeder, or what wrap_loader or wrap_readers "
            "returned; give restartable(pinfeed.wrap_loader(loader)) for a DataLoader"
        )
    kind = StatefulRestartable if hasattr(feeder, "state_dict") else Restartable
    return kind(feeder)


class Restartable(Generic[T_co]):
    """Feeder whose loop ends without an error when the next one begins; from ``restartable``.

    Examples:
        >>> batches = pinfeed.restartable(pinfeed.wrap_loader([torch.zeros(8), torch.ones(8)]))
        >>> older = iter(batches)
        >>> len(list(batches)), len(list(older))
        (2, 0)
    """

    def __init__(self, feeder: Any) -> None:
        self._feeder = feeder
        # A weak reference, so that a loop ends when the caller drops its iterator.
        self._running: weakref.ref[Any] | None = None

    __getitems__ = no_items

    @safe_repr
    def __repr__(self) -> str:
        return f"restartable({self._feeder!r})"

    def __len__(self) -> int:
        return len(self._feeder)

    def __iter__(self) -> Iterator[T_co]:
        """End a running loop, and begin the next epoch."""
        self.end()
        batches: Iterator[T_co] = iter(self._feeder)
        self._running = weakref.ref(batches)
        return batches

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._feeder, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(self._feeder, name, value)

    def __dir__(self) -> list[str]:
        of_feeder = {name for name in dir(self._feeder) if not name.startswith("_")}
        return sorted({*super().__dir__(), *of_feeder})

    def end(self) -> None:
        """End a running loop, as ``break`` does."""
        batches = self._running() if self._running is not None else None
        if batches is not None:
            batches.close()


class StatefulRestartable(Restartable[T_co]):
    """Restartable feeder that can be resumed; ``restartable`` returns it.

    Examples:
        >>> feeder = pinfeed.Feeder(np.zeros((100, 8)), batch_size=10)
        >>> batches = pinfeed.restartable(feeder)
        >>> first = next(iter(batches))
        >>> batches.load_state_dict(batches.state_dict())
    """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """End a running loop, and make the next one continue at a saved position.

        Args:
            state: Return value of ``state_dict``.
        """
        self.end()
        self._feeder.load_state_dict(state)
