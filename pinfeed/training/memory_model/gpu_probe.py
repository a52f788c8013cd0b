"""GPUProbe: finds the largest batch whose real steps run on the GPU under a limit of its memory.

torch's allocator enforces the limit. Its cap is the limit less what the process holds outside the
allocator: CUDA's context, handles of libraries, CuPy's pool. Steps of two batch sizes run under the
cap, and lines through their peaks lead to the largest size that should fit. The forward pass, the
backward pass and the optimizer have a line each, because one line through the largest of their
peaks would be wrong. A size counts after its own steps have run, without an error and without
emptying the allocator's cache. Otherwise, the next size is 10% smaller.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from pinfeed.errors import described, logger
from pinfeed.training.memory_model.real_steps import (
    StepCopy,
    is_out_of_memory,
    isolated,
    release_cached_memory,
)
from pinfeed.training.memory_model.report import StepMemory, count_parameters
from pinfeed.training.memory_model.training_step import TrainingStep, bytes_on_device, state_tensors

_MOST_SIZES = 5
_FIRST_SAMPLES = 16
_N_PHASES = 3
"""Phases of a step: forward pass, backward pass, optimizer."""
_CLOSE = 1.05
"""The search ends if the next batch is larger by at most this factor than one that ran."""
_CAREFUL = 0.7
"""Share of the way to a size that only the line of the forward pass predicts."""
_MOST_OUTSIDE_BYTES = 1 << 30
"""Most bytes that count as CUDA's context and libraries.

Memory of other processes cannot be told apart from these, so it counts up to this size.
"""
_LOCK = threading.Lock()
"""Held during a search, because the cap and the peaks belong to the process."""


@dataclass(frozen=True)
class Measured:
    """Memory of steps that ran.

    Attributes:
        step: Memory of a step.
        other_bytes: CUDA's context, libraries, and other tensors of the process, in bytes.
        peaks: Bytes of all tensors after the forward pass, and the most bytes in both passes and in
            the optimizer step.
        sample_bytes: Bytes that the forward pass allocates and keeps for a sample, at most.
        reserved_bytes: Bytes that torch's allocator had taken from the device.
    """

    step: StepMemory
    other_bytes: int
    peaks: tuple[int, int, int]
    sample_bytes: float
    reserved_bytes: int


class GPUProbe:
    """Search for the largest batch that fits on a GPU.

    Args:
        step: The training step.
        device: The GPU, with its index.
        limit: Device memory of the process, in bytes; None for what is free.
        headroom: Share of the free memory that stays unused if ``limit`` is None.
        ahead_bytes: Function that returns the bytes of the feeder on the device besides the batch
            of the step, given the batch size.

    Attributes:
        limit: Device memory of the process, in bytes.
        n_sizes: Number of batch sizes that were tried.
    """

    def __init__(
        self,
        step: TrainingStep,
        device: torch.device,
        limit: int | None,
        headroom: float,
        ahead_bytes: Callable[[int], int],
    ) -> None:
        self._step = step
        self._device = device
        self._ahead_bytes = ahead_bytes
        self.n_sizes = 0
        release_cached_memory()
        if limit is None:
            free, total = torch.cuda.mem_get_info(device)
            mine = torch.cuda.memory_reserved(device) + int((1 - headroom) * free)
            # A cap of the program, or of another Config, still holds.
            cap = int(total * torch.cuda.get_per_process_memory_fraction(device))
            limit = self.outside_bytes() + min(mine, cap)
        self.limit = limit
        self._original_bytes = bytes_on_device(
            step.model, device, loss=step.loss, optimizer=step.optimizer
        )
        self._held_bytes = torch.cuda.memory_allocated(device) - self._original_bytes

    @property
    def other_bytes(self) -> int:
        """Device memory besides step and feeder: CUDA, libraries and other tensors, in bytes."""
        return self._held_bytes + self.outside_bytes()

    def outside_bytes(self) -> int:
        """Return the device memory of this process outside torch's allocator, in bytes."""
        free, total = torch.cuda.mem_get_info(self._device)
        outside = total - free - torch.cuda.memory_reserved(self._device)
        pool = 0
        if (cupy := sys.modules.get("cupy")) is not None:
            with cupy.cuda.Device(self._device.index):
                pool = cupy.get_default_memory_pool().total_bytes()
        return max(0, min(outside, _MOST_OUTSIDE_BYTES + pool))

    def find(self, least: int, most: int, *, enforce: bool) -> Measured | None:
        """Return the memory of the largest batch that fits; None if not even the smallest does.

        Parameters, gradients, buffers and optimizers of the program stay as they are, and so do the
        random generators.

        Args:
            least: Fewest samples, of which batch sizes are multiples.
            most: Most samples.
            enforce: Whether the cap stays after a search that finds a batch.
        """
        with _LOCK:
            fraction = torch.cuda.get_per_process_memory_fraction(self._device)
            try:
                with isolated():
                    found = self._search(least, most)
                # The last copy is free now, and its memory returns to the device.
                release_cached_memory()
                if found is not None and enforce:
                    fraction = self._fraction(self._cap() - self._original_bytes)
            finally:
                torch.cuda.set_per_process_memory_fraction(fraction, self._device)
        return found

    def _search(self, least: int, most: int) -> Measured | None:
        """Run steps of batch sizes that grow, or shrink after a failure; return the largest."""
        ran: list[Measured] = []
        failed: int | None = None
        n = min(most, _FIRST_SAMPLES)
        while self.n_sizes < _MOST_SIZES:
            n = max(least, n - n % least)
            if n == failed or (ran and n <= _CLOSE * ran[-1].step.batch_size):
                break
            if (measured := self._try(n)) is None:
                failed = n
            else:
                ran.append(measured)
            if not ran:
                n //= 4
                continue
            n = int(min(most, self._predicted(ran[-2:])))
            if failed is not None and len(ran) == 1:
                # No line leads to the next size yet.
                n = min(n, math.isqrt(ran[0].step.batch_size * failed))
            elif failed is not None:
                n = min(n, int(0.9 * failed))
        return ran[-1] if ran else None

    def _try(self, n: int) -> Measured | None:
        """Return the memory of steps of ``n`` samples; None if they do not fit."""
        self.n_sizes += 1
        release_cached_memory()
        try:
            return self._measure(n)
        except Exception as error:
            # Batches of a size that the user did not ask for may be too small for normalization,
            # or too large for an index. An error of the first size is an error of the program.
            if self.n_sizes == 1 and not is_out_of_memory(error):
                raise
            logger.info("steps of %d samples do not fit: %s", n, described(error).splitlines()[0])
        return None

    def _measure(self, n: int) -> Measured | None:
        device = self._device
        torch.cuda.set_per_process_memory_fraction(self._fraction(self._cap()), device)
        copy = StepCopy(self._step, device)
        # cuBLAS keeps a workspace from its first product on, which is not memory of a sample.
        torch.ones(1, 1, device=device) @ torch.ones(1, 1, device=device)
        ahead = torch.empty(self._ahead_bytes(n), dtype=torch.uint8, device=device)
        before = torch.cuda.memory_allocated(device) - len(ahead)
        phases = copy.phases(n)
        # In the first step, libraries try algorithms, and the optimizer makes its state.
        next(phases)
        sample_bytes = (torch.cuda.memory_allocated(device) - before) / n
        for _ in itertools.islice(phases, _N_PHASES - 1):
            pass
        torch.cuda.empty_cache()
        n_retries = torch.cuda.memory_stats(device)["num_alloc_retries"]
        for _ in itertools.islice(phases, _N_PHASES):
            pass
        torch.cuda.reset_peak_memory_stats(device)
        next(phases)
        forward = torch.cuda.memory_allocated(device)
        next(phases)
        backward = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        next(phases)
        torch.cuda.synchronize(device)
        peaks = forward, backward, torch.cuda.max_memory_allocated(device)
        reserved = torch.cuda.memory_reserved(device)
        n_retries -= torch.cuda.memory_stats(device)["num_alloc_retries"]
        # Libraries may have taken more memory outside the allocator.
        if n_retries or reserved > self._cap():
            return None
        base = self._original_bytes + self._held_bytes + len(ahead)
        step = self._step_memory(copy, n, reserved - base, [peak - base for peak in peaks])
        return Measured(step, self.other_bytes, peaks, sample_bytes, reserved)

    def _step_memory(self, copy: StepCopy, n: int, nbytes: int, peaks: Iterable[int]) -> StepMemory:
        parameters = list(copy.model.parameters())
        breakdown = {
            "parameters": _nbytes(parameters),
            "buffers": _nbytes(copy.model.buffers()),
            "gradients": _nbytes(p for p in parameters if p.requires_grad),
            "optimizer state": _nbytes(state_tensors(copy.optimizer)),
            "batch": n * sum(self._step.sample_nbytes),
        }
        breakdown["activations"] = nbytes - sum(breakdown.values())
        phases = dict(zip(("forward", "backward", "optimizer"), peaks, strict=True))
        return StepMemory(n, breakdown, phases, count_parameters(copy.model), ())

    def _predicted(self, ran: list[Measured]) -> float:
        """Return the largest batch size that should fit, given the last one or two that ran."""
        last = ran[-1]
        n = last.step.batch_size
        cap = self._cap()
        if len(ran) == 1:
            # A quarter of what the forward pass could fill, because the backward pass and fragments
            # may take as much again.
            return n + (cap - last.reserved_bytes) / max(1, last.sample_bytes) // 4
        first = ran[0]
        # The allocator holds fragments between tensors, in proportion to them.
        share = last.reserved_bytes / max(last.peaks)
        lines = [(a * share, b * share) for a, b in zip(first.peaks, last.peaks, strict=True)]
        lines.append((first.reserved_bytes, last.reserved_bytes))
        slopes = [(now - before) / (n - first.step.batch_size) for before, now in lines]
        room = min(
            (cap - now) / slope if slope > 0 else math.inf
            for (_, now), slope in zip(lines, slopes, strict=True)
        )
        forward, backward, *_ = slopes
        # If gradients hide the activations in the peak of the backward pass, its line is too flat.
        return n + (room if backward >= forward else room * _CAREFUL)

    def _cap(self) -> int:
        """Return the bytes that torch's allocator may take while both copy and original exist."""
        return self.limit - self.outside_bytes() + self._original_bytes

    def _fraction(self, nbytes: int) -> float:
        total = torch.cuda.mem_get_info(self._device)[1]
        return min(1.0, max(0.0, nbytes / total))


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(one.nbytes for one in tensors)
