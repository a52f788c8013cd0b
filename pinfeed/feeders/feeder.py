"""Feeder: the loop that the user writes."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from pinfeed.devices import resolve
from pinfeed.devices.base import Device
from pinfeed.errors import ArgumentError, RowIndexError
from pinfeed.memory.limits import (
    DEFAULT_DEPTH,
    MemoryLimits,
    Plan,
    check_depth,
    check_route,
    n_held,
    safe_repr,
)
from pinfeed.pipeline.epochs import EpochRunner, no_copy, no_items
from pinfeed.pipeline.lent_batch import LentBatch
from pinfeed.pipeline.planner import PlanRequest, make_plan
from pinfeed.pipeline.rank_plan import limits_of_rank, plan_of_rank, share_of
from pinfeed.pipeline.schedule import PrefetchSchedule, choose_schedule
from pinfeed.pipeline.sources.store_rows import RowSource
from pinfeed.pipeline.store_tree import StoreTree
from pinfeed.profiling.stats import FeederStats
from pinfeed.profiling.timeline import Timeline
from pinfeed.rows.batches import OrderBatches, RowBatches
from pinfeed.rows.orders import Order, PerRank, Rows, sequential, shuffled
from pinfeed.rows.rank_batches import RankBatches
from pinfeed.rows.rank_warnings import note_workers
from pinfeed.rows.ranks import Ranks
from pinfeed.rows.sampler_batches import SamplerBatches, largest_batch
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.base import Store, row_nbytes
from pinfeed.validation.arguments import check_flag, check_seed, explain_arguments, whole_number

logger = logging.getLogger("pinfeed")

_NO_WORKERS = "there are no worker processes, because reader threads read the rows; leave it out"
_OF_CONFIG = "limits are given together: config=pinfeed.Config({name}=...)"
HINTS = {
    **dict.fromkeys(
        ("num_workers", "workers", "n_workers", "n_readers"),
        "pinfeed runs as many reader threads as help; leave it out",
    ),
    **dict.fromkeys(
        ("persistent_workers", "worker_init_fn", "multiprocessing_context", "timeout"), _NO_WORKERS
    ),
    **dict.fromkeys(
        ("pin_memory", "pin_memory_device"),
        "batches go through page-locked memory where that is faster; leave it out",
    ),
    **dict.fromkeys(("sampler", "batch_sampler", "order"), "give it as rows="),
    **dict.fromkeys(
        ("prefetch_factor", "prefetch", "buffer_size"), "the batches that are prefetched are depth="
    ),
    **dict.fromkeys(("dataset", "data", "path", "x"), "the source comes first, without a name"),
    **{
        name: _OF_CONFIG.format(name=name)
        for name in ("gpu_memory_limit", "cpu_memory_limit", "preferred_batch_size", "headroom")
    },
    "generator": "give shuffle=True and seed=generator.initial_seed()",
    "in_order": "batches always come in order; leave it out",
    "collate_fn": "rows are batched as they are stored; change the batch in the loop, or give pinfeed.wrap_loader(DataLoader(...))",
    "transform": "apply it to the batch in the loop, on the device; or give pinfeed.wrap_loader(DataLoader(...))",
    "dtype": "batches have the dtype of the source; convert them in the loop",
}
"""Advice, by the names that DataLoader and others have for it."""


class Batch:
    """One batch of rows, with the numbers of its rows.

    Attributes:
        rows: Row numbers, shape (n,), int64.
        data: Tensors on the device, in the structure of the source, each of shape (n, *row_shape);
            yours to keep and to change.
    """

    __slots__ = ("_device", "_loan", "_stores", "data", "rows")

    def __init__(self, loan: LentBatch, data: Any, stores: StoreTree, device: Device) -> None:
        self._loan = loan
        self._stores = stores
        self._device = device
        self.rows: Rows = loan.groups[0].rows
        self.data = data

    @safe_repr
    def __repr__(self) -> str:
        return f"<Batch of {len(self.rows):,} rows>"

    def write_back(self, values: Any) -> None:
        """Store ``values`` as the rows of this batch, in the background; every write has landed when the loop ends.

        Batches that follow see the new rows, whether they were prefetched or not. In a worker
        process of a DataLoader, an array changes in that process alone, and a warning says so once;
        files and shared memory change for all processes.

        Args:
            values: Tensors on the device in the structure of the source, shape (n, *row_shape), of
                the dtype of the store; None in the place of a store leaves that one as it is. They
                are copied: they may change at once, and may be ``data`` itself.

        Raises:
            WriteBackError: Wrong structure, shape, dtype or device, a read-only store, a row that
                is there twice, a second call, or a call after the next batch was taken. Nothing has
                been changed then.
        """
        self._loan.require_writable()
        checked = self._stores.check(values, len(self.rows), self._device)
        _note_worker_process(
            [
                store
                for store, value in zip(self._stores.stores, checked, strict=True)
                if value is not None
            ]
        )
        self._loan.write([checked])


class Feeder:
    """Iterate rows of host memory or of files as batches on a device, a few batches ahead.

    The batches, and what is in the stores after the loop, are those of the loop that gathers,
    computes and writes in turn (``depth=0``), bit for bit: as long as rows change by ``write_back``
    alone while a loop runs, for a batch that is prefetched does not see what the loop's body does
    to an array or a file. A batch belongs to the caller: kept, it stays valid and unchanged.

        with pinfeed.Feeder("x.npy", batch_size=256, shuffle=True) as feeder:
            first = next(iter(feeder))  # a look at one batch
            for epoch in range(10):
                for batch in feeder:
                    ...

    A feeder is the loader: it needs no DataLoader around it. For rows by number there is
    ``RowDataset``.

    Args:
        source: A path of a .npy file (or a pattern of shards), a numpy array, a CPU tensor, an
            Arrow column, a Store, or tuples, lists and dicts of these with equally many rows. What
            is yielded has the same structure: several paths in a tuple or a list are sources side
            by side, such as inputs and labels. Several files that are shards of one source are a
            pattern or ``MmapStore([...])``. An Arrow table and a Hugging Face dataset are dicts of
            their columns.
        batch_size: Rows per batch. Give this or ``config``; neither where ``rows`` gives whole
            batches.
        config: Memory limits from which the batch size follows.
        rows: Which rows in which order: an order of ``pinfeed.rows``, a torch Sampler or
            BatchSampler, or any iterable of row numbers or of whole batches of row numbers. A
            sampler that tells its ``epoch``, as DistributedSampler does, is set to that of the
            loop, unless its owner sets another one, which then is the loop's.
        shuffle: Short for ``rows=pinfeed.rows.shuffled(seed)``.
        seed: Seed of the shuffle, a whole number; the order is a function of (seed, epoch).
        drop_last: Leave out a last batch that is not full.
        ranks: How the processes of a job (torchrun's, say) share an epoch. ``"pad"``: the first
            rows come again where rows do not divide; ``"drop"``: the rest is left out; ``"join"``:
            every row comes once, and some ranks have one more; or ``Ranks``. ``"all"``, or None:
            every process has all rows.
        depth: Batches prefetched ahead of the loop, in place of ``config.depth``; 0 is the
            synchronous loop. None is 2, or more where batches are small; at most 1,024, because
            each batch takes memory of its own.
        device: ``"auto"`` (CUDA where there is one), ``"cpu"``, ``"cuda"``, ``"cuda:1"``, a
            ``torch.device`` or a Device.
        route: On a GPU, how rows of page-locked stores get there: ``"direct"``, a kernel reads them
            where they are; ``"staged"``, they are gathered by the CPU and copied; None for what is
            measured to be faster (``plan`` tells).
        verify: Compare each batch with its rows as they are in the stores when it is lent, and
            raise VerificationError where they differ, because something else than ``write_back``
            has changed them. Every row is read twice, and write-backs are waited for.
        progress: Show a progress bar.
        timeline: Record what takes time in every batch; on a GPU, name it for a profiler too.

    Raises:
        ArgumentError: If an argument is invalid, two arguments conflict, or ``seed`` is given
            without ``shuffle``.
        UnknownArgument: If there is no such argument. The message names the one that does the same.
        StoreError: A source that cannot be served, or sources of unequal length.
        RowIndexError: Row numbers out of range.
        BudgetError: The limits of ``config`` cannot hold one row per slot.
        DeviceError: There is no such device.
    """

    @explain_arguments(HINTS)
    def __init__(
        self,
        source: Any,
        *,
        batch_size: int | None = None,
        config: MemoryLimits | None = None,
        rows: Order | Iterable[Any] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        ranks: Ranks | Literal["pad", "drop", "join", "all"] | None = None,
        depth: int | None = None,
        device: Any = "auto",
        route: str | None = None,
        verify: bool = False,
        progress: bool = False,
        timeline: bool = False,
    ) -> None:
        batch_size = None if batch_size is None else whole_number(batch_size, "batch_size")
        depth = None if depth is None else check_depth(depth)
        _check_arguments(batch_size, config, rows, shuffle, seed, drop_last)
        check_route(route)
        for name, flag in (("verify", verify), ("progress", progress), ("timeline", timeline)):
            check_flag(flag, name)
        self._verify = verify
        if rows is None:
            rows = shuffled(seed) if shuffle else sequential()
        share = share_of(ranks, rows, drop_last, batch_size, config)
        config = config and config.for_feeder()
        self._begin = functools.partial(note_workers, ranks, rows)
        if share is not None:
            rows = share.rows()
            batch_size = batch_size and share.batch_size
            config = limits_of_rank(share, config)
        self._stores = StoreTree(source)
        try:
            schedule = choose_schedule(self._stores.stores, batch_size, config, depth)
            # What is written has to be looked for in every batch that was gathered before: far
            # ahead, that would cost more than it brings.
            self._write_schedule = (
                PrefetchSchedule(DEFAULT_DEPTH, n_readers=schedule.n_readers)
                if schedule.batches_per_slot > 1
                else schedule
            )
            found = resolve(
                device,
                n_spare=len(self._stores.stores)
                * (schedule.n_slots + 1 + n_held(self._write_schedule.depth)),
            )
            self._device = found
            self._owned_device = None if found is device else found
            self._plan, self._choice = make_plan(
                PlanRequest(self._stores.stores, rows, batch_size, config), schedule, found, route
            )
            size = batch_size if config is None else self._plan.batch_size
            batches = _batches(rows, self._stores.n_rows, size, drop_last)
            if isinstance(batches, OrderBatches):
                warn_of_no_batch(batches)
            if share is not None:
                self._plan, batches = (
                    plan_of_rank(share, self._plan, self._stores.n_rows),
                    RankBatches(share, self._stores.n_rows),
                )
            source_of_rows = RowSource(
                self._stores.stores, self._choice.strategies, self._stores.rebuild, batches
            )
            capacity = (
                [self._plan.batch_size * row_nbytes(store) for store in self._stores.stores]
                if self._plan.batch_size
                else []
            )
            self._loop = EpochRunner(
                source_of_rows,
                found,
                capacity=capacity,
                schedule=schedule,
                progress=progress,
                timeline=timeline,
            )
        except BaseException:
            self._stores.close()
            raise
        logger.info("%s", self._plan)

    __reduce__ = no_copy
    __getitems__ = no_items

    @safe_repr
    def __repr__(self) -> str:
        size = f"{self._plan.batch_size:,} rows" if self._plan.batch_size else "any size"
        return f"<Feeder: {self._stores}; batches of {size} on {self.device}, {self._loop}>"

    def __enter__(self) -> Feeder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> None:
        try:
            self.close()
        except Exception:
            if error is None:
                raise
            logger.exception("an error while a feeder was closed, after the error that is raised")

    def __len__(self) -> int:
        """Batches in an epoch.

        Raises:
            TypeError: ``rows`` cannot tell.
        """
        return len(self._loop.source)

    def __iter__(self) -> Iterator[Any]:
        """The next epoch: tensors on the device, in the structure of the source, each of shape (n, *row_shape).

        Raises:
            ClosedError: The feeder is closed, or another loop over it runs.
        """
        return self._loop.run(self._verified if self._verify else LentBatch.take, begin=self._begin)

    def batches(self) -> Iterator[Batch]:
        """The next epoch, as ``Batch`` objects: with row numbers, and with ``write_back``.

        Raises:
            ClosedError: The feeder is closed, or another loop over it runs.
        """
        take: Callable[[LentBatch], Any] = self._verified if self._verify else LentBatch.take
        stores, device = self._stores, self._device
        schedule = self._write_schedule if any(store.writable for store in stores.stores) else None
        return self._loop.run(
            lambda loan: Batch(loan, take(loan), stores, device), schedule, self._begin
        )

    @property
    def device(self) -> str:
        """Name of the device, as torch writes it."""
        return self._device.name

    @property
    def batch_size(self) -> int | None:
        """Rows per batch, as in ``plan``; None where ``rows`` gives batches of any size."""
        return self._plan.batch_size or None

    @property
    def plan(self) -> Plan:
        """Batch size and memory; ``print(feeder.plan)`` says it in words."""
        return self._plan

    @property
    def stats(self) -> FeederStats:
        """What was measured so far; ``print(feeder.stats)`` says it in words."""
        return self._loop.stats

    @property
    def timeline(self) -> Timeline:
        """What took time; ``feeder.timeline.save("timeline.png")``. Only with ``timeline=True``."""
        return self._loop.timeline

    @property
    def epoch(self) -> int:
        """Number of the epoch that runs, or of the one that the next loop is."""
        return self._loop.epoch

    def set_epoch(self, number: int) -> None:
        """Let the next loop be epoch ``number``.

        Without it, every loop is the epoch after the one before.

        A position that was loaded in this epoch is kept, so that a program may set each epoch, the
        one that it goes on with too.
        """
        self._loop.set_epoch(number)

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is, as plain values: taken in the loop's body, the batch of that body counts as done."""
        return self._loop.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next loop go on where the state was taken, with the very batches that were still to come in that epoch.

        With ``ranks``, a state of any rank is one of all of them, and of another number of ranks:
        see ``Ranks``.

        Raises:
            ArgumentError: The state is not a feeder's, or of a feeder with other rows, order or
                batch size.
        """
        self._loop.load_state(state)

    def land(self) -> None:
        """Wait until everything that was written back so far is in its stores.

        In the loop's thread.

        Raises:
            Exception: That of a write-back that failed, as it was.
        """
        self._loop.drain()

    def close(self) -> None:
        """End a loop that runs, land its write-backs, flush and close files that were opened from paths. Idempotent.

        In the body of a loop it ends that loop, as ``break`` does.

        Raises:
            Exception: That of a write-back, where no loop has raised it.
        """
        with contextlib.ExitStack() as stack:
            if self._owned_device is not None:
                stack.callback(self._owned_device.close)
            stack.callback(self._stores.close)
            for strategy in self._choice.strategies:
                stack.callback(strategy.close)
            stack.callback(self._loop.close)

    def _verified(self, loan: LentBatch) -> Any:
        data = loan.take()
        self._loop.drain()
        self._stores.require_equal(data, loan.groups[0].rows, loan.number, self._device)
        return data


def _check_arguments(
    batch_size: int | None,
    config: MemoryLimits | None,
    rows: Any,
    shuffle: Any,
    seed: Any,
    drop_last: Any,
) -> None:
    """Raise ArgumentError unless the arguments can be together."""
    if batch_size is not None and config is not None:
        raise ArgumentError(
            "both batch_size and config were given; give one of them (Config has preferred_batch_size)"
        )
    if config is not None and not isinstance(config, MemoryLimits):
        raise ArgumentError(f"config={config!r}: expected a pinfeed.Config")
    for name, flag in (("shuffle", shuffle), ("drop_last", drop_last)):
        check_flag(flag, name)
    check_seed(seed)
    if rows is not None and (
        isinstance(rows, (str, bytes)) or not isinstance(rows, (Order, Iterable))
    ):
        call = "; give what the function returns" if callable(rows) else ""
        if callable(rows) and getattr(rows, "__module__", "") == Order.__module__:
            call = f"; call it: rows=pinfeed.rows.{getattr(rows, '__name__', 'shuffled')}(...)"
        raise ArgumentError(
            f"rows={rows!r}: expected an order of pinfeed.rows, a sampler, or an iterable of row numbers{call}"
        )
    if batch_size is None and config is None and (rows is None or isinstance(rows, Order)):
        raise ArgumentError(
            "neither batch_size nor config was given; give one of them, or whole batches as rows="
        )
    if rows is not None and shuffle:
        raise ArgumentError(
            "both rows and shuffle=True were given; rows says the order already (rows=pinfeed.rows.shuffled(seed))"
        )
    if (
        batch_size is not None
        and rows is not None
        and not isinstance(rows, Order)
        and largest_batch(rows) is not None
    ):
        _require_numbers(rows)
        raise ArgumentError(
            "rows gives whole batches and batch_size was given as well; leave batch_size out"
        )


def _require_numbers(rows: Any) -> None:
    """Refuse a list or an array of other values than row numbers.

    Raises:
        RowIndexError: Its first element is neither a row number nor a batch of them.
    """
    if not isinstance(rows, (np.ndarray, Sequence)):
        return
    first = np.asarray(rows[0])
    if first.size and first.dtype.kind not in "iu":
        raise RowIndexError(
            f"rows: got {type(rows).__name__} of {first.dtype}; expected an order of pinfeed.rows, a sampler, or an iterable of row "
            "numbers, which are integers (mask: np.flatnonzero); arrays of data are the source"
        )


def warn_of_no_batch(batches: OrderBatches, what: str = "rows") -> None:
    """Warn if epochs have no batch. ``what`` is the user's word for what a batch has."""
    if len(batches):
        return
    order = batches.order
    n_rows = batches.n_rows
    batch_size = batches.batch_size
    n_mine = order.length(n_rows)
    if n_rows == 0:
        logger.warning("there are no %s, so that epochs have no batch; give at least one", what)
    elif isinstance(order, PerRank):
        logger.warning(
            "rank %d of %d has no batch: %d of %d %s, batches of %d%s; lower world_size or batch_size, or check rank and world_size",
            order.rank,
            order.world_size,
            n_mine,
            order.order.length(n_rows),
            what,
            batch_size,
            ", drop_last=True" if batches.drop_last else "",
        )
    else:
        logger.warning(
            "drop_last=True leaves no batch: %d %s, batches of %d; lower batch_size, or leave drop_last out",
            n_mine,
            what,
            batch_size,
        )


def _note_worker_process(written: list[Store]) -> None:
    """Warn, once, where a worker process of a DataLoader writes to arrays of which it has a copy.

    In that process.
    """
    # A worker process has loaded it.
    data = sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if data is not None else None
    if info is not None and any(
        isinstance(store, ArrayStore) and _is_of_one_process(store.array) for store in written
    ):
        _warn_of_copies()


@functools.cache
def _warn_of_copies() -> None:
    logger.warning(
        "write_back in a worker process of a DataLoader changes that process's copy of an array, and the array of the main process stays "
        "as it is; loop over the feeder in the main process, or give a file (MmapStore(path, mode='r+')) or a tensor after share_memory_()"
    )


def _is_of_one_process(array: Any) -> bool:
    """Whether an array is ordinary memory, as far as its owner tells: no mapped file, no shared memory."""
    owner = array
    while isinstance(getattr(owner, "base", None), np.ndarray) and not isinstance(owner, np.memmap):
        owner = owner.base
    if isinstance(owner, np.memmap):
        return False
    if owner.base is None:
        return True
    return callable(getattr(owner.base, "is_shared", None)) and not owner.base.is_shared()


def _batches(
    rows: Order | Iterable[Any], n_rows: int, batch_size: int | None, drop_last: bool
) -> RowBatches:
    if not isinstance(rows, Order):
        return SamplerBatches(rows, n_rows, batch_size, drop_last)
    assert batch_size is not None
    return OrderBatches(rows, n_rows, batch_size, drop_last)
