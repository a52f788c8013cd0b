"""Source: batches on the host, epoch by epoch; HostBatch: one of them; HostLeaf: part of one."""

from __future__ import annotations

import contextlib
import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np
import numpy.typing as npt

from pinfeed.devices.device import Tensor
from pinfeed.pipeline.forwarding import SharedRows
from pinfeed.pipeline.row_cache import CachedRows
from pinfeed.pipeline.sources.user_calls import guarded
from pinfeed.readahead.strategy import UnreadRows
from pinfeed.rows.order_batches import EpochHooks, RowBatches
from pinfeed.rows.orders import Rows
from pinfeed.stores.host_rows import CheckStop, UnreadPart, never
from pinfeed.stores.store import Store
from pinfeed.tensors.pytree import Rebuild, flatten


class Cancelled(Exception):
    """Raised in a reader thread, because the loop has ended."""


class OtherBatch(Exception):
    """Raised while the parts of a batch are read, because another batch takes its place.

    Args:
        batch: The other batch.
    """

    def __init__(self, batch: HostBatch) -> None:
        super().__init__()
        self.batch = batch


class RowGroup(NamedTuple):
    """The same rows of one or several stores, which are written back together."""

    rows: Rows
    """Indices of the rows to gather, shape (n,)."""
    first: int
    """Index of the first part of the batch with these rows; each store has one part."""
    stores: Sequence[Store]
    repeated: int | None = None
    """A row index that occurs twice, if the loop writes rows back; None if every row is distinct.
    Such rows cannot be written, because the value that remains would be random."""
    indices: Tensor | None = None
    """The row indices on the device, if it reads or writes some of the stores itself."""
    cached: CachedRows | None = None
    """Rows of the batch in a cache on the device, which are not gathered; None without a cache."""
    ids_part: int | None = None
    """Index of a part of the batch with the row indices; None if there is none."""
    is_frozen: bool = False
    """Whether no optimizer changes the rows. The program may still write them directly."""

    @property
    def batch_rows(self) -> Rows:
        """Indices of all rows of the batch."""
        return self.rows if self.cached is None else self.cached.rows

    @property
    def written(self) -> Rows:
        """Indices of the rows that the batch may write."""
        return self.rows if self.cached is None else self.cached.written

    @property
    def parts(self) -> range:
        """Indices of the parts of the batch with these rows."""
        return range(self.first, self.first + len(self.stores))

    def cut(self, begin: int, end: int) -> RowGroup:
        """Return rows [begin, end) of the group, without indices on the device."""
        return self._replace(rows=self.rows[begin:end], indices=None)

    def as_written(self) -> RowGroup:
        """Return the group of the rows to write."""
        if self.cached is None:
            return self
        return RowGroup(self.written, self.first, self.stores)


class BatchValues(NamedTuple):
    """Values of a batch that are to be written back."""

    number: int
    """Number of the batch."""
    groups: Sequence[RowGroup]
    """Rows to write, and their stores."""
    values: Sequence[Sequence[Tensor | None] | None]
    """For each group one tensor per store; None leaves a store, or a whole group, unchanged."""


_BRIEF_NBYTES = 64 << 10
"""A copy of so many bytes takes less time than another thread needs to wake up, twice."""


class ArrayPart:
    """An array on the host: an ``UnreadPart`` that is copied.

    Args:
        array: The array.
        is_own: Whether nothing changes the array. A device in host memory then takes it as it is.

    Attributes:
        own_array: The array, if nothing changes it; otherwise None.
    """

    __slots__ = ("_array", "dtype", "own_array", "shape")

    def __init__(self, array: npt.NDArray[Any], *, is_own: bool = False) -> None:
        self._array = array
        self.own_array = array if is_own else None
        self.shape = array.shape
        self.dtype = array.dtype

    def read(self, out: npt.NDArray[Any], check_stop: CheckStop = never) -> None:
        """Copy the array into ``out``."""
        _copy_array(self._array, out)


def _copy_array(array: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    """Copy an array into a contiguous one of its shape and dtype."""
    if array.nbytes <= _BRIEF_NBYTES and array.flags.c_contiguous:
        # numpy would let another thread take the interpreter's lock.
        source, target = array.reshape(-1).view(np.uint8), out.reshape(-1).view(np.uint8)
        target.data[:] = source.data
        return
    np.copyto(out, array)


@dataclass(slots=True)
class HostBatch:
    """A batch to read, or several small batches in sequence.

    No part has been read yet. A reader thread reads the parts into a slot.
    """

    parts: Sequence[UnreadPart]
    rebuild: Rebuild
    """Makes a batch in the user's structure from the tensors of the parts."""
    batches: Sequence[tuple[int, int]]
    """For each batch the number of samples, and a checksum of the epoch's row indices so far.

    The checksum is 0 if a resumed epoch needs none.
    """
    groups: list[RowGroup] = field(default_factory=list)
    """Groups of the parts that are rows of stores."""
    shared: SharedRows | None = None
    """Rows that the batch shares with earlier batches; None if no written row can recur."""
    n_data: int | None = None
    """Number of first parts that ``rebuild`` takes; None if it takes all parts."""
    complete: Callable[[Any, list[Tensor]], Any] | None = None
    """Makes the loop's batch from the result of ``rebuild`` and the tensors of all parts.

    None if the loop receives the result of ``rebuild``.
    """
    state: Any = None
    """State of the loader after the batch, if the loader has a state."""
    keeps_errors: bool = False
    """Whether the loop continues with the next batch if this one fails."""

    def all_parts(self) -> Sequence[UnreadPart]:
        """Return the parts, and the positions of shared rows, if any."""
        if self.shared is None or not len(self.shared.positions):
            return self.parts
        return [*self.parts, ArrayPart(self.shared.positions)]

    def data(self, tensors: list[Tensor]) -> Any:
        """Return the batch in the user's structure, which transforms take.

        Args:
            tensors: Tensors of the parts.
        """
        return self.rebuild(iter(tensors if self.n_data is None else tensors[: self.n_data]))

    def ranges(self) -> list[tuple[int, int]]:
        """Return the range [begin, end) of the rows of each batch."""
        ends = list(itertools.accumulate(n_rows for n_rows, _ in self.batches))
        return list(zip([0, *ends], ends, strict=False))

    def cut(self, start: int, stop: int) -> HostBatch:
        """Return batches [start, stop) of several batches whose parts are rows of stores."""
        ranges = self.ranges()
        begin = ranges[start][0]
        end = ranges[stop - 1][1]
        return HostBatch(
            [cast(UnreadRows, part).cut(begin, end) for part in self.parts],
            self.rebuild,
            self.batches[start:stop],
            [group.cut(begin, end) for group in self.groups],
        )


class HostLeaf:
    """A leaf of a loader's batch: a tensor on the host, or an object with a method ``to``.

    An object that is not a tensor has neither shape nor dtype; the device moves it with ``to``.
    """

    __slots__ = ("host_value",)

    def __init__(self, value: Any) -> None:
        self.host_value = value

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return tuple(self.host_value.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy dtype of the tensor."""
        # The import is local, because the pipeline is loaded without torch.
        from pinfeed.tensors.numpy_torch import NUMPY

        return NUMPY[self.host_value.dtype]

    def read(self, out: npt.NDArray[Any], check_stop: CheckStop = never) -> None:
        """Copy the tensor into ``out``."""
        from pinfeed.tensors.numpy_torch import memory_of, plain, to_torch

        if out.nbytes <= _BRIEF_NBYTES:
            _copy_array(memory_of(plain(self.host_value)), out)
            return
        # torch copies in several threads.
        to_torch(out).copy_(self.host_value)


def host_batch_of(batch: Any) -> HostBatch:
    """Make a HostBatch from a loader's batch."""
    leaves, rebuild = flatten(batch)
    parts = [HostLeaf(leaf) for _, leaf in leaves if callable(getattr(leaf, "to", None))]
    if len(parts) < len(leaves):
        moves = [callable(getattr(leaf, "to", None)) for _, leaf in leaves]
        rebuild = _with_kept(leaves, moves, rebuild)
    return HostBatch(parts, rebuild, [(_n_samples(leaves), 0)])


def _with_kept(
    leaves: Sequence[tuple[str, Any]], moves: Sequence[bool], rebuild: Rebuild
) -> Rebuild:
    """Return a ``rebuild`` that takes tensors for the leaves that move, and keeps the others."""
    kept = [None if moved else leaf for (_, leaf), moved in zip(leaves, moves, strict=True)]
    return lambda tensors: rebuild(
        iter([next(tensors) if moved else leaf for leaf, moved in zip(kept, moves, strict=True)])
    )


def _n_samples(leaves: Sequence[tuple[str, Any]]) -> int:
    """Return the length of the first leaf that has one: by convention, the number of samples."""
    for _, leaf in leaves:
        try:
            return int(leaf.shape[0])
        except (AttributeError, TypeError, IndexError, RuntimeError):
            # Reading the shape of a nested tensor of torch raises a RuntimeError.
            continue
    return 1


BatchThunk = Callable[[], HostBatch]
"""Makes a batch when it is called, in any reader thread.

A source makes thunks one at a time. The thunk does the work that may run in parallel, such as
computing row indices.
"""

BatchThunks = Generator[BatchThunk, None, None]
"""The thunks of an epoch, one at a time."""


def failed_batch(error: Exception) -> HostBatch:
    """Return a batch without parts, in place of a failed one; ``rebuild`` raises the error."""
    return HostBatch([], functools.partial(_raise, [error]), [(0, 0)], keeps_errors=True)


def made_or_failed(thunk: BatchThunk) -> HostBatch:
    """Return the batch of a thunk, or a failed batch with the error of the thunk."""
    try:
        batch: HostBatch = guarded(thunk)
    except Exception as error:
        return failed_batch(error)
    batch.keeps_errors = True
    return batch


def _raise(errors: list[Exception], tensors: Iterator[Tensor]) -> NoReturn:
    # The error's traceback keeps this frame, which must not keep the error.
    raise errors.pop()


class Source(ABC):
    """Batches on the host, epoch by epoch."""

    has_distinct_rows = False
    """Whether no row occurs twice in a batch."""

    @property
    @abstractmethod
    def fingerprint(self) -> Mapping[str, Any]:
        """Plain values that must be equal, or a saved position would mean another batch."""

    @property
    def epoch_hooks(self) -> EpochHooks:
        """Reactions of the source to the position of the loop; by default, it has none."""
        return EpochHooks()

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches in an epoch.

        Raises:
            TypeError: If the number is unknown.
        """

    def n_batches(self, epoch: int) -> int:
        """Return the number of batches in an epoch, which other ranks may have begun.

        Raises:
            TypeError: If the number is unknown.
        """
        return len(self)

    @property
    def trained_stores(self) -> Sequence[Store]:
        """All stores of the rows, if a batch has the newest values of its rows until the next one.

        Rows of other sources may have newer values elsewhere. By default, there are none.
        """
        return ()

    def rows_version(self) -> object:
        """Return a value that changes when files of the rows are written or replaced.

        A continuous loop compares the value from before it has read the first batches of an epoch
        with the value at the beginning of the epoch. If changes cannot be known, the value equals
        no other one. By default, there are no files. Any thread may call this.
        """
        return ()

    @property
    def may_open_ahead(self) -> bool:
        """Whether a loop may open the next epoch before it is certain that it reads it."""
        return True

    def loop_context(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which a loop opens its epochs, and completes their batches."""
        return contextlib.nullcontext()

    @abstractmethod
    def epoch(self, number: int, start: int, checksum: int, batches_per_slot: int) -> BatchThunks:
        """Yield the batches of an epoch in order, each as a thunk.

        Reader threads iterate over the generator, one at a time.

        Args:
            number: Number of the epoch.
            start: Number of the first batch to yield.
            checksum: Checksum, from a state, of the batches before ``start``.
            batches_per_slot: Maximum number of batches per thunk.
        """

    def stop(self) -> None:
        """Make no more samples, because the loop has ended. Any thread may call this."""
        return

    def rewind(self, n_requested: int) -> None:
        """Undo what making later batches has changed in objects of the user.

        It is called when the loop has ended, and no thread makes batches.

        Args:
            n_requested: Number of batches of the epoch that the training loop has requested. The
                end of the epoch counts as one.
        """
        return


class OrderedSource(Source):
    """Source whose batches have an order of their own.

    Attributes:
        batches: Row indices of the batches.
    """

    batches: RowBatches

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        return self.batches.fingerprint

    @property
    def epoch_hooks(self) -> EpochHooks:
        return self.batches

    def __len__(self) -> int:
        return len(self.batches)

    def n_batches(self, epoch: int) -> int:
        return self.batches.n_batches(epoch)
