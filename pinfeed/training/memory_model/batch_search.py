"""BatchSearch: finds the largest batch whose training step and feeder fit the memory limits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pinfeed.errors import EstimateError
from pinfeed.memory import limits
from pinfeed.memory.plan import Allocation, Place, Plan, Route
from pinfeed.pipeline.loop_memory import PartSize, loop_allocations
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.training.memory_model.estimate import MOST_SAMPLES, StepEstimator
from pinfeed.training.memory_model.real_steps import measure_steps
from pinfeed.training.memory_model.report import CACHES, Budget, largest_that_fits, refusal

_INEXACT_MARGIN = 0.06
"""Share of the step reserved for temporary memory that the estimate misses."""
_HEAP_MARGIN = 0.08
"""Share of the step reserved for freed memory that malloc keeps, with ``enforce(malloc=True)``."""
_MAX_PROBES = 8
_CLOSE_ENOUGH = 1.03
"""The search ends if the next batch is larger by at most this factor than one that ran."""


@dataclass(frozen=True)
class BatchSearch:
    """Search for the largest batch that fits, by estimates and by probes.

    Attributes:
        estimator: Estimates the training step.
        cpu_limit: Limit of host memory, in bytes.
        gpu_limit: Limit of device memory, in bytes; None if training is on the CPU.
        one_read_count: Samples per read; the batch size is a multiple of it.
        preferred_batch_size: Upper bound of the batch size; None for no preference.
        total_sample_count: Reads per epoch; None if unknown.
        depth: Number of prefetched batches.
        device_cache: Bytes of the caches of tables.
    """

    estimator: StepEstimator
    cpu_limit: int
    gpu_limit: int | None
    one_read_count: int
    preferred_batch_size: int | None
    total_sample_count: int | None
    depth: int
    device_cache: int

    def budget(self, seen: float | None) -> Budget:
        """Return the budget of the largest batch that fits.

        Args:
            seen: Measured memory of a step, relative to the estimate; None if it was not measured.

        Raises:
            BudgetError: If not even the smallest batch fits.
        """
        found = self._largest(seen)
        if found is None:
            raise refusal(self.at(self._least, seen), self._least)
        return found

    def probe(
        self, first: int, device: torch.device, make_batch: Callable[[int], Any] | None
    ) -> Budget:
        """Return the budget of the largest batch whose steps ran within the limits.

        Args:
            first: Samples of the batch that is tried first.
            device: Device of the steps.
            make_batch: Makes inputs and targets, given a number of samples; None for random
                numbers.

        Raises:
            BudgetError: If not even the samples of one read fit.
        """
        one_read = self.one_read_count
        ran: Budget | None = None
        tried = first
        failed = None
        for _ in range(_MAX_PROBES):
            seen = self._measure(tried, device, make_batch)
            budget = self.at(tried, seen)
            if seen is not None and budget.fits:
                ran = budget
            else:
                failed = tried
            larger = None if seen is None else self._largest(seen)
            tried = tried // 2 if larger is None else larger.batch_size
            if failed is not None:
                tried = min(tried, failed - one_read)
            tried -= tried % one_read
            if ran is not None and tried <= _CLOSE_ENOUGH * ran.batch_size:
                break
            if tried < one_read:
                raise refusal(self.at(one_read, seen), one_read)
        if ran is None:
            raise refusal(self.at(tried, seen), tried)
        return ran

    def at(self, batch_size: int, seen: float | None) -> Budget:
        """Return the budget of a batch of ``batch_size`` samples, even if it does not fit."""
        is_on_gpu = self.gpu_limit is not None
        step = self.estimator.at(batch_size)
        specs = (self.estimator.inputs, self.estimator.targets)
        parts = [
            PartSize(batch_size * nbytes, is_staged=is_on_gpu)
            for spec in specs
            if spec is not None
            for nbytes in spec.nbytes
        ]
        schedule = PrefetchSchedule(self.depth)
        items = loop_allocations(parts, batch_size, schedule, unified=not is_on_gpu)
        if self.device_cache:
            place: Place = "device" if is_on_gpu else "host"
            items.append(Allocation(CACHES, place, 1, self.device_cache))
        route: Route = "staged" if is_on_gpu else "direct"
        feeder = Plan(batch_size, self.depth, route, tuple(items))
        if seen is None:
            share = _INEXACT_MARGIN if step.confidence != "exact" else 0
            share += 0 if is_on_gpu else _HEAP_MARGIN
            margin = share * step.allocated_bytes
        else:
            margin = (seen - 1) * step.reserved_bytes
        return Budget(batch_size, step, feeder, int(margin), seen, self.cpu_limit, self.gpu_limit)

    def _largest(self, seen: float | None) -> Budget | None:
        """Return the budget of the largest batch that fits; None if there is none."""
        one_read = self.one_read_count

        def need(n_reads: int) -> float:
            budget = self.at(max(n_reads * one_read, self._least), seen)
            gpu_share = 0.0
            if self.gpu_limit is not None:
                gpu_share = budget.gpu_bytes / self.gpu_limit
            return max(budget.cpu_bytes / self.cpu_limit, gpu_share)

        preferred = None
        if self.preferred_batch_size is not None:
            preferred = max(1, self.preferred_batch_size // one_read)
        given = (preferred, self.total_sample_count)
        most = [min(one, MOST_SAMPLES // one_read) for one in given if one is not None]
        found = largest_that_fits(need, 1.0, min(most, default=None))
        if preferred is None:
            # Without this bound, a small model on a large machine would get a batch that is too
            # large for training.
            found = min(found, max(1, limits.MOST_ROWS // one_read))
        return self.at(found * one_read, seen) if found else None

    @functools.cached_property
    def _least(self) -> int:
        """Smallest batch size to try: 2 if the model refuses one sample (batch normalization)."""
        may_be_two = self.preferred_batch_size != 1 and self.total_sample_count != 1
        if self.one_read_count == 1 and may_be_two:
            try:
                self.estimator.at(1)
            except EstimateError:
                return 2
        return self.one_read_count

    def _measure(
        self, n: int, device: torch.device, make_batch: Callable[[int], Any] | None
    ) -> float | None:
        """Return the measured memory of a step relative to the estimate; None if it did not fit."""
        nbytes = measure_steps(self.estimator, n, device, make_batch)
        if nbytes is None:
            return None
        seen = nbytes / self.estimator.at(n).reserved_bytes
        # On the CPU, a process grows by less than the memory of a step if its heap has room.
        return max(1.0, seen) if device.type == "cpu" else seen
