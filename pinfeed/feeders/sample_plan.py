"""SamplePlanner: the memory of batches of samples, and the batch size that limits can hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pinfeed.devices.device import Device
from pinfeed.feeders.base_feeder import LoopOptions
from pinfeed.feeders.row_selection import RowSelection
from pinfeed.feeders.transform_trial import linear_nbytes, run_trial
from pinfeed.memory.limits import MemoryLimits, usual_batch_size
from pinfeed.memory.plan import Allocation, Plan, Route
from pinfeed.pipeline.loop_memory import PartSize, loop_allocations, order_allocations
from pinfeed.pipeline.loop_transforms import LoopTransforms, TransformNbytes
from pinfeed.pipeline.planner import free_memory
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.sources.sample_source import Samples, SampleSource, SampleThreads
from pinfeed.rows.batches import OrderBatches
from pinfeed.rows.orders import Order, sequential

_TRIAL_SAMPLES = 4
"""Samples of the larger trial batch."""


@dataclass(frozen=True)
class SamplePlanner:
    """Plans the memory of batches from trial batches that have one sample in every place.

    Args:
        samples: The samples, at least one, and how batches are made of them.
        device: Device of the batches.
        schedule: Number of batches to prefetch.
        transforms: The transforms.
    """

    samples: Samples
    device: Device
    schedule: PrefetchSchedule
    transforms: LoopTransforms

    def plan(self, sample: Any, selection: RowSelection) -> Plan:
        """Return the plan of batches whose samples are like ``sample``.

        Args:
            sample: The sample.
            selection: Order and batch size, or the limits that decide it.

        Raises:
            BudgetError: If the limits cannot hold batches of one sample.
            Exception: If ``collate_fn`` or a transform fails; its error.
        """
        from pinfeed.tensors.sample_layout import SampleLayout
        from pinfeed.tensors.transform_calls import nbytes_of

        one, many = self._run(sample, 1), self._run(sample, _TRIAL_SAMPLES)
        per_sample = max(1, many[0] // _TRIAL_SAMPLES)
        nbytes_alive = max(per_sample, nbytes_of(sample, ())[0])
        stacks = self.samples.collate is None and SampleLayout(sample).stacks
        transform_nbytes = linear_nbytes(one, many)
        assert isinstance(selection.order, Order)
        most = max(1, selection.order.length(self.samples.n))
        config = selection.config
        limits = (None, None) if config is None else self._limits(config)
        route: Route = "direct" if self.device.unified else "staged"

        kept = order_allocations(selection.order)

        def plan_of(n: int, depth: int) -> Plan:
            n_alive = self.samples.n_alive(self._at(depth), n, stacks=stacks)
            items = self._allocations(n, depth, per_sample, transform_nbytes) + kept
            items.append(Allocation("samples that are being made", "host", n_alive, nbytes_alive))
            return Plan(n, depth, route, tuple(items), *limits)

        if config is None:
            size = min(selection.batch_size or 1, most)
        else:
            usual = usual_batch_size(lambda n: n * per_sample)
            most = min(most, config.preferred_batch_size or usual)
            size = config.largest_batch(plan_of, most, self.schedule.depth)
        note = "all samples count as many bytes as dataset[0]"
        return dataclasses.replace(plan_of(size, self.schedule.depth), notes=(note,))

    def _allocations(
        self,
        n: int,
        depth: int,
        per_sample: int,
        transform_nbytes: Callable[[int], TransformNbytes],
    ) -> list[Allocation]:
        """List all buffers of batches of ``n`` samples."""
        unified = self.device.unified
        part = PartSize(n * per_sample, 0, is_staged=not unified)
        items = loop_allocations([part], n, self._at(depth), unified=unified)
        if self.transforms:
            items += transform_nbytes(n * per_sample).allocations(depth, unified=unified)
        return items

    def _at(self, depth: int) -> PrefetchSchedule:
        return dataclasses.replace(self.schedule, depth=depth)

    def _limits(self, config: MemoryLimits) -> tuple[int, int | None]:
        """Return the limits of host memory and of GPU memory, in bytes."""
        gpu = None
        if not self.device.unified:
            gpu = config.gpu_memory_limit or config.device_limit(self.device.free_bytes())
        return free_memory((), config).memory, gpu

    def _run(self, sample: Any, n: int) -> tuple[int, TransformNbytes]:
        """Return the bytes of a batch of ``n`` samples, and those that the transforms took."""
        maker = dataclasses.replace(
            self.samples.maker, read=lambda index: sample, transform=None, read_batch=None
        )
        same = dataclasses.replace(self.samples, maker=maker, n_threads=0, skipped=None)
        threads = SampleThreads(self.device.worker, 0)
        source = SampleSource(OrderBatches(sequential(), n, n), threads, same)
        runner = LoopOptions(progress=False, timeline=False).runner(
            source, self.device, PrefetchSchedule(0), self.transforms
        )
        what = "with the first sample, for the plan"
        took, peak_nbytes = run_trial(runner, self.device, self.transforms, what)
        nbytes = runner.stats.bytes
        working = max(0, peak_nbytes - nbytes - took.device_new)
        return nbytes, took._replace(device_working=working)
