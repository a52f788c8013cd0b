"""Plan: the memory that a feeder needs, listed by use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pinfeed.errors import ArgumentError
from pinfeed.memory.units import human
from pinfeed.validation.messages import wrapped

Place = Literal["host", "pinned", "page cache", "device"]
Route = Literal["staged", "direct"]

# A use of memory has an indent of two spaces, so the rest of a long line has four.
_REST = "    "


def check_route(route: str | None) -> str | None:
    """Return ``route``.

    Raises:
        ArgumentError: If it is neither the name of a route nor None.
    """
    if route not in (None, "direct", "staged"):
        raise ArgumentError(
            f"route={route!r}: expected 'direct', 'staged' or None for the faster one"
        )
    return route


@dataclass(frozen=True)
class Allocation:
    """One use of memory: ``count`` buffers of ``nbytes`` each.

    Examples:
        >>> with pinfeed.Feeder(np.zeros((1000, 8), "float32"), batch_size=100) as feeder:
        ...     bytes_by_use = {item.what: item.total for item in feeder.plan.items}

    Attributes:
        what: Use of the memory, such as ``"batches"``.
        place: ``"host"``, ``"pinned"`` (page-locked host memory), ``"page cache"`` (mapped
            files in the OS page cache) or ``"device"`` (GPU memory).
        count: Number of buffers.
        nbytes: Bytes of each buffer.
    """

    what: str
    place: Place
    count: int
    nbytes: int

    @property
    def total(self) -> int:
        """Bytes of all buffers together."""
        return self.count * self.nbytes


def joined(items: Iterable[Allocation]) -> list[Allocation]:
    """Join equal buffers, such as those of many columns, by adding their counts."""
    counts: Counter[tuple[str, Place, int]] = Counter()
    for item in items:
        counts[item.what, item.place, item.nbytes] += item.count
    return [
        Allocation(what, place, count, nbytes) for (what, place, nbytes), count in counts.items()
    ]


@dataclass(frozen=True, repr=False)
class Plan:
    """Memory that a feeder needs, listed by use; print it to read it.

    Examples:
        >>> with pinfeed.Feeder(np.zeros((1000, 8), "float32"), batch_size=100) as feeder:
        ...     print(feeder.plan)
        batches of ...
        >>> feeder.plan.host_bytes > 0
        True

    Attributes:
        batch_size: Rows per batch; 0 if the batches differ and their sizes are not known in
            advance.
        depth: Number of batches that are prefetched, and that the plan has memory for.
        route: ``"direct"`` if GPU kernels read rows straight from pinned host memory, or if the CPU
            copies rows straight into each batch; ``"staged"`` if rows pass through other buffers.
        items: Every use of memory.
        cpu_memory_limit: Limit of host memory, in bytes; None if the plan has no limit.
        gpu_memory_limit: Limit of GPU memory, in bytes; None without a limit, and for batches on
            the CPU.
        notes: Sentences that say how the rows of each file are read, and why; and settings that
            have no effect. More than four files that are read alike share a sentence.
        n_transform_threads: Number of threads that call ``host_transform``, each for another batch.
            ``depth`` includes the batches in these threads, except for one.
    """

    batch_size: int
    depth: int
    route: Route
    items: tuple[Allocation, ...]
    cpu_memory_limit: int | None = None
    gpu_memory_limit: int | None = None
    notes: tuple[str, ...] = ()
    n_transform_threads: int = 1

    @property
    def n_slots(self) -> int:
        """Batches that can be transferred to the device at the same time."""
        return self.depth + 1

    @property
    def host_bytes(self) -> int:
        """Total host memory, page-locked or not."""
        return self._sum("host") + self.pinned_bytes

    @property
    def pinned_bytes(self) -> int:
        """Page-locked (pinned) part of the host memory."""
        return self._sum("pinned")

    @property
    def page_cache_bytes(self) -> int:
        """Mapped files in the OS page cache, which is not memory of the process.

        Files that are read through the page cache without a map are not counted, because the kernel
        keeps their pages only in memory that is free.
        """
        return self._sum("page cache")

    @property
    def device_bytes(self) -> int:
        """Memory of the GPU; 0 if batches are in host memory."""
        return self._sum("device")

    def _sum(self, place: Place) -> int:
        return sum(item.total for item in self.items if item.place == place)

    def __repr__(self) -> str:
        host = f"host memory: {_with_limit(self.host_bytes, self.cpu_memory_limit)}"
        if self.pinned_bytes:
            host += f", {human(self.pinned_bytes)} of it page-locked (pinned)"
        lines = [self._batches_in_words, host]
        if self.page_cache_bytes:
            text = "of mapped files, which the kernel may drop and all processes share"
            lines.append(f"OS page cache: {human(self.page_cache_bytes)} {text}")
        if self.device_bytes:
            lines.append(f"GPU memory: {_with_limit(self.device_bytes, self.gpu_memory_limit)}")
        lines += [
            f"  {item.place}: {item.count} x {human(item.nbytes)} for {item.what}"
            for item in joined(self.items)
        ]
        return "\n".join(wrapped(line, rest=_REST) for line in [*lines, *self.notes])

    @property
    def _batches_in_words(self) -> str:
        """The size of the batches, the depth and the route, in one line."""
        size = f"up to {self.batch_size} rows"
        if not self.batch_size:
            size = "unknown size, whose memory is not counted"
        head = [f"batches of {size}", f"depth={self.depth}"]
        if self.n_transform_threads > 1:
            head.append(f"host_transform in {self.n_transform_threads} threads")
        if self.route == "staged" or self.device_bytes:
            head.append(f"{self.route} route")
        elif self.batch_size:
            head.append("rows are copied straight into each batch")
        return ", ".join(head)


def _with_limit(nbytes: int, limit: int | None) -> str:
    return human(nbytes) if limit is None else f"{human(nbytes)} (limit {human(limit)})"
