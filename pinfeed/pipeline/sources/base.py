"""Sources: what fills a slot. Their epochs run in the readers' threads, one at a time."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

from pinfeed.errors import WorkerError
from pinfeed.readahead import HostRows, ReadStrategy
from pinfeed.rows.batches import Draw as RowsDraw
from pinfeed.rows.batches import RowBatches
from pinfeed.rows.orders import Rows
from pinfeed.stores.base import HostArray, Store, row_nbytes
from pinfeed.tensors.pytree import Rebuild


class RowGroup(NamedTuple):
    """The same rows of one or several stores, which are written back together."""

    rows: Rows
    """Row numbers, shape (n,)."""
    first: int
    """The first of the load's parts that are these rows; one for each store."""
    stores: Sequence[Store]

    def cut(self, begin: int, end: int) -> RowGroup:
        """Rows [begin, end) of these."""
        return self._replace(rows=self.rows[begin:end])


@dataclass
class HostBatch:
    """What a slot brings to the device: a batch, or several small ones one after the other."""

    parts: Sequence[HostArray]
    rebuild: Rebuild
    """Makes a batch, in the structure that the user knows, from the tensors of the parts."""
    batches: Sequence[tuple[int, int]]
    """Samples of each batch; and a checksum of all row numbers of the epoch up to its end, where a resumed epoch needs one, else 0."""
    groups: Sequence[RowGroup] = ()
    """Those of the parts that are rows of stores."""

    def cut(self, start: int, stop: int) -> HostBatch:
        """Batches [start, stop) of several, which come from stores."""
        counts = [n_rows for n_rows, _ in self.batches]
        begin, end = sum(counts[:start]), sum(counts[:stop])
        parts = [cast(HostRows, part).cut(begin, end) for part in self.parts]
        return HostBatch(
            parts,
            self.rebuild,
            self.batches[start:stop],
            [group.cut(begin, end) for group in self.groups],
        )


BatchThunk = Callable[[], HostBatch]


class Source(Protocol):
    """Batches, epoch by epoch."""

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """What must be the same for a saved position to mean the same batch; plain values."""
        ...

    def __len__(self) -> int:
        """Batches in an epoch; TypeError where that is not known."""
        ...

    def epoch(
        self, number: int, start: int, checksum: int, batches_per_slot: int
    ) -> Generator[BatchThunk, None, None]:
        """The batches of epoch ``number`` from batch ``start`` on, at most ``batches_per_slot`` in a load, which is made when it is wanted."""
        ...

    def hint(self, draw_share: float) -> str:
        """What to change where a loop waits for reading, in whole sentences.

        Args:
            draw_share: Of the time that reading takes, the share that goes into making loads; the
                rest into filling slots with them.
        """
        ...


@dataclass(frozen=True)
class RowSource:
    """Rows of equally many in each store, in the order that ``batches`` says."""

    stores: Sequence[Store]
    strategies: Sequence[ReadStrategy]
    """How the rows of each store are read."""
    rebuild: Rebuild
    batches: RowBatches

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        return self.batches.fingerprint

    def __len__(self) -> int:
        return len(self.batches)

    def epoch(
        self, number: int, start: int, checksum: int, batches_per_slot: int
    ) -> Generator[BatchThunk, None, None]:
        windows, position, stop = self.batches.windows(number, start)
        with contextlib.ExitStack() as stack:
            serving = [
                stack.enter_context(strategy.open_epoch(windows, position, stop))
                for strategy in self.strategies
            ]
            for draw in self.batches.epoch(number, start, checksum, batches_per_slot):
                yield functools.partial(
                    self._load, draw, [serve(position, draw.n_rows) for serve in serving]
                )
                position += draw.n_rows

    def hint(self, draw_share: float) -> str:
        largest = max(range(len(self.stores)), key=lambda i: row_nbytes(self.stores[i]))
        return self.strategies[largest].hint

    def _load(self, draw: RowsDraw, parts: Sequence[Callable[[Rows], HostRows]]) -> HostBatch:
        group = draw()
        return HostBatch(
            [part(group.rows) for part in parts],
            self.rebuild,
            group.batches,
            [RowGroup(group.rows, 0, self.stores)],
        )


def part_nbytes(part: HostArray) -> int:
    """Bytes of a part."""
    return math.prod(part.shape) * part.dtype.itemsize


def guarded(fn: Callable[..., Any], *args: Any) -> Any:
    """Call ``fn``; what would end the loop or the program in silence becomes an error that says so.

    Raises:
        WorkerError: ``fn`` raised StopIteration, SystemExit or the like.
    """
    try:
        return fn(*args)
    except (StopIteration, StopAsyncIteration, SystemExit, GeneratorExit) as error:
        raise WorkerError(
            f"{_where(error)} raised {error!r}, which would end the loop in silence; raise an error that says what is wrong"
        ) from error
    except RuntimeError as error:
        if isinstance(error.__cause__, StopIteration) and not isinstance(error, WorkerError):
            # A generator turns it into this.
            raise WorkerError(
                f"{_where(error.__cause__)} raised {error.__cause__!r}, which would end the loop in silence"
            ) from error.__cause__
        raise


def _where(error: BaseException) -> str:
    traceback = error.__traceback__
    assert traceback is not None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code
    return f"{code.co_name} ({code.co_filename}, line {traceback.tb_lineno})"
