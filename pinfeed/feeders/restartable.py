"""restartable(): a feeder for frameworks that begin the next loop before they let go of the last."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pinfeed.errors import ArgumentError
from pinfeed.pipeline.epochs import no_items
from pinfeed.validation.safe_repr import safe_repr


def restartable(feeder: Any) -> Restartable:
    """``feeder``, iterated by a framework: a new loop ends the one before, which a feeder itself refuses.

    Lightning and others keep the iterator of an epoch while they make that of the next, and do not
    ask it for the end. Everything else is the feeder's own; each loop is its next epoch. Where it
    can be resumed, so can this.

    Args:
        feeder: A Feeder, or what ``wrap_loader`` or ``wrap_readers`` returned. It stays the
            caller's.

    Raises:
        ArgumentError: ``feeder`` is none of these.
    """
    # Only a feeder's loops can be ended from outside; close() tells it from a list and from a
    # DataLoader.
    if not isinstance(feeder, Iterable) or not callable(getattr(feeder, "close", None)):
        raise ArgumentError(
            f"restartable({feeder!r}): expected a Feeder, or what wrap_loader or wrap_readers returned; "
            "give restartable(pinfeed.wrap_loader(loader)) for a DataLoader"
        )
    return (StatefulRestartable if hasattr(feeder, "state_dict") else Restartable)(feeder)


class Restartable:
    """A feeder whose loops end when the next one begins."""

    def __init__(self, feeder: Any) -> None:
        self._feeder = feeder
        # The caller's reference alone keeps a loop going.
        self._running: weakref.ref[Any] | None = None

    __getitems__ = no_items

    @safe_repr
    def __repr__(self) -> str:
        return f"restartable({self._feeder!r})"

    def __len__(self) -> int:
        return len(self._feeder)

    def __iter__(self) -> Iterator[Any]:
        """The next epoch."""
        self.end()
        batches: Iterator[Any] = iter(self._feeder)
        self._running = weakref.ref(batches)
        return batches

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._feeder, name)

    def __dir__(self) -> list[str]:
        return sorted(
            {*super().__dir__(), *(name for name in dir(self._feeder) if not name.startswith("_"))}
        )

    def end(self) -> None:
        """End a loop that runs, as ``break`` does."""
        batches = self._running() if self._running is not None else None
        if batches is not None:
            batches.close()


class StatefulRestartable(Restartable):
    """One that can be resumed."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next loop go on where ``state`` was taken. A loop that runs is ended."""
        self.end()
        self._feeder.load_state_dict(state)
