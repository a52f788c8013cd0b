"""MemoryPredictor: predicts the memory of each strategy without running it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pinfeed.devices import resolve
from pinfeed.errors import EstimateError, NotEnoughCPUMemory, NotEnoughGPUMemory
from pinfeed.memory.host import free_host_bytes
from pinfeed.memory.limits import MemoryLimits
from pinfeed.memory.units import human
from pinfeed.training.large_batch.equivalence.conditions import MOST_COMPARED
from pinfeed.training.large_batch.simulated_steps import (
    OffloadStep,
    TwoPassStep,
    accumulate_step,
    checkpoint_step,
)
from pinfeed.training.large_batch.strategies.batch_norms import batch_norms
from pinfeed.training.large_batch.strategies.micro_batches import sample_spec_of
from pinfeed.training.memory_model.budget import largest_that_fits
from pinfeed.training.memory_model.estimate import StepEstimator
from pinfeed.training.memory_model.models import bytes_on_device
from pinfeed.training.memory_model.training_step import Step, plain_step


class MemoryPredictor:
    """Predicts the device memory of each strategy for one model and one shape of samples.

    Args:
        estimator: Estimates steps of the model.
        limit: Limit of device memory, in bytes; of host memory if training is on the CPU.
        host_limit: Limit of host memory, in bytes.
        n_ahead: Chunks on the device in addition to the current one.
    """

    def __init__(self, estimator: StepEstimator, limit: int, host_limit: int, n_ahead: int) -> None:
        self._estimator = estimator
        self.limit = limit
        self.host_limit = host_limit
        target_nbytes = () if estimator.targets is None else estimator.targets.nbytes
        self._ahead_nbytes = n_ahead * (sum(estimator.inputs.nbytes) + sum(target_nbytes))
        self.offload = OffloadStep()
        self.why_not = ""
        """Reason why the last prediction was not possible."""
        model = estimator.model
        # Normalization needs two samples, because a single one has no variance.
        self._least = 2 if isinstance(model, nn.Module) and batch_norms(model) else 1

    def chunk_size(self, n: int | None, *, in_two_passes: bool = False) -> int:
        """Return the largest chunk of a batch of ``n`` that fits together with gradients.

        Raises:
            NotEnoughGPUMemory: If not even one sample fits on the GPU.
            NotEnoughCPUMemory: If training is on the CPU and not even one sample fits.
        """
        strategy = "two_pass" if in_two_passes else "accumulate"

        def need(size: int) -> int:
            nbytes = self.bytes_of(strategy, n or size, max(size, self._least))
            if nbytes is None:
                raise EstimateError(f"{self.why_not}; or give chunk_size=, which needs no estimate")
            return nbytes

        found = largest_that_fits(need, self.limit, n)
        if not found:
            error, name = self._not_enough()
            raise error(
                f"chunks of one sample need {human(need(1))} ({need(1)} bytes); {name} is "
                f"{human(self.limit)} ({self.limit} bytes); raise {name}"
            )
        return found

    def n_compared(self, n: int) -> int:
        """Return how many samples can be compared with the plain step.

        That many fit on the device as one batch, together with a second set of gradients.

        Raises:
            NotEnoughGPUMemory: If not even two samples fit on the GPU.
            NotEnoughCPUMemory: If training is on the CPU and not even two samples fit.
        """
        parameters = self._estimator.model.parameters()
        gradients = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
        for size in range(min(n, MOST_COMPARED), 1, -1):
            nbytes = self.bytes_of("plain", size, size)
            if nbytes is None or nbytes + gradients <= self.limit:
                return size
        error, name = self._not_enough()
        raise error(
            f"the comparison with the plain step computes two samples and needs "
            f"{human((nbytes or 0) + gradients)}; {name} is {human(self.limit)} ({self.limit} "
            f"bytes); raise {name}, or give prove=False to skip the comparison"
        )

    def bytes_of(self, strategy: str, n: int, chunk_size: int) -> int | None:
        """Return the device memory of a strategy; None if it cannot be predicted.

        Args:
            strategy: The strategy.
            n: Samples of the batch.
            chunk_size: Samples of a chunk.
        """
        steps: dict[str, Step] = {
            "plain": plain_step,
            "accumulate": accumulate_step,
            "two_pass": TwoPassStep(chunk_size),
            "checkpoint": checkpoint_step,
            "offload": self.offload,
        }
        size = min(n, chunk_size) if strategy == "accumulate" else n
        is_in_chunks = strategy in ("accumulate", "two_pass")
        ahead = min(n, chunk_size) * self._ahead_nbytes if is_in_chunks else 0
        try:
            return self._estimator.at(size, steps[strategy]).reserved_bytes + ahead
        except EstimateError as error:
            self.why_not = str(error)
            return None

    def _not_enough(self) -> tuple[type[NotEnoughGPUMemory] | type[NotEnoughCPUMemory], str]:
        """Return the error for the device, and the name of its limit."""
        if self._estimator.device == "cuda":
            return NotEnoughGPUMemory, "gpu_memory_limit"
        return NotEnoughCPUMemory, "cpu_memory_limit"


def memory_predictor_for(
    model: nn.Module,
    config: MemoryLimits,
    device: torch.device,
    inputs: Any,
    targets: Any = None,
    *,
    loss: Any = None,
    optimizer: Any = None,
    autocast: torch.dtype | None = None,
) -> MemoryPredictor:
    """Return a predictor for batches like this one, under the limits of ``config``.

    Without a loss or an optimizer, the defaults of ``estimate`` are used.
    """
    # The estimate includes the model, so the memory that the model takes already counts as free.
    model_bytes = bytes_on_device(model, device)
    is_gpu = device.type == "cuda"
    limit = config.gpu_memory_limit
    host_limit = config.host_limit(free_host_bytes() + (0 if is_gpu else model_bytes))
    if is_gpu and limit is None:
        free_bytes = resolve(device, n_spare=0).free_bytes() + model_bytes
        limit = int(free_bytes * (1 - config.headroom))
    if optimizer is None:
        optimizer = getattr(config, "optimizer", None)
    estimator = StepEstimator(
        model,
        sample_spec_of(inputs),
        None if targets is None else sample_spec_of(targets),
        loss=loss,
        optimizer=optimizer,
        device="cuda" if limit is not None else "cpu",
        autocast=autocast,
    )
    return MemoryPredictor(estimator, host_limit if limit is None else limit, host_limit, n_ahead=2)
