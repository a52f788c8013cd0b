"""LoopTransforms: the transforms of a loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pinfeed.devices.base import Tensor
from pinfeed.memory.plan import Plan
from pinfeed.memory.transform_memory import TransformMemory, constant
from pinfeed.pipeline.host_transfer import HostTransfer
from pinfeed.pipeline.sources.base import HostBatch, RowGroup
from pinfeed.pipeline.sources.dataloader import load_of
from pinfeed.pipeline.sources.transforms import BatchTransform


@dataclass(frozen=True)
class LoopTransforms:
    """The transforms of a loop."""

    host: BatchTransform | None = None
    """``host_transform``; None if the user gave none."""
    device: BatchTransform | None = None
    """``device_transform``; None if the user gave none."""
    gather: HostTransfer | None = None
    """Reads the rows for ``host``; None if the source calls ``host``, and not the loop."""
    epoch: int = 0
    """Number of the running epoch."""

    def __bool__(self) -> bool:
        return self.host is not None or self.device is not None

    def modes(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which transforms run as in a thread of their own."""
        from pinfeed.tensors.torch_modes import modes_of_a_new_thread

        return modes_of_a_new_thread()

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
    def are_called_in_loop(self) -> bool:
        """Whether the loop calls a transform; otherwise the source calls ``host``, if any."""
        return self.device is not None or self.gather is not None

    @property
    def measured_nbytes(self) -> tuple[int, int, int]:
        """Largest bytes so far: result of ``host``, its new memory, new memory of ``device``."""
        host = (0, 0) if self.host is None else (self.host.returned_nbytes, self.host.new_nbytes)
        return *host, 0 if self.device is None else self.device.new_nbytes

    def with_measured(self, plan: Plan, *, unified: bool) -> Plan:
        """Return a plan with the memory of the results of the transforms so far.

        Args:
            plan: Plan without this memory.
            unified: Whether the batches live in host memory.
        """
        if not self:
            return plan
        host_returned, host_new, device_new = self.measured_nbytes
        memory = TransformMemory(
            has_host=self.gather is not None,
            # A loader's plan excludes its batches, and therefore those that ``host`` returns.
            host_returned=constant(host_returned if self.gather is not None else 0),
            host_new=constant(host_new),
            device_new=constant(device_new),
        )
        items = memory.allocations(0, plan.depth, unified=unified, when=", as measured so far")
        if not items:
            note = "the memory of transform results is counted after the first batch"
            return dataclasses.replace(plan, notes=(*plan.notes, note))
        return dataclasses.replace(plan, items=(*plan.items, *items))

    def on_device(self, tensors: Sequence[Tensor], number: int) -> Callable[[Any], Any]:
        """Return a function that calls ``device`` on a batch in the user's structure.

        Args:
            tensors: Tensors of the batch.
            number: Number of the batch.
        """
        from pinfeed.tensors.tensors_in import memory_of

        assert self.device is not None
        given = memory_of(tensors)
        return functools.partial(self.device, epoch=self.epoch, number=number, given=given)

    def on_rows(self, rows: Any, batch: HostBatch, number: int) -> HostBatch:
        """Return the batch that ``host`` makes from the rows of a batch.

        Args:
            rows: The rows on the host, in the structure of their source.
            batch: The batch of these rows.
            number: Number of the batch.
        """
        from pinfeed.tensors.tensors_in import memory_of

        assert self.host is not None
        load = load_of(self.host(rows, self.epoch, number, memory_of(rows)))
        load.batches = batch.batches
        # The loop receives the row indices, but cannot write the rows back.
        load.groups = [RowGroup(group.rows, 0, ()) for group in batch.groups]
        return load


NO_TRANSFORMS = LoopTransforms()
"""Value for a loop without transforms."""
