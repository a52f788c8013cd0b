"""From stores, an order and limits to a plan: the batch size, the memory, and how the rows of each file are read."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import Any

from pinfeed.devices.base import Device
from pinfeed.errors import BudgetError
from pinfeed.memory.demand import Demand, plan_allocations, window_allocation
from pinfeed.memory.depth import DEFAULT_DEPTH
from pinfeed.memory.host import free_host_bytes
from pinfeed.memory.limits import MemoryLimits
from pinfeed.memory.plan import Plan
from pinfeed.pipeline.prefetcher import PrefetchSchedule
from pinfeed.readahead import ReadPlan, choose, window_sizes
from pinfeed.rows.batches import largest_batch
from pinfeed.rows.orders import Order
from pinfeed.stores.base import Store, row_nbytes
from pinfeed.stores.sharded_file import ShardedStore

# Small batches are gathered together: some hundred microseconds of work for a thread.
_TOGETHER_BYTES, _MAX_TOGETHER = 2 << 20, 8
# Less is gathered sooner than a second thread has woken up.
_PARALLEL_BYTES = 256 << 10
_MAX_READERS = 8


def make_plan(
    stores: Sequence[Store],
    rows: Order | Iterable[Any],
    batch_size: int | None,
    config: MemoryLimits | None,
    schedule: PrefetchSchedule,
    device: Device,
    route: str | None,
) -> tuple[Plan, ReadPlan]:
    """The plan, and what it chose for each store.

    Raises:
        BudgetError: The limits of ``config`` cannot hold one row per slot, or the batches that
            ``rows`` gives.
        DeviceError: The route cannot be as wanted.
    """
    n_rows, largest = stores[0].n_rows, None if isinstance(rows, Order) else largest_batch(rows)
    why = device.choose_route(
        stores, batch_size or (config and config.preferred_batch_size) or largest or 0, route
    )
    demand = Demand(
        row_nbytes=tuple(row_nbytes(store) for store in stores),
        writable=tuple(store.writable for store in stores),
        resident_bytes=sum(store.resident_bytes for store in stores),
        n_rows=max(1, rows.length(n_rows)) if isinstance(rows, Order) else largest or n_rows,
        unified=device.unified,
        staged=tuple(not device.reaches(store) for store in stores),
        batches_per_slot=schedule.batches_per_slot,
    )
    # Without a config, half of what is free may hold rows of files; the processes that torchrun
    # starts on a machine share it.
    reads_files = any(isinstance(store, ShardedStore) for store in stores)
    free = (
        free_host_bytes() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
        if reads_files or config is not None
        else 0
    )
    if config is None:
        size = min(batch_size, demand.n_rows) if batch_size is not None else (largest or 0)
        plan = Plan(
            size, schedule.depth, demand.route, plan_allocations(demand, size, schedule.depth)
        )
        limit = free // 2
    else:
        limit = config.host_limit(free)
        # Whole batches have their size already: no usual bound cuts them.
        preferred = config.preferred_batch_size or largest
        plan = _fitted(
            dataclasses.replace(config, depth=schedule.depth, preferred_batch_size=preferred),
            demand,
            free,
            window_sizes(stores, rows),
            device,
        )
        if largest is not None and plan.batch_size < largest:
            raise BudgetError(
                f"rows gives batches of up to {largest} rows; the limits of config hold {plan.batch_size}: {plan}\n"
                "give smaller batches, or raise the limits"
            )
    choice = choose(
        stores,
        rows,
        (schedule.depth + 1 + schedule.batches_per_slot) * plan.batch_size,
        limit - plan.host_bytes,
    )
    return dataclasses.replace(
        plan,
        items=plan.items + choice.items,
        notes=(*[why] * bool(why), *choice.notes, *plan.notes),
    ), choice


def choose_schedule(
    stores: Sequence[Store], batch_size: int | None, config: MemoryLimits | None, depth: int | None
) -> PrefetchSchedule:
    """As far ahead as asked for; or else 2 batches, or four slots of small ones.

    As many readers as there are cores, where that helps.
    """
    if config is not None:
        depth, batch_size = config.depth if depth is None else depth, config.preferred_batch_size
    nbytes = (batch_size or 0) * sum(row_nbytes(store) for store in stores)
    batches_per_slot = (
        min(_TOGETHER_BYTES // nbytes, _MAX_TOGETHER) if nbytes and depth is None else 1
    )
    if config is not None and config.cpu_memory_limit is not None and batches_per_slot > 1:
        batches_per_slot = min(batches_per_slot, config.cpu_memory_limit // 4 // (5 * nbytes))
    if depth is None:
        depth = 4 * batches_per_slot - 1 if batches_per_slot > 1 else DEFAULT_DEPTH
    is_small = 0 < nbytes * batches_per_slot < _PARALLEL_BYTES
    schedule = PrefetchSchedule(depth, max(1, batches_per_slot))
    return dataclasses.replace(
        schedule,
        n_readers=1
        if is_small
        else min(schedule.n_slots, len(os.sched_getaffinity(0)), _MAX_READERS),
    )


def _fitted(
    config: MemoryLimits,
    demand: Demand,
    free: int,
    windows: tuple[tuple[int, int], ...],
    device: Device,
) -> Plan:
    """The plan with the largest batch that fits, beside the windows of the order if these leave half of the limit."""
    there = 0 if config.gpu_memory_limit is not None or device.unified else device.free_bytes()
    least = sum(window_allocation(*sizes, n_batch_rows=1).total for sizes in windows)
    beside = dataclasses.replace(
        demand, windows=windows if least <= config.host_limit(free) // 2 else ()
    )
    plan = config.plan(beside, free_host_bytes=free, free_device_bytes=there)
    return dataclasses.replace(plan, items=plan_allocations(demand, plan.batch_size, plan.depth))
