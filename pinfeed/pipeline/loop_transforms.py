"""LoopTransforms: the transforms of a loop."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pinfeed.devices.device import Tensor
from pinfeed.memory.limits import n_batches
from pinfeed.memory.plan import Allocation, Place, Plan
from pinfeed.pipeline.host_transfer import HostTransfer
from pinfeed.pipeline.sources.source import HostBatch, RowGroup, host_batch_of
from pinfeed.pipeline.sources.user_calls import BatchTransform, TransformCall
from pinfeed.profiling.counters import Counters
from pinfeed.profiling.spans import Lane


class TransformNbytes(NamedTuple):
    """Bytes that the transforms of a batch take."""

    host_returned: int = 0
    """Results of ``host_transform``, which are then moved to the device."""
    host_new: int = 0
    """New host memory for these results; the memory of the rows does not count."""
    device_new: int = 0
    """New memory for results of ``device_transform``; that of its batch does not count."""
    device_working: int = 0
    """Additional memory that ``device_transform`` needs while it runs."""

    def allocations(self, depth: int, *, unified: bool, when: str = "") -> list[Allocation]:
        """List the memory of the results of the transforms.

        Args:
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
            Allocation(f"results of host_transform{when}", "host", n_on_host, self.host_new),
            Allocation(f"results of device_transform{when}", place, n_on_device, self.device_new),
            Allocation("work of device_transform", place, 1, self.device_working),
        ]
        if not unified:
            found += [
                Allocation(f"batches{when}", "device", n, self.host_returned),
                Allocation(f"staging{when}", "pinned", depth + 1, self.host_returned),
            ]
        return [item for item in found if item.total]


@dataclass(frozen=True)
class LoopTransforms:
    """The transforms of a loop."""

    host: BatchTransform | None = None
    """``host_transform``; None if the user gave none."""
    device: BatchTransform | None = None
    """``device_transform``; None if the user gave none."""
    gather: HostTransfer | None = None
    """Reads the rows for ``host``; None if the source calls ``host``, and not the loop."""

    def __bool__(self) -> bool:
        return self.host is not None or self.device is not None

    @property
    def take_generators(self) -> bool:
        """Whether a transform takes a generator."""
        return bool(self.fingerprint)

    @property
    def fingerprint(self) -> dict[str, int]:
        """Seed of the generators, if a transform takes one; a resumed loop needs the same seed."""
        for function in (self.host, self.device):
            if function is not None and function.takes_generator:
                # Saved states have this key, so it keeps its words.
                return {"seed of functions on batches": function.seed.number}
        return {}

    @property
    def measured_nbytes(self) -> TransformNbytes:
        """Largest bytes so far."""
        host = (0, 0) if self.host is None else (self.host.returned_nbytes, self.host.new_nbytes)
        return TransformNbytes(*host, 0 if self.device is None else self.device.new_nbytes)

    def with_measured(self, plan: Plan, *, unified: bool) -> Plan:
        """Return a plan with the memory of the results of the transforms so far.

        Args:
            plan: Plan without this memory.
            unified: Whether the batches live in host memory.
        """
        if not self:
            return plan
        nbytes = self.measured_nbytes
        if self.gather is None:
            # A loader's plan excludes its batches, and therefore those that ``host`` returns.
            nbytes = nbytes._replace(host_returned=0)
        items = nbytes.allocations(plan.depth, unified=unified, when=", as measured so far")
        if not items:
            note = "the memory of transform results is counted after the first batch"
            return dataclasses.replace(plan, notes=(*plan.notes, note))
        return dataclasses.replace(plan, items=(*plan.items, *items))

    def on_device(self, tensors: Sequence[Tensor], epoch: int, number: int) -> Callable[[Any], Any]:
        """Return a function that calls ``device`` on a batch in the user's structure.

        Args:
            tensors: Tensors of the batch.
            epoch: Number of the epoch.
            number: Number of the batch.
        """
        from pinfeed.tensors.transform_calls import memory_blocks_of

        assert self.device is not None
        given = memory_blocks_of(tensors)
        return functools.partial(self.device, epoch=epoch, number=number, given=given)

    def on_rows(self, rows: Any, batch: HostBatch, epoch: int, number: int) -> HostBatch:
        """Return the batch that ``host`` makes from the rows of a batch.

        Args:
            rows: The rows on the host, in the structure of their source.
            batch: The batch of these rows.
            epoch: Number of the epoch.
            number: Number of the batch.
        """
        from pinfeed.tensors.transform_calls import memory_blocks_of

        assert self.host is not None
        load = host_batch_of(self.host(rows, epoch, number, memory_blocks_of(rows)))
        load.batches = batch.batches
        # The loop receives the row indices, but cannot write the rows back.
        load.groups = [RowGroup(group.rows, 0, ()) for group in batch.groups]
        return load


NO_TRANSFORMS = LoopTransforms()
"""Value for a loop without transforms."""


def count_calls(counters: Counters, lane: Lane | None, calls: Sequence[TransformCall]) -> float:
    """Return the seconds of calls of a transform, and record them in a timeline.

    Args:
        counters: Counters of the loop.
        lane: Lane of the timeline; None to record nothing.
        calls: The calls.
    """
    if counters.timeline is not None and lane is not None:
        for call in calls:
            counters.timeline.add(lane, *call)
    return sum(call.end_s - call.start_s for call in calls)
