"""make_plan: chooses batch size, buffers and read strategies for stores, an order and limits."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pinfeed.devices.base import Device
from pinfeed.errors import BudgetError, DeviceError, NotEnoughCPUMemory
from pinfeed.memory.demand import (
    Demand,
    plan_allocations,
    resident_allocation,
    window_allocation,
)
from pinfeed.memory.host import FreeHostMemory, free_host_memory
from pinfeed.memory.limits import MemoryLimits
from pinfeed.memory.plan import Plan
from pinfeed.memory.transform_memory import TransformMemory
from pinfeed.memory.units import human
from pinfeed.pipeline.ragged_sizes import RaggedSizes
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.readahead import FreeMemory, ReadPlan, choose, choose_ragged, file_of, window_sizes
from pinfeed.readahead.notes import notes_of
from pinfeed.rows.orders import Order, is_distinct
from pinfeed.rows.ragged_batches import ElementBatches
from pinfeed.rows.sampler_batches import largest_batch
from pinfeed.stores.base import Store, row_nbytes
from pinfeed.stores.local_file import LocalFileStore
from pinfeed.stores.ragged import RaggedStore


@dataclass(frozen=True)
class PlanRequest:
    """The user's arguments that determine a plan."""

    stores: Sequence[Store]
    rows: Order | Iterable[Any]
    """Sampling order of the rows."""
    batch_size: int | None
    config: MemoryLimits | None
    ragged: Sequence[RaggedStore] = ()
    transforms: TransformMemory | None = None
    """Memory of the transforms; None without transforms."""

    @property
    def n_rows(self) -> int:
        """Number of rows of each store."""
        return self.stores[0].n_rows if self.stores else self.ragged[0].n_rows

    def sizes(self, store: RaggedStore) -> RaggedSizes:
        """Return the bytes of the batches of a ragged store."""
        return RaggedSizes(store, self.rows, is_limited=self.config is not None)

    @property
    def sources(self) -> Sequence[Store]:
        """The stores, and the stores with the items of ragged rows."""
        return [*self.stores, *(store.items for store in self.ragged)]

    @property
    def largest(self) -> int | None:
        """Size of the largest batch that ``rows`` yields; None if ``rows`` yields single rows."""
        return None if isinstance(self.rows, Order) else largest_batch(self.rows)


def make_plan(
    request: PlanRequest, schedule: PrefetchSchedule, device: Device, route: str | None
) -> tuple[Plan, ReadPlan]:
    """Choose the batch size, the buffers, and how the rows of each store are read.

    Args:
        request: The user's arguments.
        schedule: Number of batches to prefetch.
        device: Device that batches are moved to.
        route: The user's choice of ``"direct"`` or ``"staged"``; None for the faster one.

    Raises:
        BudgetError: If the limits cannot hold batches of one row, or the batches from ``rows``.
        DeviceError: If the device does not support the route.
    """
    if route == "direct" and request.ragged and not device.unified:
        raise DeviceError(
            "route='direct' was given with a RaggedStore, but the CPU gathers ragged rows; leave "
            "out route"
        )
    stores = request.stores
    config = request.config
    largest = request.largest
    preferred = config.preferred_batch_size if config is not None else None
    why = device.choose_route(stores, request.batch_size or preferred or largest or 0, route)
    demand = _demand(request, schedule, device, largest)
    free = _free_host_memory(request.sources, config)
    limits = _file_limits(config, free)
    if config is None:
        size = largest or 0
        if request.batch_size is not None:
            size = min(request.batch_size, demand.n_rows)
        plan = Plan(
            size, schedule.depth, demand.route, plan_allocations(demand, size, schedule.depth)
        )
    else:
        # Batches from rows already have a size, so the usual bound does not apply.
        config = dataclasses.replace(
            config, depth=schedule.depth, preferred_batch_size=preferred or largest
        )
        windows = window_sizes(stores, request.rows)
        plan = _limited_plan(config, demand, free.allocatable, windows, device)
        _require_room(plan, largest)
    n_ahead = schedule.depth + 1 + schedule.batches_per_slot
    left = limits._replace(
        memory=limits.memory - plan.host_bytes, page_cache=limits.page_cache - plan.host_bytes
    )
    choice = _choose_reads(request, n_ahead * plan.batch_size, left)
    notes = (*[why] * bool(why), *choice.notes, *plan.notes)
    items = plan.items + choice.items
    measures = schedule.measures_depth
    plan = dataclasses.replace(plan, items=items, notes=notes, measures_depth=measures)
    return plan, choice


def plan_reads_by_id(stores: Sequence[Store], config: MemoryLimits | None) -> ReadPlan:
    """Choose how to read the rows of each store if the ids of a batch select them.

    The rows and their number are unknown before the batch arrives. Half of a limit is therefore
    reserved for the batches.

    Args:
        stores: The stores, which may have different numbers of rows.
        config: Memory limits; None for the free memory.

    Raises:
        NotEnoughCPUMemory: If half of the limit cannot hold the memory that stores need for a read.
    """
    limits = _file_limits(config, _free_host_memory(stores, config))
    if config is not None:
        limits = limits._replace(memory=limits.memory // 2, page_cache=limits.page_cache // 2)
    # Two entries may have the same store.
    distinct = {id(store): store for store in stores}
    nbytes = sum(store.resident_bytes for store in distinct.values())
    if not nbytes:
        return choose(stores, (), 0, limits)
    is_limited = config is not None and config.cpu_memory_limit is not None
    if is_limited and nbytes > limits.memory:
        raise NotEnoughCPUMemory(
            f"fetch needs {human(nbytes)} ({nbytes} bytes) of host memory to read its files; "
            f"expected at most {human(limits.memory)}, which is half of cpu_memory_limit (the "
            "batches need the other half); raise cpu_memory_limit, or write files with smaller "
            "chunks"
        )
    resident = resident_allocation(nbytes)
    choice = choose(stores, (), 0, limits.without(resident))
    return dataclasses.replace(choice, resident=(resident,))


def part_capacity(request: PlanRequest, batch_size: int) -> list[int]:
    """Return the bytes to reserve for each part of a batch; empty if they are unknown in advance.

    Args:
        request: The user's arguments.
        batch_size: Rows of the largest batch; 0 if it is unknown.
    """
    if not batch_size:
        return []
    # Batches that are bounded by elements have far fewer rows than the largest possible batch.
    # Memory for stores with rows of equal length then grows with the batches that occur.
    n_rows = 0 if isinstance(request.rows, ElementBatches) else batch_size
    capacity = [n_rows * row_nbytes(store) for store in request.stores]
    for store in request.ragged:
        capacity += request.sizes(store).reserved(batch_size)
    return capacity


def _demand(
    request: PlanRequest, schedule: PrefetchSchedule, device: Device, largest: int | None
) -> Demand:
    """Describe the rows and batches that need memory."""
    stores = request.stores
    n_rows = request.n_rows
    most = (
        max(1, request.rows.length(n_rows))
        if isinstance(request.rows, Order)
        else largest or n_rows
    )
    return Demand(
        row_nbytes=tuple(row_nbytes(store) for store in stores),
        # The results of transforms are not written back.
        writable=tuple(store.writable and request.transforms is None for store in stores),
        resident_bytes=sum(store.resident_bytes for store in stores)
        + sum(store.resident_bytes for store in request.ragged),
        n_rows=most,
        unified=device.unified,
        staged=tuple(not device.reaches(store) for store in stores),
        batches_per_slot=schedule.batches_per_slot,
        repeats=not is_distinct(request.rows),
        ragged=tuple(request.sizes(store).most for store in request.ragged),
        transforms=request.transforms,
    )


def _choose_reads(request: PlanRequest, n_batch_rows: int, free: FreeMemory) -> ReadPlan:
    """Choose how each store is read."""
    choice = choose(request.stores, request.rows, n_batch_rows, free)
    for item in choice.items:
        free = free.without(item)
    ragged = []
    for store in request.ragged:
        reads = choose_ragged(store, request.rows, free)
        for item in reads.items:
            free = free.without(item)
        ragged.append(reads)
    notes = notes_of(reads.note for reads in ragged if reads.note is not None)
    return dataclasses.replace(choice, notes=choice.notes + notes, ragged=ragged)


def _free_host_memory(stores: Sequence[Store], config: MemoryLimits | None) -> FreeHostMemory:
    """Return the free host memory of this process; nothing if the plan does not depend on it.

    Without a config, rows of files may take half of the free memory. The processes that torchrun
    starts on one machine share the free memory.
    """
    files = [file for file in map(file_of, stores) if file is not None]
    if config is None and not files:
        return FreeHostMemory(0, 0)
    free = free_host_memory()
    for file in files:
        if isinstance(file, LocalFileStore):
            file.decide_cache(free)
    n_processes = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    return free._replace(allocatable=free.allocatable // n_processes)


def _file_limits(config: MemoryLimits | None, free: FreeHostMemory) -> FreeMemory:
    """Return the host memory that batches and rows of files may take.

    Args:
        config: Memory limits; None for half of the free memory.
        free: Free host memory of this process.
    """
    if config is None:
        return FreeMemory(free.allocatable // 2, free.page_cache)
    limit = config.host_limit(free.allocatable)
    if config.cpu_memory_limit is not None:
        return FreeMemory(limit, limit, "cpu_memory_limit")
    return FreeMemory(limit, free.page_cache)


def _limited_plan(
    config: MemoryLimits,
    demand: Demand,
    free: int,
    windows: tuple[tuple[int, int], ...],
    device: Device,
) -> Plan:
    """Plan the largest batch that fits.

    The windows of the order count as needed memory if they take at most half of the host limit, and
    if everything else fits too.
    """
    free_device = 0
    if config.gpu_memory_limit is None and not device.unified:
        free_device = device.free_bytes()
    least = sum(window_allocation(*sizes, n_batch_rows=1).total for sizes in windows)
    if least > config.host_limit(free) // 2:
        windows = ()

    def plan_with(windows: tuple[tuple[int, int], ...]) -> Plan:
        return config.plan(
            dataclasses.replace(demand, windows=windows),
            free_host_bytes=free,
            free_device_bytes=free_device,
        )

    try:
        plan = plan_with(windows)
    except BudgetError:
        if not windows:
            raise
        plan = plan_with(())
    return dataclasses.replace(plan, items=plan_allocations(demand, plan.batch_size, plan.depth))


def _require_room(plan: Plan, largest: int | None) -> None:
    """Check that the plan holds the largest batch from the user's ``rows``."""
    if largest is not None and plan.batch_size < largest:
        raise BudgetError(
            f"rows yields batches of up to {largest} rows; the limits of config hold at most "
            f"{plan.batch_size}: {plan}\ngive smaller batches, or raise the limits"
        )
