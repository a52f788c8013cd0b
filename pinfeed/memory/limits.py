"""MemoryLimits -> Plan: from memory limits to a batch size; sizes and rates in words.

Nothing of the machine is asked here.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pinfeed.errors import ArgumentError, BudgetError, NotEnoughCPUMemory, NotEnoughGPUMemory
from pinfeed.validation.arguments import whole_number

DEFAULT_DEPTH = 2
MAX_DEPTH = 1024
"""Most batches that a feeder prefetches.

Each takes memory of its own, and each write-back is compared with the rows of all of them.

A prefetched batch hides a stall as long as a training step, so a few are enough. More than some
hundred hide nothing that fewer do not.
"""

Place = Literal["host", "pinned", "device"]
Route = Literal["staged", "direct"]

# Host memory is taken in whole pages.
_PAGE = 4096
# torch's caching allocator rounds to this.
_DEVICE_BLOCK = 512
_ROW_NUMBER = 8
ON_THEIR_WAY_BYTES = 8 << 20
"""Most that the device copies at once of the rows that two batches share."""
MOST_ROWS, MOST_BYTES = 1 << 16, 64 << 20
"""Rows and bytes of a batch at most, where nobody prefers a size: larger ones were not measured to move more rows per second."""
# The most that an order of rows.py takes: three tables of 512 KiB, and arrays for a run of 16384
# rows.
_ORDER = 3 << 20


def KiB(count: float = 1) -> int:
    """Bytes in ``count`` KiB, rounded down."""
    return _bytes(count, 10, "KiB")


def MiB(count: float = 1) -> int:
    """Bytes in ``count`` MiB, rounded down."""
    return _bytes(count, 20, "MiB")


def GiB(count: float = 1) -> int:
    """Bytes in ``count`` GiB, rounded down."""
    return _bytes(count, 30, "GiB")


def _bytes(count: Any, shift: int, unit: str) -> int:
    if not hasattr(count, "__float__"):
        # A string times a number is a long string.
        raise ArgumentError(f"{unit}({count!r}): expected a number, as {unit}(64)")
    return int(count * (1 << shift))


def human(nbytes: float) -> str:
    """Bytes as people read them: ``1.5 GiB``."""
    if nbytes < 0:
        return f"-{human(-nbytes)}"
    if round(nbytes) < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        nbytes /= 1024
        # The number as it is printed decides: 1023.96 MiB would read "1024.0 MiB".
        if round(nbytes, 1) < 1024:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1024:,.1f} PiB"


def human_rate(bytes_per_s: float) -> str:
    """Bytes per second as people read them, with three digits: ``1.25 GB/s``, which is 1.25e9 bytes per second."""
    number, unit = bytes_per_s, "B/s"
    for larger in ("KB/s", "MB/s", "GB/s"):
        if round(number) < 1000:
            break
        number, unit = number / 1000, larger
    if unit == "B/s" or number >= 99.95:
        return f"{number:,.0f} {unit}"
    return f"{number:.1f} {unit}" if number >= 9.995 else f"{number:.2f} {unit}"


def safe_repr(describe: Callable[[Any], str]) -> Callable[[Any], str]:
    """Make a ``__repr__`` of a method, one that never raises: an object that is half made or broken shows the name of its class."""

    @functools.wraps(describe)
    def shown(self: Any) -> str:
        try:
            return describe(self)
        except Exception:
            return f"<{type(self).__name__}>"

    return shown


@dataclass(frozen=True)
class Demand:
    """What a feeder moves, as far as memory is concerned."""

    row_nbytes: tuple[int, ...]
    """Bytes of one row in each store."""
    writable: tuple[bool, ...]
    """Which of the stores can be written back."""
    resident_bytes: int
    """Host memory that the stores hold beside their rows, in bytes."""
    n_rows: int
    """Rows of one epoch, the most that a batch can have."""
    unified: bool
    """Whether batches live in host memory."""
    staged: tuple[bool, ...]
    """Which of the stores the device does not reach."""
    windows: tuple[tuple[int, int], ...] = ()
    """Rows of a window and bytes of a row, for each store whose windows are read ahead."""
    batches_per_slot: int = 1
    """Small batches that are gathered together."""

    @property
    def route(self) -> Route:
        """Of the stores together."""
        return "staged" if any(self.staged) else "direct"


@dataclass(frozen=True)
class Allocation:
    """One use of memory: ``count`` buffers of ``nbytes`` each."""

    what: str
    place: Place
    count: int
    nbytes: int

    @property
    def total(self) -> int:
        return self.count * self.nbytes


@dataclass(frozen=True, repr=False)
class Plan:
    """How much memory a feeder takes, and what for. ``str(plan)`` says it in words."""

    batch_size: int
    """Rows per batch; 0 where nobody can tell in advance."""
    depth: int
    route: Route
    items: tuple[Allocation, ...]
    cpu_memory_limit: int | None = None
    gpu_memory_limit: int | None = None
    notes: tuple[str, ...] = ()
    """How the rows of each file are read, and why."""

    @property
    def n_slots(self) -> int:
        """Batches that can be under way to the device at a time."""
        return self.depth + 1

    @property
    def host_bytes(self) -> int:
        """Host memory in all, page-locked or not."""
        return self._sum("host") + self.pinned_bytes

    @property
    def pinned_bytes(self) -> int:
        """Page-locked part of the host memory."""
        return self._sum("pinned")

    @property
    def device_bytes(self) -> int:
        """Memory of a device that has its own."""
        return self._sum("device")

    def _sum(self, place: Place) -> int:
        return sum(item.total for item in self.items if item.place == place)

    @safe_repr
    def __repr__(self) -> str:
        return f"<Plan: {self}>"

    def __str__(self) -> str:
        def of(limit: int | None) -> str:
            return f" of {human(limit)}" if limit is not None else ""

        size = (
            f"{self.batch_size} rows"
            if self.batch_size
            else "as many rows as each turns out to have, which is not counted here"
        )
        lines = [f"batches of {size}, {self.depth} ahead, {self.route} route"]
        lines.append(
            f"host: {human(self.host_bytes)}{of(self.cpu_memory_limit)}, of it page-locked: {human(self.pinned_bytes)}"
        )
        if self.device_bytes:
            lines.append(f"device: {human(self.device_bytes)}{of(self.gpu_memory_limit)}")
        lines += [
            f"  {item.place}: {item.count} x {human(item.nbytes)} {item.what}"
            for item in self.items
        ]
        return "\n".join([*lines, *self.notes])

    def _repr_html_(self) -> str:
        """Return what a notebook shows: a table of every use of memory, and the totals with their limits."""
        from tabulate import tabulate

        names = {"host": "host", "pinned": "host, page-locked", "device": "device"}
        rows = [
            (
                item.what,
                names[item.place],
                f"{item.count} × {human(item.nbytes)}",
                human(item.total),
            )
            for item in self.items
        ]
        totals = [
            ("in all", "host", self.host_bytes, self.cpu_memory_limit),
            ("in all", "device", self.device_bytes, self.gpu_memory_limit),
        ]
        rows += [
            (what, place, "", human(nbytes) + (f" of {human(limit)}" if limit is not None else ""))
            for what, place, nbytes, limit in totals
            if nbytes or place == "host"
        ]
        table = tabulate(
            rows,
            headers=("use", "place", "count × size", "total"),
            tablefmt="html",
            disable_numparse=True,
        )
        said = [str(self).splitlines()[0], *self.notes]
        return table + "".join(f"<p>{html.escape(line)}</p>" for line in said)


@dataclass(frozen=True, kw_only=True, repr=False)
class MemoryLimits:
    """Memory limits, and how a feeder should use them: the part of ``pinfeed.Config`` that needs no torch.

    Users make a ``pinfeed.Config``, which is a ``MemoryLimits`` and takes a model as well.

    Args:
        cpu_memory_limit: Host memory that the feeder may take, in bytes; None for what is free,
            less ``headroom``; the processes that torchrun starts on a machine share it.
        gpu_memory_limit: Device memory that it may take for batches, in bytes; None likewise. Where
            batches live in host memory there is no such limit.
        preferred_batch_size: Rows per batch at most; the largest batch that fits is taken up to
            this. None is 65,536 rows or 64 MiB, whichever is less: larger batches take more memory
            and move no more rows per second.
        depth: Batches prefetched ahead of the loop; 0 is the synchronous loop. None is 2, or more
            where batches are small.
        headroom: Share of the free memory that is left alone where a limit is None.

    Raises:
        ArgumentError: A limit or size below 1, a negative depth, a headroom not in [0, 1).
    """

    cpu_memory_limit: int | None = None
    gpu_memory_limit: int | None = None
    preferred_batch_size: int | None = None
    depth: int | None = None
    headroom: float = 0.1

    def __post_init__(self) -> None:
        for name in ("cpu_memory_limit", "gpu_memory_limit", "preferred_batch_size"):
            value = getattr(self, name)
            if value is not None:
                note = (
                    ", or None"
                    if name == "preferred_batch_size"
                    else " (bytes: pinfeed.GiB(1), pinfeed.MiB(256)), or None"
                )
                object.__setattr__(self, name, whole_number(value, name, note=note))
        if self.depth is not None:
            object.__setattr__(self, "depth", check_depth(self.depth))
        if not hasattr(self.headroom, "__float__") or not 0 <= self.headroom < 1:
            raise ArgumentError(f"headroom={self.headroom!r}: expected a share in [0, 1)")

    @safe_repr
    def __repr__(self) -> str:
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        given = [
            f"{name}={human(value) if name.endswith('_limit') else repr(value)}"
            for name, value in values.items()
        ]
        return f"<{type(self).__name__}: {', '.join(given) or 'all by default'}>"

    def plan(self, demand: Demand, *, free_host_bytes: int, free_device_bytes: int) -> Plan:
        """The plan with the largest batch that fits, up to the preferred one or the usual bound.

        Raises:
            NotEnoughCPUMemory: Not even one row fits in every slot, on the host.
            NotEnoughGPUMemory: … on the device.
        """
        cpu = self.host_limit(free_host_bytes)
        depth = DEFAULT_DEPTH if self.depth is None else self.depth
        gpu = None if demand.unified else self._limit(self.gpu_memory_limit, free_device_bytes)

        def plan_of(batch_size: int) -> Plan:
            return Plan(
                batch_size, depth, demand.route, plan_items(demand, batch_size, depth), cpu, gpu
            )

        def excess(batch_size: int) -> bool:
            plan = plan_of(batch_size)
            return plan.host_bytes > cpu or (gpu is not None and plan.device_bytes > gpu)

        usual = max(1, min(MOST_ROWS, MOST_BYTES // max(1, sum(demand.row_nbytes))))
        largest = min(demand.n_rows, self.preferred_batch_size or usual)
        # Memory grows with the batch.
        fitting = bisect.bisect_left(range(1, largest + 1), True, key=excess)
        if fitting == 0:
            self._refuse(plan_of(1), cpu, gpu)
        plan = plan_of(fitting)
        if self.preferred_batch_size is None and fitting == usual < demand.n_rows:
            bound = f"{usual:,} rows a batch, as larger ones move no more rows per second; preferred_batch_size takes more"
            plan = dataclasses.replace(plan, notes=(bound,))
        return plan

    def for_feeder(self) -> MemoryLimits:
        """What of it is a feeder's."""
        return self

    def host_limit(self, free: int) -> int:
        """Host memory that may be taken where ``free`` bytes are free."""
        return self._limit(self.cpu_memory_limit, free)

    def _limit(self, limit: int | None, free: int) -> int:
        return int(free * (1 - self.headroom)) if limit is None else limit

    def _refuse(self, plan: Plan, cpu: int, gpu: int | None) -> None:
        on_device = gpu is not None and plan.device_bytes > gpu
        if on_device and gpu is not None:
            error: type[BudgetError] = NotEnoughGPUMemory
            kind = "device"
            need = plan.device_bytes
            limit = gpu
            name = "gpu_memory_limit"
            given = self.gpu_memory_limit
        else:
            error = NotEnoughCPUMemory
            kind = "host"
            need = plan.host_bytes
            limit = cpu
            name = "cpu_memory_limit"
            given = self.cpu_memory_limit
        uses = ", ".join(
            f"{item.count} x {human(item.nbytes)} for {item.what}"
            for item in plan.items
            if (item.place == "device") == on_device
        )
        said = f"{name} is {human(limit)} ({limit} bytes)" + (
            "" if given is not None else ", what is free less the headroom"
        )
        raise error(
            f"one row per slot needs {human(need)} ({need} bytes) of {kind} memory: {uses}; {said}; "
            f"lower depth (now {plan.depth}) or raise {name}"
        )


def plan_items(demand: Demand, batch_size: int, depth: int) -> tuple[Allocation, ...]:
    """Every buffer that a feeder has at a time, with a loop that drops its batches; none if the size of a batch is not known (0)."""
    if batch_size == 0:
        return ()

    def batch(block: int, chosen: Sequence[bool]) -> int:
        sizes = (
            batch_size * nbytes
            for nbytes, wanted in zip(demand.row_nbytes, chosen, strict=True)
            if wanted
        )
        return sum(max(1, -(-size // block)) * block for size in sizes)

    # Of a loop that writes: see Feeder.batches.
    ahead = min(depth, DEFAULT_DEPTH) if demand.batches_per_slot > 1 else depth
    everything = [True] * len(demand.row_nbytes)
    place: Place = "host" if demand.unified else "device"
    block = _PAGE if demand.unified else _DEVICE_BLOCK
    items = [
        Allocation(
            "batches", place, n_batches(depth, demand.batches_per_slot), batch(block, everything)
        )
    ]
    if any(demand.writable):
        items.append(
            Allocation(
                "write-backs until they have landed and been seen",
                place,
                n_held(ahead),
                batch(block, demand.writable),
            )
        )
    if not demand.unified and any(demand.staged):
        items.append(Allocation("staging", "pinned", depth + 1, batch(_PAGE, demand.staged)))
        written = [
            writable and staged
            for writable, staged in zip(demand.writable, demand.staged, strict=True)
        ]
        if any(written):
            items.append(Allocation("staging of a write-back", "pinned", 1, batch(_PAGE, written)))
    # Of a write-back: the rows, and the rows sorted.
    n_rows_arrays = depth + 3 + (3 * n_held(ahead) if any(demand.writable) else 0)
    items.append(Allocation("row numbers", "host", n_rows_arrays, batch_size * _ROW_NUMBER))
    if not demand.unified and not all(demand.staged):
        # For the kernels of each slot and of a write-back.
        numbers = batch_size * _ROW_NUMBER
        # By powers of two.
        items.append(
            Allocation(
                "page-locked row numbers", "pinned", depth + 2, 1 << (numbers - 1).bit_length()
            )
        )
        items.append(
            Allocation(
                "uploaded row numbers",
                "device",
                depth + 2,
                -(-numbers // _DEVICE_BLOCK) * _DEVICE_BLOCK,
            )
        )
    if not demand.unified and any(demand.writable):
        positions = 2 * batch_size * _ROW_NUMBER
        rows = max(
            nbytes
            for nbytes, writable in zip(demand.row_nbytes, demand.writable, strict=True)
            if writable
        )
        there = max(rows, min(ON_THEIR_WAY_BYTES, batch_size * rows)) + positions
        items.append(
            Allocation(
                "positions of rows that two batches share",
                "pinned",
                2,
                1 << (positions - 1).bit_length(),
            )
        )
        items.append(
            Allocation(
                "rows that two batches share",
                "device",
                1,
                -(-there // _DEVICE_BLOCK) * _DEVICE_BLOCK,
            )
        )
    items.append(Allocation("the order of the rows", "host", 1, _ORDER))
    if demand.resident_bytes:
        items.append(
            Allocation("what the stores hold beside their rows", "host", 1, demand.resident_bytes)
        )
    items += [
        window_item(window_rows, row_nbytes, (depth + 1 + demand.batches_per_slot) * batch_size)
        for window_rows, row_nbytes in demand.windows
    ]
    return tuple(items)


def window_item(window_rows: int, row_nbytes: int, n_batch_rows: int) -> Allocation:
    """What the windows of a file take: one is read ahead, and the batches under way lie on others, wherever they begin."""
    return Allocation(
        "windows",
        "host",
        2 + -(-n_batch_rows // window_rows),
        -(-window_rows * row_nbytes // _PAGE) * _PAGE,
    )


def n_batches(depth: int, batches_per_slot: int = 1) -> int:
    """Batches that there are at a time: the loop holds some, and the next one while it asks for it; ``depth`` more are prefetched."""
    return depth + 1 + batches_per_slot


def n_held(depth: int) -> int:
    """Write-backs that are held at a time: ``max(depth, 1)`` on their way, and ``depth + 1`` that a prefetched batch may not have seen."""
    return max(depth, 1) + depth + 1


def check_depth(depth: int) -> int:
    """``depth``, as an int.

    Raises:
        ArgumentError: If it is not a whole number from 0 to ``MAX_DEPTH``.
    """
    note = " (0 is the synchronous loop); each batch ahead takes memory of its own, and 2 to 32 are enough"
    return whole_number(depth, "depth", least=0, most=MAX_DEPTH, note=note)


def check_route(route: str | None) -> str | None:
    """``route``; ArgumentError unless it is one, or None."""
    if route not in (None, "direct", "staged"):
        raise ArgumentError(
            f"route={route!r}: expected 'direct', 'staged' or None for the faster one"
        )
    return route
