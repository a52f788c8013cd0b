"""From stores, an order and limits to a plan: the batch size, the memory, and how the rows of each file are read."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import Any

from .access import Choice, choose, window_sizes
from .batches import largest_batch
from .config import DEFAULT_DEPTH, Config, Demand, Plan, plan_items, window_item
from .devices.base import Device
from .epoch import Pace
from .errors import BudgetError
from .memory import free_host_bytes
from .rows import Order
from .stores.base import Store, row_nbytes
from .stores.sharded import ShardedStore

_MAX_DEPTH, _AHEAD_BYTES = 32, 8 << 20  # of small batches, so many may be ahead
_TOGETHER_BYTES = 2 << 20  # of batches that one task gathers: some hundred microseconds from memory
_PARALLEL_BYTES = 256 << 10  # less is gathered sooner than a second thread has woken up
_MAX_READERS = 8


def make_plan(
    stores: Sequence[Store], rows: Order | Iterable[Any], batch_size: int | None, config: Config | None, depth: int, device: Device
) -> tuple[Plan, Choice]:
    """The plan, and what it chose for each store.

    Raises:
        BudgetError: The limits of ``config`` cannot hold one row per slot, or the batches that ``rows`` gives.
    """
    n_rows, largest = stores[0].n_rows, None if isinstance(rows, Order) else largest_batch(rows)
    demand = Demand(
        row_nbytes=tuple(row_nbytes(store) for store in stores),
        writable=tuple(store.writable for store in stores),
        resident_bytes=sum(store.resident_bytes for store in stores),
        n_rows=max(1, rows.length(n_rows)) if isinstance(rows, Order) else largest or n_rows,
        unified=device.unified,
        route="direct" if all(device.reaches(store) for store in stores) else "staged",
    )
    # Without a config, half of what is free may hold rows of files; the processes that torchrun starts on a machine share it.
    reads_files = any(isinstance(store, ShardedStore) for store in stores)
    free = free_host_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if reads_files or config is not None else 0
    if config is None:
        size = min(batch_size, demand.n_rows) if batch_size is not None else (largest or 0)
        plan = Plan(size, depth, demand.route, plan_items(demand, size, depth))
        limit = free // 2
    else:
        limit = config.host_limit(free)
        plan = _fitted(dataclasses.replace(config, depth=depth), demand, free, window_sizes(stores, rows), device)
        if largest is not None and plan.batch_size < largest:
            raise BudgetError(
                f"rows gives batches of up to {largest} rows; the limits of config hold {plan.batch_size}: {plan}\n"
                "give smaller batches, or raise the limits"
            )
    choice = choose(stores, rows, (depth + 1) * plan.batch_size, limit - plan.host_bytes)
    return dataclasses.replace(plan, items=plan.items + choice.items, notes=choice.notes), choice


def choose_depth(stores: Sequence[Store], batch_size: int | None, config: Config | None, depth: int | None) -> int:
    """Batches ahead: as asked for, or else 2, or as many small ones as keep the readers busy while the loop and they wake each other."""
    if depth is None and config is not None:
        depth, batch_size = config.depth, config.preferred_batch_size
    if depth is not None:
        return depth
    nbytes = (batch_size or 0) * sum(row_nbytes(store) for store in stores)
    if nbytes == 0:
        return DEFAULT_DEPTH
    most = _MAX_DEPTH if config is None or config.cpu_memory_limit is None else config.cpu_memory_limit // 4 // nbytes - 2
    return max(DEFAULT_DEPTH, min(_AHEAD_BYTES // nbytes, most, _MAX_DEPTH))


def pace(plan: Plan, stores: Sequence[Store]) -> Pace:
    """As many readers as help: where batches are small, each gathers some together, and three times as many stay ahead of the loop."""
    nbytes = plan.batch_size * sum(row_nbytes(store) for store in stores)
    n_together = min(plan.n_slots // 4, _TOGETHER_BYTES // nbytes) if nbytes else 1
    if nbytes * max(1, n_together) < _PARALLEL_BYTES:
        return Pace(1, max(1, n_together))
    return Pace(max(1, min(plan.n_slots, len(os.sched_getaffinity(0)), _MAX_READERS)), max(1, n_together))


def _fitted(config: Config, demand: Demand, free: int, windows: tuple[tuple[int, int], ...], device: Device) -> Plan:
    """The plan with the largest batch that fits, beside the windows of the order if these leave half of the limit."""
    there = 0 if config.gpu_memory_limit is not None or device.unified else device.free_bytes()
    least = sum(window_item(*sizes, n_batch_rows=1).total for sizes in windows)
    beside = dataclasses.replace(demand, windows=windows if least <= config.host_limit(free) // 2 else ())
    plan = config.plan(beside, free_host_bytes=free, free_device_bytes=there)
    return dataclasses.replace(plan, items=plan_items(demand, plan.batch_size, plan.depth))
