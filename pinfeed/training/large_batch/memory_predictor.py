"""MemoryPredictor: predicts the memory of each strategy by steps on tensors without data."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from pinfeed.devices import resolve
from pinfeed.errors import EstimateError, NotEnoughCPUMemory, NotEnoughGPUMemory
from pinfeed.memory.host import free_host_bytes
from pinfeed.memory.limits import MemoryLimits
from pinfeed.memory.units import human
from pinfeed.tensors.pytree import flatten
from pinfeed.training.large_batch.batches import sample_spec_of
from pinfeed.training.large_batch.step_spec import batch_norms, device_of
from pinfeed.training.large_batch.whole_steps import offloads, recomputed, recomputes
from pinfeed.training.memory_model.estimate import StepEstimator
from pinfeed.training.memory_model.report import StepMemory, largest_that_fits
from pinfeed.training.memory_model.tensor_specs import map_tensors
from pinfeed.training.memory_model.training_step import StepRun, bytes_on_device, plain_step

_N_AHEAD = 2
"""Chunks on the device in addition to the current one."""


class MemoryPredictor:
    """Predicts the device memory of each strategy for one model and one shape of samples.

    Args:
        model: The model, on its device.
        config: Memory limits.
        inputs: A batch whose samples have the shape.
        targets: Its targets, or None.
        loss: The loss; None for the default of ``estimate``.
        optimizer: The optimizer; None for that of ``config``, or the default of ``estimate``.
        autocast: Dtype of autocast, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        config: MemoryLimits,
        inputs: Any,
        targets: Any = None,
        *,
        loss: Any = None,
        optimizer: Any = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        device = device_of(model)
        # The estimate includes the model, so the memory that the model takes counts as free.
        model_bytes = bytes_on_device(model, device)
        is_gpu = device.type == "cuda"
        limit = config.gpu_memory_limit
        self._host_limit = config.host_limit(free_host_bytes() + (0 if is_gpu else model_bytes))
        if is_gpu and limit is None:
            limit = config.device_limit(resolve(device, n_spare=0).free_bytes() + model_bytes)
        self._estimator = StepEstimator(
            model,
            sample_spec_of(inputs),
            None if targets is None else sample_spec_of(targets),
            loss=loss,
            optimizer=optimizer or getattr(config, "optimizer", None),
            device="cpu" if limit is None else "cuda",
            autocast=autocast,
        )
        self.limit = self._host_limit if limit is None else limit
        self._ahead_nbytes = _N_AHEAD * sum(self._estimator.sample_nbytes)
        # Normalization needs two samples, because a single one has no variance.
        self._least = 2 if batch_norms(model) else 1

    def chunk_size(self, strategy: str, n: int | None) -> int:
        """Return the largest chunk of a batch of ``n`` that fits together with gradients.

        Raises:
            NotEnoughGPUMemory: If not even one sample fits on the GPU.
            NotEnoughCPUMemory: If training is on the CPU and not even one sample fits.
        """

        def need(size: int) -> int:
            return self._bytes_of_chunks(strategy, n or size, max(size, self._least))

        try:
            found = largest_that_fits(need, self.limit, n)
        except EstimateError as reason:
            raise EstimateError(f"{reason}; or give chunk_size=, which needs no estimate") from None
        if not found:
            is_gpu = self._estimator.device == "cuda"
            error = NotEnoughGPUMemory if is_gpu else NotEnoughCPUMemory
            name = "gpu_memory_limit" if is_gpu else "cpu_memory_limit"
            raise error(
                f"chunks of one sample need {human(need(1))} ({need(1)} bytes); {name} is "
                f"{human(self.limit)} ({self.limit} bytes); raise {name}"
            )
        return found

    def fits(self, strategy: str, n: int) -> bool:
        """Return whether a strategy that computes ``n`` samples at once is known to fit."""
        try:
            step = self._whole_step(strategy, n)
        except EstimateError:
            return False
        if not offloads(strategy):
            return step.nbytes <= self.limit
        is_gpu = self._estimator.device == "cuda"
        fits_on_host = step.breakdown["activations"] <= self._host_limit
        return is_gpu and fits_on_host and self.room_for_activations(strategy, n) >= 0

    def room_for_activations(self, strategy: str, n: int) -> int:
        """Return the device memory that the rest of a step of ``n`` samples leaves, in bytes.

        Raises:
            EstimateError: If the step cannot be predicted.
        """
        step = self._whole_step(strategy, n)
        return self.limit - (step.nbytes - step.breakdown["activations"])

    def _whole_step(self, strategy: str, n: int) -> StepMemory:
        """Return the memory of a step of ``n`` samples at once, as if nothing was offloaded."""
        return self._estimator.at(n, _checkpoint_step if recomputes(strategy) else plain_step)

    def _bytes_of_chunks(self, strategy: str, n: int, chunk_size: int) -> int:
        """Return the device memory of a batch of ``n`` samples that is computed in chunks."""
        size = min(n, chunk_size)
        if strategy == "accumulate":
            step = self._estimator.at(size, _accumulate_step)
        else:
            step = self._estimator.at(n, functools.partial(_two_pass_step, chunk_size=size))
        return step.nbytes + size * self._ahead_nbytes


def _accumulate_step(run: StepRun, batch_size: int) -> Any:
    """Simulate two chunks, the second one while gradients exist already."""
    for _ in range(2):
        inputs, targets = run.batch(batch_size)
        loss = run.loss(run.outputs(inputs), targets)
        run.backward(loss)
    return inputs, targets, loss


def _two_pass_step(run: StepRun, batch_size: int, chunk_size: int) -> Any:
    """Simulate a whole batch in two passes of chunks."""
    _, targets = run.batch(batch_size)
    size = min(chunk_size, batch_size)
    with torch.no_grad():
        first = run.outputs(run.batch(size)[0])
        outputs = map_tensors(functools.partial(_for_batch, batch_size, size), first)
    leaves, rebuild = flatten(outputs)
    held = [leaf.detach().requires_grad_(leaf.is_floating_point()) for _, leaf in leaves]
    run.backward(run.loss(rebuild(iter(held)), targets))
    for _ in range(2):
        inputs, _ = run.batch(size)
        again = [leaf for _, leaf in flatten(run.outputs(inputs))[0] if leaf.requires_grad]
        run.backward(again, [torch.empty_like(leaf) for leaf in again])
    return held, targets


def _checkpoint_step(run: StepRun, batch_size: int) -> Any:
    """Simulate a whole batch whose backward pass recomputes parts of the model."""
    with recomputed(run.model):
        return plain_step(run, batch_size)


def _for_batch(n: int, size: int, output: torch.Tensor) -> torch.Tensor:
    """Return an empty output for ``n`` samples, given that of ``size`` samples."""
    return output.new_empty((len(output) * n // size, *output.shape[1:])) if output.ndim else output
