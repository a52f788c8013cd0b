"""The batches of an epoch: row numbers, from an order or from a sampler of the user's, checked."""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from pinfeed.errors import ArgumentError, WorkerError
from pinfeed.rows.indices import check_rows
from pinfeed.rows.orders import At, Order, Rows
from pinfeed.rows.windows import Windows, windows

# An order is asked for so many rows at once: small batches share numpy's cost per call, large ones
# need no more memory.
_RUN_ROWS = 1 << 14


@dataclass(frozen=True)
class Group:
    """Consecutive batches."""

    rows: Rows
    """Of all of them."""
    batches: Sequence[tuple[int, int]]
    """Rows of each, and the checksum of all row numbers of the epoch up to its end; 0 where none is needed."""


class Draw(Protocol):
    """A group that was drawn. What takes time is left to whoever asks for it, in any thread."""

    @property
    def n_rows(self) -> int:
        """Rows of the group."""

    def __call__(self) -> Group: ...


class RowBatches(Protocol):
    """The batches of an epoch."""

    @property
    def fingerprint(self) -> dict[str, Any]: ...
    def __len__(self) -> int: ...
    def epoch(
        self, number: int, start: int = 0, checksum: int = 0, batches_per_slot: int = 1
    ) -> Iterator[Draw]:
        """The batches of epoch ``number`` from batch ``start`` on, in groups of at most ``batches_per_slot``."""
        ...

    def windows(self, number: int, start: int) -> tuple[Windows | None, int, int]:
        """Windows of an epoch, if it has any, and its positions from batch ``start`` on as [start, stop)."""
        ...


class _Run:
    """Rows at consecutive positions of an order, computed when they are first asked for.

    Args:
        order: The order, as bound to the epoch in ``at``.
        lock: Held while ``at`` is called: it may be the user's.
    """

    def __init__(
        self, order: Order, at: At, lock: threading.Lock, n_rows: int, begin: int, end: int
    ) -> None:
        self._order = order
        self._at = at
        self._lock = lock
        self._n_rows = n_rows
        self._begin = begin
        self._end = end
        self._rows: Rows | None = None

    def rows(self) -> Rows:
        if self._rows is None:
            with self._lock:
                if self._rows is None:
                    self._rows = self._compute()
        return self._rows

    def _compute(self) -> Rows:
        rows = np.empty(self._end - self._begin, np.int64)
        for i in range(0, len(rows), _RUN_ROWS):
            part = rows[i : i + _RUN_ROWS]
            positions = np.arange(self._begin + i, self._begin + i + len(part))
            part[:] = check_rows(self._at(positions), self._n_rows, f"rows={self._order!r}")
        return rows


class _PartOfRun(NamedTuple):
    """Rows [begin, end) of a run, in batches of ``size``."""

    run: _Run
    begin: int
    end: int
    size: int
    next_run: _Run | None
    """To be computed by whoever asks for this, so that nobody waits for it later."""

    @property
    def n_rows(self) -> int:
        return self.end - self.begin

    def __call__(self) -> Group:
        rows = self.run.rows()[self.begin : self.end]
        if self.next_run is not None:
            self.next_run.rows()
        return Group(
            rows, [(min(self.size, self.n_rows - i), 0) for i in range(0, self.n_rows, self.size)]
        )


@dataclass(frozen=True)
class OrderBatches:
    """Batches of an order: ``batch_size`` rows each, the last one shorter unless ``drop_last``."""

    order: Order
    n_rows: int
    batch_size: int
    drop_last: bool = False

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {
            "order": repr(self.order),
            "n_rows": self.n_rows,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
        }

    def __len__(self) -> int:
        n = self.order.length(self.n_rows)
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)

    def epoch(
        self, number: int, start: int = 0, checksum: int = 0, batches_per_slot: int = 1
    ) -> Iterator[Draw]:
        """An order needs no checksum: it is a function of the epoch."""
        at = self.order.bind(self.n_rows, number)
        size = self.batch_size
        stop = self._stop
        group = batches_per_slot * size
        step = max(1, _RUN_ROWS // group) * group
        begins = range(start * size, stop, step)
        lock = threading.Lock()
        runs = (
            _Run(self.order, at, lock, self.n_rows, begin, min(begin + step, stop))
            for begin in begins
        )
        run = next(runs, None)
        for begin in begins:
            assert run is not None
            n, next_run = min(step, stop - begin), next(runs, None)
            for i in range(0, n, group):
                yield _PartOfRun(run, i, min(i + group, n), size, next_run if i == 0 else None)
            run = next_run

    def windows(self, number: int, start: int) -> tuple[Windows | None, int, int]:
        return windows(self.order, self.n_rows, number), start * self.batch_size, self._stop

    @property
    def _stop(self) -> int:
        return min(len(self) * self.batch_size, self.order.length(self.n_rows))


class _Drawn:
    """Rows that are there already, and their checksum, batch by batch."""

    def __init__(self, batches: Sequence[tuple[Rows, int]]) -> None:
        self._rows = (
            batches[0][0] if len(batches) == 1 else np.concatenate([rows for rows, _ in batches])
        )
        self._batches = [(len(rows), checksum) for rows, checksum in batches]
        self.n_rows = len(self._rows)

    def __call__(self) -> Group:
        return Group(self._rows, self._batches)


_EPOCHS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""The epochs that samplers were set to by feeders, several of which may have one sampler.

Any other epoch its owner has set.
"""


class SamplerBatches:
    """Batches of a user's sampler, batch sampler, array or list.

    Elements that are integers are cut into batches of ``batch_size``; elements that are sequences
    of integers are the batches. Every batch carries a checksum of all row numbers so far, so that a
    resumed epoch can tell whether the sampler repeats itself.

    Args:
        rows: Iterable of integers or of integer sequences. If it, or its ``sampler``, has
            ``set_epoch`` and an attribute ``epoch``, which tells whether its owner has called that,
            it is set to each epoch.
        n_rows: Rows that there are.
        batch_size: Rows per batch, and the most that a batch given by ``rows`` may have; None for
            batches of any size.
        drop_last: Leave out a last batch that is not full.

    Raises:
        RowIndexError: An array or a list holds something that is not a row number.
        ArgumentError: It is empty, or gives single rows and there is no ``batch_size``.
    """

    def __init__(
        self, rows: Iterable[Any], n_rows: int, batch_size: int | None, drop_last: bool
    ) -> None:
        self._rows = rows
        self._n_rows = n_rows
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._name = f"rows={type(rows).__name__}"
        self.gives_batches = batch_size is None or largest_batch(rows) is not None
        # A BatchSampler asks its sampler.
        samplers: list[Any] = [rows, getattr(rows, "sampler", None)]
        self._samplers = [sampler for sampler in samplers if hasattr(sampler, "set_epoch")]
        if isinstance(rows, (np.ndarray, Sequence)):
            # Refuse what can be refused before anything runs.
            if not _is_single(rows) and len(rows) == 0:
                raise ArgumentError(
                    "rows is empty: expected row numbers, or batches of row numbers"
                )
            if _is_single(rows) or _is_single(rows[0]):
                self._rows = check_rows(rows, n_rows)
                self._require_batch_size()
            else:
                self._rows = [self._check(batch, i) for i, batch in enumerate(rows)]

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {
            "order": self._name,
            "n_rows": self._n_rows,
            "batch_size": self._batch_size,
            "drop_last": self._drop_last,
        }

    def set_epoch(self, epoch: int) -> None:
        """Set the sampler to an epoch.

        Raises:
            ArgumentError: If its attribute ``epoch`` then is another number, so that nobody could
                know which epoch it is at.
        """
        for sampler in self._samplers:
            sampler.set_epoch(epoch)
            if _epoch_of(sampler) not in (None, epoch):
                raise ArgumentError(
                    f"{self._name}: set_epoch({epoch}) leaves epoch={sampler.epoch}; expected a sampler whose epoch is what it was set to, "
                    "or one without this attribute"
                )
            self._note(sampler)

    def follow(self, epoch: int) -> None:
        """Set the sampler to an epoch, if it tells its epoch.

        Another one may have been set by its owner, which nobody could know.
        """
        if any(_epoch_of(sampler) not in (None, epoch) for sampler in self._samplers):
            self.set_epoch(epoch)
        for sampler in self._samplers:
            self._note(sampler)

    @property
    def chosen_epoch(self) -> int | None:
        """The epoch that the sampler's owner has set it to since a feeder set it, or since it was made; None if there is none."""
        for sampler in self._samplers:
            epoch = _epoch_of(sampler)
            if epoch is not None and epoch != _EPOCHS.get(sampler, 0):
                return epoch
        return None

    @staticmethod
    def _note(sampler: Any) -> None:
        if (epoch := _epoch_of(sampler)) is not None:
            _EPOCHS[sampler] = epoch

    def __len__(self) -> int:
        try:
            n = len(self._rows)  # type: ignore[arg-type]
        except TypeError:
            raise TypeError(
                f"{self._name} has no len(), so the number of batches is not known"
            ) from None
        if self.gives_batches:
            return n
        size = self._require_batch_size()
        return n // size if self._drop_last else -(-n // size)

    def epoch(
        self, number: int, start: int = 0, checksum: int = 0, batches_per_slot: int = 1
    ) -> Iterator[Draw]:
        """The batches of epoch ``number``; the first ``start`` are drawn and compared with ``checksum``, not given.

        Raises:
            ArgumentError: They are other rows than those that ``checksum`` was made of, or an
                iterator has nothing left.
            WorkerError: Fewer batches came than ``len`` promised: something below ended in silence.
        """
        group: list[tuple[Rows, int]] = []
        try:
            for batch in self._batches(number, start, checksum):
                group.append(batch)
                if len(group) == batches_per_slot:
                    yield _Drawn(group)
                    group = []
        except Exception:
            if group:
                # Those before the error.
                yield _Drawn(group)
            raise
        if group:
            yield _Drawn(group)

    def _batches(self, number: int, start: int, checksum: int) -> Iterator[tuple[Rows, int]]:
        self.follow(number)
        total = count = 0
        for rows in self._cut():
            if count == start and total != checksum:
                raise self._changed(number)
            total, count = (
                zlib.crc32(rows.tobytes() + len(rows).to_bytes(8, "little"), total),
                count + 1,
            )
            if count > start:
                yield rows, total
        if count < start or (count == start and total != checksum):
            raise self._changed(number)
        if count == 0 and isinstance(self._rows, Iterator):
            raise ArgumentError(
                f"{self._name} is used up, it serves one epoch; give a list, or an object that can be iterated again"
            )
        try:
            promised = len(self)
        except TypeError:
            return
        if count < promised:
            raise WorkerError(
                f"{self._name} promised {promised} batches (its len) and ended after {count} in epoch {number}"
            )

    def windows(self, number: int, start: int) -> tuple[Windows | None, int, int]:
        return None, 0, 0

    def _changed(self, number: int) -> ArgumentError:
        return ArgumentError(
            f"{self._name} gave other rows for epoch {number} than when the state was saved; a sampler that is to be resumed must "
            "give the same order for the same epoch (by set_epoch, or a fixed seed)"
        )

    def _cut(self) -> Iterator[Rows]:
        if isinstance(self._rows, np.ndarray):
            size = self._require_batch_size()
            for i in range(0, min(len(self) * size, len(self._rows)), size):
                # Again, and a copy: it may be the user's own array, which he changes meanwhile.
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
                f"batch {number} of rows has {len(rows)} rows; expected at most {self._batch_size}, the batch size that was planned; "
                "give smaller batches or raise the limits"
            )
        return rows

    def _require_batch_size(self) -> int:
        if self._batch_size is None:
            raise ArgumentError(
                "rows gives single row numbers: give batch_size= or config= as well"
            )
        return self._batch_size


def largest_batch(rows: Iterable[Any]) -> int | None:
    """Rows of the largest batch, where ``rows`` is known to give batches and can tell in advance; else None."""
    if isinstance(rows, (np.ndarray, Sequence)):
        batches = not _is_single(rows) and len(rows) > 0 and not _is_single(rows[0])
        return max(len(batch) for batch in rows if not _is_single(batch)) if batches else None
    # A torch BatchSampler, or one made like it.
    size = getattr(rows, "batch_size", None)
    return size if isinstance(size, int) else None


def _epoch_of(sampler: Any) -> int | None:
    """The epoch that a sampler tells; None if it does not, or cannot be told from others."""
    epoch: Any = getattr(sampler, "epoch", None)
    try:
        hash(weakref.ref(sampler))
    except TypeError:
        return None
    return int(epoch) if hasattr(epoch, "__index__") and not isinstance(epoch, bool) else None


def _is_single(element: Any) -> bool:
    """Whether it is a row number and not a batch of them, as far as that can be told without a look inside."""
    return bool(element.ndim == 0) if hasattr(element, "ndim") else not hasattr(element, "__len__")
