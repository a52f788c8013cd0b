"""Plan: the memory that a feeder takes, listed by use."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Literal

from pinfeed.errors import ArgumentError
from pinfeed.memory.units import human
from pinfeed.validation.safe_repr import safe_repr

Place = Literal["host", "pinned", "page cache", "device"]
Route = Literal["staged", "direct"]

_PLACE_NAMES: dict[Place, str] = {
    "host": "host",
    "pinned": "host, page-locked",
    "page cache": "the kernel's page cache",
    "device": "device",
}


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
    """

    what: str
    place: Place
    count: int
    nbytes: int

    @property
    def total(self) -> int:
        """Bytes of all buffers together."""
        return self.count * self.nbytes


@dataclass(frozen=True, repr=False)
class Plan:
    """Memory that a feeder needs, listed by use; print it to read it.

    Examples:
        >>> with pinfeed.Feeder(np.zeros((1000, 8), "float32"), batch_size=100) as feeder:
        ...     print(feeder.plan)
        batches of ...
        >>> feeder.plan.host_bytes > 0
        True
    """

    batch_size: int
    """Rows per batch; 0 if the batches differ and their sizes are not known in advance."""
    depth: int
    """Number of batches that are prefetched, and that the plan has memory for."""
    route: Route
    items: tuple[Allocation, ...]
    cpu_memory_limit: int | None = None
    gpu_memory_limit: int | None = None
    notes: tuple[str, ...] = ()
    """Sentences on the way in which the rows of each file are read, and why."""
    measures_depth: bool = False
    """Whether a loop measures if the synchronous loop is faster, and then prefetches nothing."""

    @property
    def depth_in_words(self) -> str:
        """The depth, such as ``2 ahead``, and whether a loop may choose the synchronous loop."""
        return f"{self.depth} ahead" + " (0 if measured to be faster)" * self.measures_depth

    @property
    def n_slots(self) -> int:
        """Batches that can be transferred to the device at the same time."""
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
    def page_cache_bytes(self) -> int:
        """Rows of files in the kernel's page cache, which is not memory of the process."""
        return self._sum("page cache")

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
        size = f"{self.batch_size} rows"
        if not self.batch_size:
            size = "as many rows as each turns out to have, which is not counted here"
        host = human(self.host_bytes) + _of_limit(self.cpu_memory_limit)
        lines = [
            f"batches of {size}, {self.depth_in_words}, {self.route} route",
            f"host: {host}, of it page-locked: {human(self.pinned_bytes)}",
        ]
        if self.page_cache_bytes:
            text = "that the kernel may drop, and that all processes share"
            lines.append(f"page cache: {human(self.page_cache_bytes)} {text}")
        if self.device_bytes:
            lines.append(f"device: {human(self.device_bytes)}{_of_limit(self.gpu_memory_limit)}")
        lines += [
            f"  {item.place}: {item.count} x {human(item.nbytes)} {item.what}"
            for item in self.items
        ]
        return "\n".join([*lines, *self.notes])

    def _repr_html_(self) -> str:
        """Return what a notebook shows: a table of every use of memory, and the totals."""
        from tabulate import tabulate

        rows = [
            (
                item.what,
                _PLACE_NAMES[item.place],
                f"{item.count} × {human(item.nbytes)}",
                human(item.total),
            )
            for item in self.items
        ]
        host = human(self.host_bytes) + _of_limit(self.cpu_memory_limit)
        rows.append(("in all", "host", "", host))
        if self.page_cache_bytes:
            rows.append(("in all", _PLACE_NAMES["page cache"], "", human(self.page_cache_bytes)))
        if self.device_bytes:
            device = human(self.device_bytes) + _of_limit(self.gpu_memory_limit)
            rows.append(("in all", "device", "", device))
        table = tabulate(
            rows,
            headers=("use", "place", "count × size", "total"),
            tablefmt="html",
            disable_numparse=True,
        )
        lines = [str(self).splitlines()[0], *self.notes]
        return table + "".join(f"<p>{html.escape(line)}</p>" for line in lines)


def _of_limit(limit: int | None) -> str:
    return "" if limit is None else f" of {human(limit)}"
