"""TransformMemory: the memory that transforms need, as a part of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pinfeed.memory.depth import n_batches
from pinfeed.memory.plan import Allocation, Place

Nbytes = Callable[[int], int]
"""Bytes that a batch needs, given the bytes of its rows."""


def constant(nbytes: int) -> Nbytes:
    """Return a function that returns the same bytes for every batch."""
    return lambda rows_nbytes: nbytes


def linear(small: tuple[int, int], large: tuple[int, int]) -> Nbytes:
    """Return the linear function through two measurements, which never decreases.

    Args:
        small: Bytes of the rows of a batch, and the bytes measured for it.
        large: The same for a batch of as many rows, or more.
    """
    x, y = small
    more_x, more_y = large
    if x == more_x:
        # One measurement cannot show memory that does not depend on the batch.
        x, y = 0, 0
    per_byte = max(0.0, (more_y - y) / max(1, more_x - x))
    fixed = max(0.0, more_y - per_byte * more_x)
    return lambda rows_nbytes: round(fixed + per_byte * rows_nbytes)


_NOTHING = constant(0)


@dataclass(frozen=True)
class TransformMemory:
    """Memory that the transforms of a loop need."""

    has_host: bool
    """Whether rows are read for ``host_transform``, whose results are then moved to the device."""
    host_returned: Nbytes = _NOTHING
    """Bytes of the results of ``host_transform``."""
    host_new: Nbytes = _NOTHING
    """Bytes of new host memory for these results; the memory of the rows does not count."""
    device_new: Nbytes = _NOTHING
    """Bytes of new memory for results of ``device_transform``; that of its batch does not count."""
    device_working: Nbytes = _NOTHING
    """Additional GPU memory that ``device_transform`` needs while it runs, in bytes."""

    def allocations(
        self, rows_nbytes: int, depth: int, *, unified: bool, when: str = ""
    ) -> list[Allocation]:
        """List the memory of the results of the transforms.

        Args:
            rows_nbytes: Bytes of the rows of a batch.
            depth: Number of batches that are prefetched.
            unified: Whether the batches live in host memory.
            when: Words that say when the memory was measured; empty if it is predicted.
        """
        n = n_batches(depth)
        place: Place = "host" if unified else "device"
        # A batch on the host is kept until the loop receives its copy.
        n_on_host = n if unified else depth + 1
        # The memory of a result on a GPU is free when the training step has done its work, and
        # the copies of a batch wait for the step of the batch that had its slot before.
        n_on_device = n if unified else 2 * depth + 2
        found = [
            Allocation(
                f"results of host_transform{when}", "host", n_on_host, self.host_new(rows_nbytes)
            ),
            Allocation(
                f"results of device_transform{when}",
                place,
                n_on_device,
                self.device_new(rows_nbytes),
            ),
            Allocation("work of device_transform", place, 1, self.device_working(rows_nbytes)),
        ]
        if not unified:
            moved = self.host_returned(rows_nbytes)
            found.append(Allocation(f"batches{when}", "device", n, moved))
            found.append(Allocation(f"staging{when}", "pinned", depth + 1, moved))
        return [one for one in found if one.nbytes]
