"""MemoryLimits: from memory limits to the largest batch that fits them.

This module is arithmetic only: its callers measure the machine.
"""

from __future__ import annotations

import bisect
import dataclasses
from dataclasses import dataclass
from typing import NoReturn

from pinfeed.errors import ArgumentError, BudgetError, NotEnoughCPUMemory, NotEnoughGPUMemory
from pinfeed.memory.demand import Demand, plan_allocations
from pinfeed.memory.depth import DEFAULT_DEPTH, check_optional_depth
from pinfeed.memory.plan import Plan
from pinfeed.memory.size_field import SizeField
from pinfeed.memory.units import human
from pinfeed.validation.arguments import whole_number
from pinfeed.validation.safe_repr import safe_repr

# Bounds of a batch if there is no preferred size. In measurements, larger batches did not move more
# rows per second.
MOST_ROWS = 1 << 16
MOST_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, repr=False)
class MemoryLimits:
    """Memory limits of a feeder: the part of ``pinfeed.Config`` that does not need torch.

    Users create a ``pinfeed.Config``, a subclass that also accepts a model.

    Args:
        cpu_memory_limit: Host memory that the feeder may use, in bytes or as text (``"2GiB"``),
            including the files that it maps. None is the free memory minus ``headroom``; the
            processes that torchrun starts on a machine share it.
        gpu_memory_limit: GPU memory that the feeder may use for batches, in bytes or as text. None
            is the free memory minus ``headroom``. Batches in host memory do not count.
        preferred_batch_size: Most rows per batch; the feeder takes the largest batch that fits, up
            to this size. None is 65,536 rows or 64 MiB, whichever is less, because larger batches
            need more memory and move no more rows per second.
        depth: Number of prefetched batches; 0 is the synchronous loop. None is 2, or more if
            batches are small. On the CPU, a loop over short batches of rows in memory measures
            whether 0 is faster.
        headroom: Share of the free memory that stays unused if a limit is None.

    Raises:
        ArgumentError: If a limit or size is below 1, the depth is negative, or the headroom is not
            in [0, 1).
    """

    cpu_memory_limit: SizeField = SizeField()
    gpu_memory_limit: SizeField = SizeField()
    preferred_batch_size: int | None = None
    depth: int | None = None
    headroom: float = 0.1

    def __post_init__(self) -> None:
        if self.preferred_batch_size is not None:
            size = whole_number(self.preferred_batch_size, "preferred_batch_size", note=", or None")
            object.__setattr__(self, "preferred_batch_size", size)
        object.__setattr__(self, "depth", check_optional_depth(self.depth))
        if not hasattr(self.headroom, "__float__") or not 0 <= self.headroom < 1:
            raise ArgumentError(f"headroom={self.headroom!r}: expected a share in [0, 1)")

    @safe_repr
    def __repr__(self) -> str:
        given = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                is_bytes = field.name.endswith(("_limit", "_cache"))
                shown = human(value) if is_bytes else repr(value)
                given.append(f"{field.name}={shown}")
        return f"<{type(self).__name__}: {', '.join(given) or 'all by default'}>"

    def plan(self, demand: Demand, *, free_host_bytes: int, free_device_bytes: int) -> Plan:
        """Return the plan with the largest batch that fits, up to the preferred or usual size.

        Raises:
            NotEnoughCPUMemory: If host memory cannot hold batches of one row.
            NotEnoughGPUMemory: If GPU memory cannot hold batches of one row.
        """
        cpu = self.host_limit(free_host_bytes)
        depth = DEFAULT_DEPTH if self.depth is None else self.depth
        gpu = None if demand.unified else self.device_limit(free_device_bytes)

        def plan_of(batch_size: int) -> Plan:
            items = plan_allocations(demand, batch_size, depth)
            return Plan(batch_size, depth, demand.route, items, cpu, gpu)

        def exceeds(batch_size: int) -> bool:
            plan = plan_of(batch_size)
            return plan.host_bytes > cpu or (gpu is not None and plan.device_bytes > gpu)

        def batch_nbytes(batch_size: int) -> int:
            return sum(demand.part_nbytes(batch_size))

        usual = max(1, bisect.bisect_right(range(1, MOST_ROWS + 1), MOST_BYTES, key=batch_nbytes))
        largest = min(demand.n_rows, self.preferred_batch_size or usual)
        # Memory grows with the batch, so a bisection finds the first size that does not fit.
        fitting = bisect.bisect_left(range(1, largest + 1), True, key=exceeds)
        if fitting == 0:
            self._refuse(demand, plan_of(1), cpu, gpu)
        plan = plan_of(fitting)
        if self.preferred_batch_size is None and fitting == usual < demand.n_rows:
            note = (
                f"batches have {usual:,} rows, because larger ones move no more rows per second; "
                "set preferred_batch_size for larger batches"
            )
            plan = dataclasses.replace(plan, notes=(note,))
        return plan

    def for_feeder(self) -> MemoryLimits:
        """Return the limits that apply to a feeder; a subclass may also limit other memory."""
        return self

    def host_limit(self, free: int) -> int:
        """Return the host memory that may be used if ``free`` bytes are free."""
        return self._limit(self.cpu_memory_limit, free)

    def device_limit(self, free: int) -> int:
        """Return the GPU memory that may be used if ``free`` bytes are free."""
        return self._limit(self.gpu_memory_limit, free)

    def _limit(self, limit: int | None, free: int) -> int:
        return int(free * (1 - self.headroom)) if limit is None else limit

    def _refuse(self, demand: Demand, plan: Plan, cpu: int, gpu: int | None) -> NoReturn:
        """Raise the error for a plan with batches of one row that does not fit."""
        error: type[BudgetError]
        if gpu is not None and plan.device_bytes > gpu:
            error = NotEnoughGPUMemory
            kind = "device"
            need = plan.device_bytes
            limit = gpu
            name = "gpu_memory_limit"
        else:
            error = NotEnoughCPUMemory
            kind = "host"
            need = plan.host_bytes
            limit = cpu
            name = "cpu_memory_limit"
        uses = ", ".join(
            f"{item.count} x {human(item.nbytes)} for {item.what}"
            for item in plan.items
            if (item.place == "device") == (kind == "device")
        )
        origin = ", the free memory minus the headroom" if getattr(self, name) is None else ""
        synchronous = Plan(1, 0, demand.route, plan_allocations(demand, 1, 0))
        least = synchronous.device_bytes if kind == "device" else synchronous.host_bytes
        lower_depth = f"lower depth (now {plan.depth}) or " if plan.depth and least <= limit else ""
        raise error(
            f"batches of one row need {human(need)} ({need} bytes) of {kind} memory: {uses}; "
            f"{name} is {human(limit)} ({limit} bytes){origin}; {lower_depth}raise {name}"
        )
