"""Feeder: the loop that the user writes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from .config import Config, Load, Plan, check_depth, n_batches, n_held, plan_items
from .devices import resolve
from .devices.base import Device, Tensor
from .epoch import Loan
from .errors import ArgumentError, BudgetError, StoreError, WriteBackError
from .loop import Loop
from .memory import free_host_bytes
from .rows import Order, OrderBatches, RowBatches, Rows, SamplerBatches, largest_batch, sequential, shuffled
from .sources import RowSource
from .stats import FeederStats, Timeline
from .stores import ArrayStore, MmapStore, Store
from .stores.mmap import store_of_memmap
from .tree import flatten

logger = logging.getLogger("pinfeed")

DEFAULT_DEPTH = 2


class Batch:
    """One batch of rows, with the numbers of its rows.

    Attributes:
        rows: Row numbers, shape (n,), int64.
        data: Tensors on the device, in the structure of the source, each of shape (n, *row_shape); yours to keep and to change.
    """

    __slots__ = ("_loan", "_stores", "data", "rows")

    def __init__(self, loan: Loan, stores: _Stores) -> None:
        self._loan, self._stores = loan, stores
        self.rows, self.data = cast(Rows, loan.rows), loan.take()

    def write_back(self, values: Any) -> None:
        """Store ``values`` as the rows of this batch, in the background; every write has landed when the loop ends.

        Batches that follow see the new rows, whether they were prefetched or not.

        Args:
            values: Tensors on the device in the structure of the source, shape (n, *row_shape), of the dtype of the store; None in the
                place of a store leaves that one as it is. They are copied: they may change at once, and may be ``data`` itself.

        Raises:
            WriteBackError: Wrong structure, shape, dtype or device, a read-only store, a row that is there twice, a second call, or a
                call after the next batch was taken. Nothing has been changed then.
        """
        tensors = self._stores.check(values, len(self._loan.require_writable()))
        self._loan.write(self._stores.stores, tensors)


class Feeder:
    """Iterate rows of host memory or of files as batches on a device, a few batches ahead.

    The batches, and what is in the stores after the loop, are those of the loop that gathers, computes and writes in turn (``depth=0``),
    bit for bit. A batch belongs to the caller: kept, it stays valid and unchanged.

    Args:
        source: A path of a .npy file (or a pattern of shards), a numpy array, a CPU tensor, a Store, or tuples, lists and dicts of these
            with equally many rows. What is yielded has the same structure.
        batch_size: Rows per batch. Give this or ``config``; neither where ``rows`` gives whole batches.
        config: Memory limits from which the batch size follows.
        rows: Which rows in which order: an order of ``pinfeed.rows``, a torch Sampler or BatchSampler, or any iterable of row numbers or
            of whole batches of row numbers.
        shuffle: Short for ``rows=pinfeed.rows.shuffled(seed)``.
        seed: Of the shuffle.
        drop_last: Leave out a last batch that is not full.
        depth: Batches prefetched ahead of the loop, 2 unless ``config`` says otherwise; 0 is the synchronous loop.
        device: ``"auto"`` (CUDA where there is one), ``"cpu"``, ``"cuda"``, ``"cuda:1"``, a ``torch.device`` or a Device.
        progress: Show a progress bar.
        timeline: Record what takes time in every batch. On a GPU the reader then waits for each of its copies.

    Raises:
        ArgumentError: Arguments that cannot be together.
        StoreError: A source that cannot be served, or sources of unequal length.
        RowIndexError: Row numbers out of range.
        BudgetError: The limits of ``config`` cannot hold one row per slot.
        DeviceError: There is no such device.
    """

    def __init__(
        self,
        source: Any,
        *,
        batch_size: int | None = None,
        config: Config | None = None,
        rows: Order | Iterable[Any] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        depth: int | None = None,
        device: Any = "auto",
        progress: bool = False,
        timeline: bool = False,
    ) -> None:
        depth = _check_arguments(batch_size, config, rows, shuffle, depth)
        if rows is None:
            rows = shuffled(seed) if shuffle else sequential()
        self._stores = _Stores(source)
        try:
            found = resolve(device, n_spare=len(self._stores.stores) * (n_batches(depth) + n_held(depth)))
            self._stores.device, self._owned_device = found, None if found is device else found
            self._plan = _plan(self._stores.stores, rows, batch_size, config, depth, found)
            size = batch_size if config is None else self._plan.batch_size
            batches = _batches(rows, self._stores.n_rows, size, drop_last)
            source = RowSource(self._stores.stores, self._stores.rebuild, batches)
            capacity = [self._plan.batch_size * _row_nbytes(store) for store in self._stores.stores] if self._plan.batch_size else []
            self._loop = Loop(source, found, depth=depth, capacity=capacity, progress=progress, timeline=timeline)
        except BaseException:
            self._stores.close()
            raise
        logger.info("%s", self._plan)

    def __enter__(self) -> Feeder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
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
        return self._loop.run(Loan.take)

    def batches(self) -> Iterator[Batch]:
        """The next epoch, as ``Batch`` objects: with row numbers, and with ``write_back``.

        Raises:
            ClosedError: The feeder is closed, or another loop over it runs.
        """
        stores = self._stores
        return self._loop.run(lambda loan: Batch(loan, stores))

    @property
    def device(self) -> str:
        """Name of the device, as torch writes it."""
        return self._stores.device.name

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
        """Let the next loop be epoch ``number``. Without it, every loop is the epoch after the one before."""
        self._loop.set_epoch(number)

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is, as plain values: taken in the loop's body, the batch of that body counts as done."""
        return self._loop.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next loop go on where the state was taken, with the very batches that were still to come in that epoch.

        Raises:
            ArgumentError: The state is not a feeder's, or of a feeder with other rows, order or batch size.
        """
        self._loop.load_state(state)

    def close(self) -> None:
        """End a loop that runs, land its write-backs, flush and close files that were opened from paths. Idempotent.

        Raises:
            The error of a write-back that no loop has raised.
        """
        try:
            self._loop.close()
        finally:
            self._stores.close()
            if self._owned_device is not None:
                self._owned_device.close()


class _Stores:
    """The stores of a feeder, in the structure that the user gave."""

    device: Device

    def __init__(self, source: Any) -> None:
        leaves, self.rebuild = flatten(source)
        self.names = [_name(path) for path, _ in leaves]
        self.stores: list[Store] = []
        self._owned: list[Store] = []
        if not leaves:
            raise StoreError(f"source={source!r} has no arrays in it; expected at least one path, array, tensor or Store")
        try:
            for (_, leaf), name in zip(leaves, self.names, strict=True):
                self.stores.append(self._open(leaf, name))
            self.n_rows = self.stores[0].n_rows
            if any(store.n_rows != self.n_rows for store in self.stores):
                counts = ", ".join(f"{name} has {store.n_rows}" for name, store in zip(self.names, self.stores, strict=True))
                raise StoreError(f"sources have unequal numbers of rows: {counts}; expected equally many, one row each for a sample")
        except BaseException:
            self.close()
            raise

    def check(self, values: Any, n: int) -> list[Tensor | None]:
        """The tensors in ``values``, one per store, checked."""
        leaves, _ = flatten(values)
        if values is None or [_name(path) for path, _ in leaves] != self.names:
            raise WriteBackError(
                f"write_back of {', '.join(_name(path) for path, _ in leaves)}; expected the structure of the source: "
                f"{', '.join(self.names)} (None for what stays as it is)"
            )
        for (_, value), name, store in zip(leaves, self.names, self.stores, strict=True):
            if value is not None:
                self._check_one(value, name, store, (n, *store.row_shape))
        return [value for _, value in leaves]

    def _check_one(self, value: Any, name: str, store: Store, shape: tuple[int, ...]) -> None:
        if not store.writable:
            raise WriteBackError(
                f'write_back to {name}, which is read-only; open a file with MmapStore(path, mode="r+"), or give a writable array'
            )
        found = self.device.describe(value)
        if found is None:
            raise WriteBackError(f"write_back of {name}: got {type(value).__name__}; expected a tensor on {self.device.name}")
        wrong = [
            f"{what} {got}, expected {want}"
            for what, got, want in (("shape", found[0], shape), ("dtype", found[1] or getattr(value, "dtype", None), store.dtype))
            if got != want
        ]
        if not found[2]:
            wrong.append(f"device {getattr(value, 'device', None)}, expected {self.device.name}")
        if wrong:
            raise WriteBackError(f"write_back of {name}: {'; '.join(wrong)}; nothing was written")

    def close(self) -> None:
        """Close the stores that were opened here."""
        for store in self._owned:
            store.close()

    def _open(self, leaf: Any, name: str) -> Store:
        if isinstance(leaf, Store):
            return leaf
        if isinstance(leaf, (str, os.PathLike)):
            self._owned.append(MmapStore(leaf))
            return self._owned[-1]
        if isinstance(leaf, np.memmap) and (store := store_of_memmap(leaf)) is not None:
            self._owned.append(store)
            return store
        return ArrayStore(leaf, name=name)


def _name(path: str) -> str:
    return f"source{path}"


def _check_arguments(
    batch_size: int | None, config: Config | None, rows: Order | Iterable[Any] | None, shuffle: bool, depth: int | None
) -> int:
    """The depth, if the arguments can be together."""
    if batch_size is not None and config is not None:
        raise ArgumentError("both batch_size and config were given; give one of them (Config has preferred_batch_size)")
    if batch_size is not None and batch_size < 1:
        raise ArgumentError(f"batch_size={batch_size}: expected at least 1")
    if batch_size is None and config is None and (rows is None or isinstance(rows, Order)):
        raise ArgumentError("neither batch_size nor config was given; give one of them, or whole batches as rows=")
    if rows is not None and shuffle:
        raise ArgumentError("both rows and shuffle=True were given; rows says the order already (rows=pinfeed.rows.shuffled(seed))")
    if depth is not None and config is not None:
        raise ArgumentError("both depth and config were given; say it in the config: Config(depth=...)")
    if batch_size is not None and rows is not None and not isinstance(rows, Order) and largest_batch(rows) is not None:
        raise ArgumentError("rows gives whole batches and batch_size was given as well; leave batch_size out")
    if depth is None:
        depth = config.depth if config is not None else DEFAULT_DEPTH
    check_depth(depth)
    return depth


def _plan(
    stores: Sequence[Store], rows: Order | Iterable[Any], batch_size: int | None, config: Config | None, depth: int, device: Device
) -> Plan:
    n_rows, largest = stores[0].n_rows, None if isinstance(rows, Order) else largest_batch(rows)
    load = Load(
        row_nbytes=tuple(_row_nbytes(store) for store in stores),
        writable=tuple(store.writable for store in stores),
        resident_bytes=sum(store.resident_bytes for store in stores),
        n_rows=max(1, rows.length(n_rows)) if isinstance(rows, Order) else largest or n_rows,
        unified=device.unified,
        route="direct" if all(device.reaches(store) for store in stores) else "staged",
    )
    if config is None:
        size = largest or 0 if batch_size is None else min(batch_size, load.n_rows)
        return Plan(size, depth, load.route, plan_items(load, size, depth))
    host = 0 if config.cpu_memory_limit is not None else free_host_bytes()
    there = 0 if config.gpu_memory_limit is not None or device.unified else device.free_bytes()
    plan = config.plan(load, free_host_bytes=host, free_device_bytes=there)
    if largest is not None and plan.batch_size < largest:
        raise BudgetError(
            f"rows gives batches of up to {largest} rows; the limits of config hold {plan.batch_size}: {plan}\n"
            "give smaller batches, or raise the limits"
        )
    return plan


def _batches(rows: Order | Iterable[Any], n_rows: int, batch_size: int | None, drop_last: bool) -> RowBatches:
    if not isinstance(rows, Order):
        return SamplerBatches(rows, n_rows, batch_size, drop_last)
    assert batch_size is not None
    return OrderBatches(rows, n_rows, batch_size, drop_last)


def _row_nbytes(store: Store) -> int:
    nbytes = store.dtype.itemsize
    for size in store.row_shape:
        nbytes *= size
    return nbytes
