"""BatchSearch: finds the largest batch whose training step and feeder fit the memory limits."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pinfeed.errors import EstimateError, NotEnoughGPUMemory, logger
from pinfeed.memory.limits import DEFAULT_DEPTH, MOST_ROWS
from pinfeed.memory.plan import Allocation, Place, Plan, Route
from pinfeed.memory.units import GiB, human
from pinfeed.pipeline.loop_memory import PartSize, loop_allocations
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.training.memory_model.estimate import MOST_SAMPLES, StepEstimator
from pinfeed.training.memory_model.gpu_probe import GPUProbe
from pinfeed.training.memory_model.report import (
    CACHES,
    Budget,
    StepMemory,
    counted,
    largest_that_fits,
    refusal,
)

if TYPE_CHECKING:
    from pinfeed.training.memory_model.config import Config


_HEAP_SHARE = 0.08
"""Freed memory that malloc keeps on the CPU, relative to the step, if ``enforce`` is set."""


@dataclass(frozen=True)
class BatchSearch:
    """Search for the largest batch that fits, by estimates or by real steps on a GPU.

    Attributes:
        estimator: Training step, whose memory it estimates.
        config: Bounds of the batch size, the depth and the caches of tables.
        cpu_limit: Limit of host memory, in bytes.
        gpu_limit: Limit of device memory, in bytes; None on the CPU, and for the free memory of a
            GPU that is measured.
    """

    estimator: StepEstimator
    config: Config
    cpu_limit: int
    gpu_limit: int | None

    def estimated(self) -> Budget:
        """Return the budget of the largest batch that fits by estimates.

        Raises:
            BudgetError: If not even the smallest batch fits.
        """

        def share(n_reads: int) -> float:
            budget = self.at(max(n_reads * one_read, self._least))
            gpu_share = budget.gpu_bytes / (self.gpu_limit or math.inf)
            return max(budget.cpu_bytes / self.cpu_limit, gpu_share)

        one_read = self.config.one_read_count
        n_reads = largest_that_fits(share, 1.0, self._most_reads)
        if not n_reads:
            raise refusal(self.at(self._least), self._least)
        return self.at(n_reads * one_read)

    def measured(self, device: torch.device) -> Budget:
        """Return the budget of the largest batch whose steps ran on the GPU within the limits.

        Args:
            device: The GPU, with its index.

        Raises:
            BudgetError: If not even the samples of one read fit.
        """
        begin = time.perf_counter()
        one_read = self.config.one_read_count
        enforce = self.config.enforce
        headroom = self.config.headroom
        probe = GPUProbe(self.estimator, device, self.gpu_limit, headroom, self._ahead_bytes)
        n_reads = largest_that_fits(
            lambda n: self._feeder(n * one_read).host_bytes, self.cpu_limit, self._most_reads
        )
        if not n_reads:
            step = StepMemory(one_read, {"batch": 0}, {}, (0, 0), ())
            raise refusal(self._budget(step, 0, probe.limit), one_read)
        found = probe.find(one_read, n_reads * one_read, enforce=enforce)
        if found is None:
            raise NotEnoughGPUMemory(
                f"a step of {counted(one_read, 'sample')} ran out of memory; gpu_memory_limit is "
                f"{human(probe.limit)} ({probe.limit} bytes), of which CUDA, libraries and other "
                f"tensors take {human(probe.other_bytes)}; raise gpu_memory_limit, or lower depth "
                f"(now {self._depth}), or train in chunks or with checkpoints (BigBatch)"
            )
        budget = self._budget(found.step, found.other_bytes, probe.limit)
        note = (
            f"batch_size={budget.batch_size}: {budget.gpu_bytes / GiB(1):.2f} of "
            f"{probe.limit / GiB(1):.2f} GiB measured in {counted(probe.n_sizes, 'size')} "
            f"({time.perf_counter() - begin:.1f} s); the limit is {'' if enforce else 'not '}set"
        )
        logger.info("%s", note)
        return dataclasses.replace(budget, step=dataclasses.replace(found.step, notes=(note,)))

    def at(self, batch_size: int) -> Budget:
        """Return the estimated budget of ``batch_size`` samples, even if it does not fit."""
        step = self.estimator.at(batch_size)
        other = int(_HEAP_SHARE * step.nbytes) if self.estimator.device == "cpu" else 0
        return self._budget(step, other, self.gpu_limit)

    def _budget(self, step: StepMemory, other_bytes: int, gpu_limit: int | None) -> Budget:
        feeder = self._feeder(step.batch_size)
        return Budget(step.batch_size, step, feeder, other_bytes, self.cpu_limit, gpu_limit)

    def _feeder(self, batch_size: int) -> Plan:
        is_on_gpu = self.estimator.device == "cuda"
        sizes = [batch_size * nbytes for nbytes in self.estimator.sample_nbytes]
        parts = [PartSize(nbytes, is_staged=is_on_gpu) for nbytes in sizes]
        schedule = PrefetchSchedule(self._depth)
        items = loop_allocations(parts, batch_size, schedule, unified=not is_on_gpu)
        if self.config.device_cache:
            place: Place = "device" if is_on_gpu else "host"
            items.append(Allocation(CACHES, place, 1, self.config.device_cache))
        route: Route = "staged" if is_on_gpu else "direct"
        return Plan(batch_size, self._depth, route, tuple(items))

    def _ahead_bytes(self, batch_size: int) -> int:
        """Return the bytes of the feeder on the device, besides the batch of the step."""
        batch_nbytes = batch_size * sum(self.estimator.sample_nbytes)
        return self._feeder(batch_size).device_bytes - batch_nbytes

    @property
    def _depth(self) -> int:
        return DEFAULT_DEPTH if self.config.depth is None else self.config.depth

    @property
    def _most_reads(self) -> int:
        """Most reads of a batch.

        Without a preferred size, a small model on a large machine would get a batch that is too
        large for training.
        """
        one_read = self.config.one_read_count
        preferred = self.config.preferred_batch_size or MOST_ROWS
        most = min(MOST_SAMPLES // one_read, max(1, preferred // one_read))
        n_reads = self.config.total_sample_count
        return most if n_reads is None else min(most, n_reads)

    @functools.cached_property
    def _least(self) -> int:
        """Smallest batch size to try: 2 if the model refuses one sample (batch normalization)."""
        config = self.config
        may_be_two = config.preferred_batch_size != 1 and config.total_sample_count != 1
        if config.one_read_count == 1 and may_be_two:
            try:
                self.estimator.at(1)
            except EstimateError:
                return 2
        return config.one_read_count
