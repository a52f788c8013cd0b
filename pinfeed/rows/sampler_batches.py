"""SamplerBatches: the batches of a sampler, an array or a list that the user gives."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pinfeed.errors import ArgumentError, WorkerError
from pinfeed.rows.indices import check_rows
from pinfeed.rows.length_batches import LengthBatches
from pinfeed.rows.order_batches import EpochHooks, RowBatches, RowIndices
from pinfeed.rows.orders import Rows
from pinfeed.rows.windows import Windows

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


class SamplerBatches(SamplerEpochs, RowBatches):
    """Batches of a user's sampler, batch sampler, array or list.

    Elements that are integers are grouped into batches of ``batch_size``. Elements that are
    sequences of integers are the batches. Every batch has a checksum of all row indices so far.
    With it, a resumed epoch can detect that the sampler returns other rows than before.

    Args:
        rows: Iterable of integers or of integer sequences. If it, or its ``sampler``, has
            ``set_epoch`` and an attribute ``epoch``, the feeder sets it to each epoch.
        n_rows: Number of rows in the stores.
        batch_size: Rows per batch, and the maximum size of a batch that ``rows`` gives; None for
            batches of any size.
        drop_last: Whether to leave out a last batch that is not full.

    Raises:
        RowIndexError: If an array or a list holds an element that is not a row index.
        ArgumentError: If ``rows`` is empty, or gives single rows without a ``batch_size``.
    """

    def __init__(
        self, rows: Iterable[Any], n_rows: int, batch_size: int | None, drop_last: bool
    ) -> None:
        self._rows = rows
        self._n_rows = n_rows
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._name = f"rows={type(rows).__name__}"
        self.gives_batches = batch_size is None or largest_batch(rows, batch_size) is not None
        # The epoch of a BatchSampler is that of its sampler.
        samplers: list[Any] = [rows, getattr(rows, "sampler", None)]
        self._samplers = [sampler for sampler in samplers if hasattr(sampler, "set_epoch")]
        if isinstance(rows, (np.ndarray, Sequence)):
            self._rows = self._checked(rows)

    def _checked(self, rows: Any) -> Any:
        """Check an array or a list before any thread starts."""
        if not _is_single(rows) and len(rows) == 0:
            raise ArgumentError("rows is empty; expected row indices, or batches of row indices")
        if _is_single(rows) or _is_single(rows[0]):
            checked = check_rows(rows, self._n_rows)
            self._require_batch_size()
            return checked
        return [self._check(batch, i) for i, batch in enumerate(rows)]

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {
            "order": self._name,
            "n_rows": self._n_rows,
            "batch_size": self._batch_size,
            "drop_last": self._drop_last,
        }

    def __len__(self) -> int:
        try:
            n = len(self._rows)  # type: ignore[arg-type]
        except TypeError:
            raise TypeError(
                f"{self._name} has no len(), so the number of batches is unknown"
            ) from None
        if self.gives_batches:
            return n
        size = self._require_batch_size()
        return n // size if self._drop_last else -(-n // size)

    def epoch(
        self, number: int, start: int = 0, checksum: int = 0, batches_per_slot: int = 1
    ) -> Iterator[RowIndices]:
        """Yield the batches of an epoch from ``start`` on.

        The method draws the batches before ``start`` from the sampler and compares them with
        ``checksum``.

        Raises:
            ArgumentError: If their rows do not match ``checksum``, or if an iterator is exhausted.
            WorkerError: If the sampler ended before it gave ``len`` batches.
        """
        group: list[tuple[Rows, int]] = []
        try:
            for batch in self._batches(number, start, checksum):
                group.append(batch)
                if len(group) == batches_per_slot:
                    yield _row_indices(group)
                    group = []
        except Exception:
            if group:
                # The batches before the error are still valid.
                yield _row_indices(group)
            raise
        if group:
            yield _row_indices(group)

    def _batches(self, number: int, start: int, checksum: int) -> Iterator[tuple[Rows, int]]:
        self.epoch_changed(number)
        total = 0
        count = 0
        for rows in self._cut():
            if count == start and total != checksum:
                raise self._changed(number)
            total = zlib.crc32(rows.tobytes() + len(rows).to_bytes(8, "little"), total)
            count += 1
            if count > start:
                yield rows, total
        if count < start or (count == start and total != checksum):
            raise self._changed(number)
        if count == 0 and isinstance(self._rows, Iterator):
            raise ArgumentError(
                f"{self._name} is exhausted after one epoch; give a list, or an object that can "
                "be iterated again"
            )
        self._require_promised(count, number)

    def _require_promised(self, count: int, number: int) -> None:
        """Check that an epoch did not end before its promised number of batches."""
        try:
            promised = len(self)
        except TypeError:
            return
        if count < promised:
            raise WorkerError(
                f"{self._name} promised {promised} batches (its len), but ended after {count} in "
                f"epoch {number}"
            )

    def windows(self, number: int, start: int) -> tuple[Windows | None, int, int]:
        return None, 0, 0

    def _changed(self, number: int) -> ArgumentError:
        return ArgumentError(
            f"{self._name} gave other rows for epoch {number} than when the state was saved; to "
            "resume, a sampler must give the same order for the same epoch (with set_epoch, or a "
            "fixed seed)"
        )

    def _cut(self) -> Iterator[Rows]:
        """Yield the row indices of each batch."""
        if isinstance(self._rows, np.ndarray):
            size = self._require_batch_size()
            for i in range(0, min(len(self) * size, len(self._rows)), size):
                # The user may change the array while the loop runs. Therefore, the rows are checked
                # again, and copied.
                yield check_rows(self._rows[i : i + size], self._n_rows, copy=True)
            return
        pending: list[Any] = []
        for count, element in enumerate(self._rows):
            if count == 0:
                self.gives_batches = not _is_single(element)
            if self.gives_batches:
                yield self._check(element, count, copy=True)
                continue
            pending.append(element)
            if len(pending) == self._require_batch_size():
                yield check_rows(pending, self._n_rows)
                pending = []
        if pending and not self._drop_last:
            yield check_rows(pending, self._n_rows)

    def _check(self, batch: Any, number: int, *, copy: bool = False) -> Rows:
        rows = check_rows(batch, self._n_rows, f"batch {number} of rows", copy=copy)
        if self._batch_size is not None and len(rows) > self._batch_size:
            raise ArgumentError(
                f"batch {number} of rows has {len(rows)} rows; expected at most "
                f"{self._batch_size}, the planned batch size; give smaller batches or raise the "
                "limits"
            )
        return rows

    def _require_batch_size(self) -> int:
        if self._batch_size is None:
            raise ArgumentError(
                "rows gives single row indices; expected a batch size as well; give batch_size= "
                "or config="
            )
        return self._batch_size


def largest_batch(rows: Iterable[Any], batch_size: int | None = None) -> int | None:
    """Return the size of the largest batch if ``rows`` gives batches and reports it; else None.

    Args:
        rows: Row indices, or batches of row indices.
        batch_size: Batch size that the user gives for single row indices.
    """
    if isinstance(rows, (np.ndarray, Sequence)):
        if _is_single(rows) or len(rows) == 0 or _is_single(rows[0]):
            return None
        return max(len(batch) for batch in rows if not _is_single(batch))
    # A torch BatchSampler, or an object like it. Samplers of single rows may have a batch size too,
    # such as Transformers' sampler for rows of similar lengths.
    size = getattr(rows, "batch_size", None)
    has_batches = isinstance(rows, LengthBatches) or hasattr(rows, "sampler")
    return size if isinstance(size, int) and (batch_size is None or has_batches) else None


def _row_indices(group: Sequence[tuple[Rows, int]]) -> RowIndices:
    """Join consecutive batches, each with its checksum."""
    rows = group[0][0] if len(group) == 1 else np.concatenate([part for part, _ in group])
    batches = [(len(part), checksum) for part, checksum in group]
    return RowIndices(len(rows), batches, lambda: rows)


def _is_single(element: Any) -> bool:
    """Return whether an element is a row index, not a batch, without reading its contents."""
    return bool(element.ndim == 0) if hasattr(element, "ndim") else not hasattr(element, "__len__")
