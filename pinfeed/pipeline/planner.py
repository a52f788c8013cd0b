"""Planner: chooses batch size, buffers and read strategies for stores, an order and limits."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pinfeed.devices.device import Device
from pinfeed.errors import BudgetError, DeviceError, NotEnoughCPUMemory
from pinfeed.memory.host import free_host_memory
from pinfeed.memory.limits import MemoryLimits, deepest_plan, n_batches, usual_batch_size
from pinfeed.memory.plan import Allocation, Plan, Route
from pinfeed.memory.units import human
from pinfeed.native.library import is_turned_off, why_not
from pinfeed.pipeline.loop_memory import PartSize, loop_allocations, order_allocations, ragged_parts
from pinfeed.pipeline.loop_transforms import LoopTransforms, TransformNbytes
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.store_tree import StoreTree
from pinfeed.readahead.read_plan import ReadPlan, plan_reads, readahead_memory
from pinfeed.readahead.source_reads import FreeMemory, file_of
from pinfeed.rows.length_batches import LengthBatches
from pinfeed.rows.orders import Order, known
from pinfeed.rows.sampler_batches import largest_batch
from pinfeed.stores.local_file import LocalFileStore
from pinfeed.stores.ragged import RaggedStore
from pinfeed.stores.store import Store, row_nbytes
from pinfeed.stores.text import TextStore


@dataclass(frozen=True)
class Planner:
    """Chooses the batch size and the buffers of a feeder, and how the rows of each store are read.

    The plan is the sum of what the parts of a loop declare; see ``loop_allocations``.
    """

    tree: StoreTree
    rows: Order | Iterable[Any]
    """Sampling order of the rows."""
    batch_size: int | None
    config: MemoryLimits | None
    schedule: PrefetchSchedule
    """Number of batches to prefetch."""
    device: Device
    transforms: LoopTransforms
    transform_nbytes: Callable[[int], TransformNbytes] | None
    """Predicts the memory of the transforms from the bytes of the rows; None if unknown."""

    def plan(self, route: str | None) -> tuple[Plan, ReadPlan]:
        """Return the plan, and the read strategies of all stores.

        Args:
            route: The user's choice of ``"direct"`` or ``"staged"``; None for ``"staged"``.

        Raises:
            BudgetError: If the limits cannot hold batches of one row, or the batches from ``rows``.
            DeviceError: If the device does not support the route.
        """
        tree = self.tree
        config = self.config
        if route == "direct" and tree.ragged and not self.device.unified:
            raise DeviceError(
                "route='direct' was given with a RaggedStore, but the CPU gathers ragged rows; "
                "leave out route"
            )
        why = self.device.choose_route(tree.stores, route, "staged")
        free = free_memory([*tree.stores, *tree.parts_of_ragged], config)
        if config is None:
            size = min(self.batch_size or self._largest_given or 0, self._most_rows)
            plan = self._plan_of(size, self.schedule.depth)
        else:
            plan = self._limited_plan(config, free.memory)
        n_batch_rows = self._n_batch_rows(plan.batch_size, plan.depth)
        ahead = free.without(plan.items)
        choice = plan_reads(tree.stores, self.rows, n_batch_rows, ahead, tree.ragged)
        plan = dataclasses.replace(
            plan,
            items=plan.items + choice.items,
            notes=(*[why] * bool(why), *choice.notes, *plan.notes, *_without_native()),
            n_transform_threads=self.schedule.n_transform_threads,
        )
        return plan, choice

    def with_writes(self, plan: Plan, schedule: PrefetchSchedule, reads: ReadPlan) -> Plan:
        """Return the plan of a loop that writes back the batches of another plan.

        It prefetches fewer batches if the limits cannot hold the values, too.

        Args:
            plan: The other plan.
            schedule: Schedule of the loop that writes.
            reads: The read strategies of all stores.

        Raises:
            BudgetError: If the limits cannot hold the values without prefetching either.
        """
        planner = dataclasses.replace(self, schedule=schedule)

        def plan_of(depth: int) -> Plan:
            items = planner.allocations(plan.batch_size, depth) if plan.batch_size else []
            return dataclasses.replace(plan, items=(*items, *reads.items), depth=depth)

        found = deepest_plan(plan_of, schedule.depth)
        if found is None:
            raise BudgetError(
                f"batches() was called with batches of {plan.batch_size} rows, and the limits of "
                f"config cannot hold the values that are written back, too: {plan_of(0)}\ngive a "
                "smaller preferred_batch_size, or raise the limits"
            )
        return found

    def capacity(self, batch_size: int) -> list[int]:
        """Return the bytes to reserve for each part of a batch; empty if they are unknown.

        Args:
            batch_size: Rows of the largest batch; 0 if it is unknown.
        """
        return [part.reserved for part in self._parts(batch_size)] if batch_size else []

    @functools.cached_property
    def _largest_given(self) -> int | None:
        """Size of the largest batch that ``rows`` yields; None if ``rows`` yields single rows."""
        return None if isinstance(self.rows, Order) else largest_batch(self.rows, self.batch_size)

    @property
    def _most_rows(self) -> int:
        """Most rows that a batch can have."""
        n_rows = self.tree.n_rows
        if isinstance(self.rows, Order):
            return max(1, self.rows.length(n_rows))
        return self._largest_given or n_rows

    def _parts(self, n_rows: int) -> list[PartSize]:
        """Return the parts of a batch, those of ragged stores last."""
        # Batches that are bounded by elements have far fewer rows than the largest possible batch.
        # Memory for stores with rows of equal length then grows with the batches that occur.
        n_reserved = 0 if isinstance(self.rows, LengthBatches) else n_rows
        parts = [
            PartSize(
                n_rows * row_nbytes(store),
                n_reserved * row_nbytes(store),
                is_staged=not self.device.reaches(store),
                is_written=store.writable and self.schedule.writes,
            )
            for store in self.tree.stores
        ]
        is_limited = self.config is not None
        is_staged = not self.device.unified
        for store in self.tree.ragged:
            parts += ragged_parts(
                store, self.rows, n_rows, is_limited=is_limited, is_staged=is_staged
            )
        return parts

    def _n_batch_rows(self, batch_size: int, depth: int) -> int:
        """Return the rows of all batches in memory."""
        return n_batches(depth, self.schedule.batches_per_slot) * batch_size

    def allocations(self, batch_size: int, depth: int) -> list[Allocation]:
        """List all buffers that the feeder holds at a time, except those of read strategies."""
        parts = self._parts(batch_size)
        unified = self.device.unified
        schedule = dataclasses.replace(
            self.schedule, depth=depth, repeats=known(self.rows).most_copies != 1
        )
        has_host = self.transforms.host is not None
        found = loop_allocations(
            parts, batch_size, schedule, unified=unified, reads_for_host=has_host
        )
        if self.transform_nbytes is not None:
            nbytes = self.transform_nbytes(
                sum(part.nbytes for part in parts) + batch_size * self.tree.made_row_nbytes
            )
            found += nbytes.allocations(depth, unified=unified)
        found += self._order_items
        text_nbytes = math.ceil(batch_size * sum(one.mean_row_nbytes for one in self.tree.texts))
        n = n_batches(depth)
        found.append(Allocation("texts of batches, on average", "host", n, text_nbytes))
        found.append(_resident([*self.tree.stores, *self.tree.ragged, *self.tree.texts]))
        return [item for item in found if item.total]

    @functools.cached_property
    def _order_items(self) -> list[Allocation]:
        """Arrays that the order keeps."""
        return order_allocations(self.rows)

    @functools.cached_property
    def _route(self) -> Route:
        return "staged" if any(part.is_staged for part in self._parts(1)) else "direct"

    def _plan_of(
        self,
        batch_size: int,
        depth: int,
        *,
        limits: tuple[int | None, int | None] = (None, None),
        readahead: Callable[[int], list[Allocation]] | None = None,
    ) -> Plan:
        """Return the plan without the memory of read strategies.

        Args:
            batch_size: Rows of a batch; 0 if it is unknown.
            depth: Number of batches to prefetch.
            limits: Limits of host memory and of GPU memory, in bytes.
            readahead: See ``readahead_memory``; None if it does not count.
        """
        items = self.allocations(batch_size, depth) if batch_size else []
        if readahead is not None:
            items += readahead(self._n_batch_rows(batch_size, depth))
        return Plan(batch_size, depth, self._route, tuple(items), *limits)

    def _limited_plan(self, config: MemoryLimits, cpu: int) -> Plan:
        """Plan the largest batch that fits ``cpu`` bytes of host memory and the GPU limit."""
        gpu = None
        if not self.device.unified:
            gpu = config.gpu_memory_limit or config.device_limit(self.device.free_bytes())
        # Batches from rows already have a size, so the usual bound does not apply.
        preferred = config.preferred_batch_size or self._largest_given
        usual = usual_batch_size(lambda n_rows: sum(part.nbytes for part in self._parts(n_rows)))
        size = self._largest_batch(config, min(self._most_rows, preferred or usual), cpu, gpu)
        plan = self._plan_of(size, self.schedule.depth, limits=(cpu, gpu))
        if self._largest_given is not None and size < self._largest_given:
            raise BudgetError(
                f"rows yields batches of up to {self._largest_given} rows; the limits of config "
                f"hold at most {size}: {plan}\ngive smaller batches, or raise the limits"
            )
        if preferred or not size == usual < self._most_rows:
            return plan
        note = (
            f"batches have {usual:,} rows, because larger ones move no more rows per second; set "
            "preferred_batch_size for larger batches"
        )
        return dataclasses.replace(plan, notes=(note,))

    def _largest_batch(self, config: MemoryLimits, most: int, cpu: int, gpu: int | None) -> int:
        """Return the rows of the largest batch that fits.

        Buffers for rows that are read ahead count as needed memory if they take at most half of the
        host limit, and if everything else fits too.
        """
        plan_of = functools.partial(self._plan_of, limits=(cpu, gpu))
        readahead = readahead_memory(self.tree.stores, self.rows)
        if 0 < sum(item.total for item in readahead(1)) <= cpu // 2:
            with contextlib.suppress(BudgetError):
                with_buffers = functools.partial(plan_of, readahead=readahead)
                return config.largest_batch(with_buffers, most, self.schedule.depth)
        return config.largest_batch(plan_of, most, self.schedule.depth)


def _without_native() -> list[str]:
    """Return a note if the compiled functions are missing, unless the user has turned them off."""
    why = why_not()
    if not why or is_turned_off():
        return []
    return [f"numpy copies rows instead of pinfeed's compiled functions, because {why}"]


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
    free = free_memory(stores, config)
    if config is not None:
        free = free._replace(memory=free.memory // 2, page_cache=free.page_cache // 2)
    # Two entries may have the same store.
    distinct = {id(store): store for store in stores}
    resident = _resident(distinct.values())
    if not resident.total:
        return plan_reads(stores, (), 0, free)
    is_limited = config is not None and config.cpu_memory_limit is not None
    if is_limited and resident.total > free.memory:
        raise NotEnoughCPUMemory(
            f"fetch needs {human(resident.total)} ({resident.total} bytes) of host memory to read "
            f"its files; expected at most {human(free.memory)}, which is half of cpu_memory_limit "
            "(the batches need the other half); raise cpu_memory_limit, or write files with "
            "smaller chunks"
        )
    choice = plan_reads(stores, (), 0, free.without([resident]))
    return dataclasses.replace(choice, resident=(resident,))


def _resident(stores: Iterable[Store | RaggedStore | TextStore]) -> Allocation:
    """Return the memory that stores need in addition to their rows."""
    nbytes = sum(store.resident_bytes for store in stores)
    return Allocation("buffers and indices of the stores", "host", 1, nbytes)


def free_memory(stores: Sequence[Store], config: MemoryLimits | None) -> FreeMemory:
    """Return the host memory that batches and rows of files may take.

    Without a config, rows of files may take half of the free memory. The processes that torchrun
    starts on one machine share the free memory.

    Args:
        stores: Stores of the rows.
        config: Memory limits; None for no limits.
    """
    files = [file for file in map(file_of, stores) if file is not None]
    if config is None and not files:
        # The plan does not depend on the free memory.
        return FreeMemory(0, 0)
    free = free_host_memory()
    for file in files:
        if isinstance(file, LocalFileStore):
            file.decide_cache(free)
    allocatable = free.allocatable // max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    if config is None:
        return FreeMemory(allocatable // 2, free.page_cache)
    limit = config.host_limit(allocatable)
    if config.cpu_memory_limit is not None:
        return FreeMemory(limit, limit, "cpu_memory_limit")
    return FreeMemory(limit, free.page_cache)
