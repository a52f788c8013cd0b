"""endless(): the batches of one epoch after another, as one iterator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic

from pinfeed.errors import ArgumentError
from pinfeed.feeders.base_feeder import T_co, no_items

if TYPE_CHECKING:
    from typing_extensions import Self


def endless(feeder: Iterable[T_co]) -> Endless[T_co]:
    """Return an iterator over the batches of one epoch after another, without an end.

    Programs that count steps instead of epochs call ``next(batches)``, or take some steps at a time
    with ``itertools.islice(batches, n)``, which leaves the next batch to the next call. The epochs
    are those of separate loops over the feeder. ``state_dict`` and ``load_state_dict`` are those of
    the feeder, so a state is the position of the batch that was received last.

    Examples:
        >>> feeder = pinfeed.Feeder(np.arange(6), batch_size=4)
        >>> batches = pinfeed.endless(feeder)
        >>> [next(batches).tolist() for _ in range(3)]
        [[0, 1, 2, 3], [4, 5], [0, 1, 2, 3]]

    Args:
        feeder: A Feeder, what ``wrap_dataset``, ``wrap_loader`` or ``wrap_readers`` returned, or
            another iterable that can be iterated over again, such as a DataLoader. The caller
            closes it.

    Raises:
        ArgumentError: If ``feeder`` is no iterable, or is an iterator, which has one epoch only.
    """
    if not isinstance(feeder, Iterable):
        raise ArgumentError(
            f"endless({feeder!r}): expected a feeder, or another iterable of batches"
        )
    if isinstance(feeder, Iterator):
        raise ArgumentError(
            f"endless({feeder!r}): got an iterator, which yields its batches only once; expected "
            "the feeder itself, or another iterable that can be iterated over again"
        )
    kind = ResumableEndless if hasattr(feeder, "state_dict") else Endless
    return kind(feeder)


class Endless(Generic[T_co]):
    """Iterator over the batches of epoch after epoch; ``endless`` returns it.

    Examples:
        >>> batches = pinfeed.endless(pinfeed.wrap_loader([torch.zeros(8), torch.ones(8)]))
        >>> [int(next(batches)[0]) for _ in range(5)]
        [0, 1, 0, 1, 0]
    """

    __getitems__ = no_items

    def __init__(self, feeder: Any) -> None:
        self._feeder = feeder
        self._batches: Iterator[T_co] | None = None

    def __repr__(self) -> str:
        return f"endless({self._feeder!r})"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T_co:
        """Return the next batch, if necessary the first one of the next epoch.

        Raises:
            ArgumentError: If an epoch has no batch.
        """
        # The running epoch may be over, and a resumed one may have no batch left.
        for _ in range(2):
            if self._batches is None:
                self._batches = iter(self._feeder)
            try:
                return next(self._batches)
            except StopIteration:
                self._batches = None
        raise ArgumentError(
            f"{self!r}: an epoch has no batch; expected at least one, because the next batch would "
            "never come"
        )

    def close(self) -> None:
        """End the running epoch, as ``break`` does. Another ``next()`` begins the next epoch."""
        batches: Any = self._batches
        self._batches = None
        if hasattr(batches, "close"):
            batches.close()


class ResumableEndless(Endless[T_co]):
    """Endless iterator over a feeder that can be resumed; ``endless`` returns it.

    Examples:
        >>> feeder = pinfeed.Feeder(np.arange(6), batch_size=4)
        >>> batches = pinfeed.endless(feeder)
        >>> first = next(batches)
        >>> batches.load_state_dict(batches.state_dict())
        >>> next(batches).tolist()
        [4, 5]
    """

    def state_dict(self) -> Any:
        """Return the feeder's state after the batch that was received last."""
        return self._feeder.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batch at which a state was saved, in its epoch.

        Args:
            state: Return value of ``state_dict``.
        """
        # If the feeder refuses the state, the running epoch continues.
        self._feeder.load_state_dict(state)
        self.close()
