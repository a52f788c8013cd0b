"""MemoryLimits: from memory limits to the largest batch that fits them; depths and their bounds.

This module is arithmetic only: its callers measure the machine.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from pinfeed.errors import ArgumentError, BudgetError, NotEnoughCPUMemory, NotEnoughGPUMemory
from pinfeed.memory.plan import Plan
from pinfeed.memory.units import SizeField, human
from pinfeed.validation.arguments import whole_number

DEFAULT_DEPTH = 2
MAX_DEPTH = 1024
"""Most batches that a feeder prefetches.

Each batch needs memory, and pinfeed compares each write-back with the rows of all these batches.

Each prefetched batch hides a stall of up to one training step, so a few are enough. More than a few
hundred have no further benefit.
"""


def check_depth(depth: int, alternative: str = "") -> int:
    """Return ``depth`` as an int.

    Args:
        depth: The user's argument.
        alternative: Text of the error that says what else may be given.

    Raises:
        ArgumentError: If it is not a whole number from 0 to ``MAX_DEPTH``.
    """
    note = (
        f" (0 is the synchronous loop){alternative}; each prefetched batch needs memory, and 2 to "
        "32 are enough"
    )
    return whole_number(depth, "depth", least=0, most=MAX_DEPTH, note=note)


def check_optional_depth(depth: int | None) -> int | None:
    """Return ``depth`` as an int; None stays as it is.

    Raises:
        ArgumentError: If it is neither None nor a whole number from 0 to ``MAX_DEPTH``.
    """
    return None if depth is None else check_depth(depth, ", or None to let pinfeed choose")


def n_batches(depth: int, batches_per_slot: int = 1) -> int:
    """Return how many batches are in memory at a time.

    The training step uses ``batches_per_slot`` batches, the loop receives the next one before it
    drops these, and ``depth`` more are prefetched.
    """
    return depth + 1 + batches_per_slot


def n_held(depth: int) -> int:
    """Return how many write-backs are in memory at a time.

    At most ``max(depth, 2)`` write-backs are not written yet (one without prefetching), and a
    prefetched batch may still need the values of ``depth + 1`` others.
    """
    return (max(depth, 2) if depth else 1) + depth + 1


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
            batches are small.
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

    def __repr__(self) -> str:
        given = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                is_bytes = field.name.endswith(("_limit", "_cache"))
                shown = human(value) if is_bytes else repr(value)
                given.append(f"{field.name}={shown}")
        return f"<{type(self).__name__}: {', '.join(given) or 'all by default'}>"

    def largest_batch(self, plan_of: Callable[[int, int], Plan], most: int, depth: int) -> int:
        """Return the rows of the largest batch whose plan fits its limits.

        Args:
            plan_of: Returns a plan, given the rows of a batch and the depth.
            most: Most rows of a batch, at least 1.
            depth: Number of batches to prefetch.

        Raises:
            NotEnoughCPUMemory: If host memory cannot hold batches of one row.
            NotEnoughGPUMemory: If GPU memory cannot hold batches of one row.
        """
        # Memory grows with the batch, so a bisection finds the first size that does not fit.
        sizes = range(1, most + 1)
        fitting = bisect.bisect_left(sizes, True, key=lambda n: bool(_exceeded(plan_of(n, depth))))
        if fitting == 0:
            raise self._refusal(plan_of(1, depth), plan_of(1, 0))
        return fitting

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

    def _refusal(self, plan: Plan, synchronous: Plan) -> BudgetError:
        """Return the error for a plan with batches of one row that does not fit.

        Args:
            plan: The plan.
            synchronous: The same without prefetching.
        """
        kind, (need, limit) = next(iter(_exceeded(plan).items()))
        is_gpu = kind == "device"
        name = "gpu_memory_limit" if is_gpu else "cpu_memory_limit"
        uses = ", ".join(
            f"{item.count} x {human(item.nbytes)} for {item.what}"
            for item in plan.items
            if (item.place == "device") == is_gpu
        )
        origin = ", the free memory minus the headroom" if getattr(self, name) is None else ""
        helps = plan.depth and kind not in _exceeded(synchronous)
        lower_depth = f"lower depth (now {plan.depth}) or " if helps else ""
        error = NotEnoughGPUMemory if is_gpu else NotEnoughCPUMemory
        return error(
            f"batches of one row need {human(need)} ({need} bytes) of {kind} memory: {uses}; "
            f"{name} is {human(limit)} ({limit} bytes){origin}; {lower_depth}raise {name}"
        )


def _exceeded(plan: Plan) -> dict[str, tuple[int, int]]:
    """Return the need and the limit of each kind of memory whose limit a plan exceeds."""
    kinds = {
        "device": (plan.device_bytes, plan.gpu_memory_limit),
        "host": (plan.host_bytes, plan.cpu_memory_limit),
    }
    return {
        kind: (need, limit)
        for kind, (need, limit) in kinds.items()
        if limit is not None and need > limit
    }


def deepest_plan(plan_of: Callable[[int], Plan], depth: int) -> Plan | None:
    """Return the plan with the most prefetched batches that fits its limits; None if none fits.

    Args:
        plan_of: Returns a plan, given the depth.
        depth: Most batches to prefetch.
    """
    plans = map(plan_of, range(depth, -1, -1))
    return next((plan for plan in plans if not _exceeded(plan)), None)


def usual_batch_size(nbytes_of: Callable[[int], int]) -> int:
    """Return the rows of a batch without a preferred size, if memory does not limit them.

    Args:
        nbytes_of: Returns the bytes of a batch, given its number of rows.
    """
    return max(1, bisect.bisect_right(range(1, MOST_ROWS + 1), MOST_BYTES, key=nbytes_of))
