"""Steps of each strategy on tensors without data, used to predict their memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from pinfeed.tensors.pytree import flatten
from pinfeed.training.large_batch.strategies.recompute import recomputed
from pinfeed.training.memory_model.training_step import StepRun, plain_step

_LEAST_BYTES = 64 << 10
"""Smaller storages stay on the device; the default threshold of Offload."""


def accumulate_step(run: StepRun, batch_size: int) -> Any:
    """Simulate two chunks, the second one while gradients exist already."""
    for _ in range(2):
        inputs, targets = run.batch(batch_size)
        loss = run.loss(run.outputs(inputs), targets)
        run.backward(loss)
    return inputs, targets, loss


class TwoPassStep:
    """Simulates a whole batch in two passes of chunks."""

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size

    def __call__(self, run: StepRun, batch_size: int) -> Any:
        _, targets = run.batch(batch_size)
        size = min(self._chunk_size, batch_size)
        with torch.no_grad():
            first = run.outputs(run.batch(size)[0])
            outputs = _outputs_of_batch(first, batch_size, size)
        leaves, rebuild = flatten(outputs)
        held = [leaf.detach().requires_grad_(leaf.is_floating_point()) for _, leaf in leaves]
        run.backward(run.loss(rebuild(iter(held)), targets))
        for _ in range(2):
            inputs, _ = run.batch(size)
            again = [leaf for _, leaf in flatten(run.outputs(inputs))[0] if leaf.requires_grad]
            run.tracker.enter("backward")
            torch.autograd.backward(again, [torch.empty_like(leaf) for leaf in again])
            run.tracker.label((p.grad for p in run.model.parameters()), "gradients")
        return held, targets


def checkpoint_step(run: StepRun, batch_size: int) -> Any:
    """Simulate a whole batch whose backward pass recomputes parts of the model."""
    with recomputed(run.model):
        return plain_step(run, batch_size)


class _OffloadedStorage:
    """A storage in host memory, and its copy on the device while anything refers to the copy."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._device_copy: Callable[[], torch.Tensor | None] = lambda: None

    def on_device(self) -> torch.Tensor:
        whole = self._device_copy()
        if whole is None:
            whole = torch.empty(self.nbytes, dtype=torch.uint8)
            self._device_copy = weakref.ref(whole)
        return whole


class OffloadStep:
    """Simulates a whole batch whose activations stay in host memory until the backward pass.

    Attributes:
        host_bytes: Peak of the bytes in host memory.
    """

    def __init__(self) -> None:
        self.host_bytes = 0
        self._current_bytes = 0

    def __call__(self, run: StepRun, batch_size: int) -> Any:
        tensors = (*run.model.parameters(), *run.model.buffers())
        staying = {tensor.untyped_storage()._cdata for tensor in tensors}
        # The key is the address of the storage. It is removed when the storage dies, because
        # another storage may get the same address.
        offloaded: dict[int, _OffloadedStorage] = {}

        def pack(tensor: torch.Tensor) -> Any:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in staying or storage.nbytes() < _LEAST_BYTES:
                return tensor
            if key not in offloaded:
                offloaded[key] = self._offload(storage.nbytes())
                weakref.finalize(storage, offloaded.pop, key, None).atexit = False
            geometry = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
            return offloaded[key], *geometry

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            storage, dtype, shape, stride, offset = packed
            whole: torch.Tensor = storage.on_device()
            return whole.view(dtype).as_strided(shape, stride, offset)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return plain_step(run, batch_size)

    def _offload(self, nbytes: int) -> _OffloadedStorage:
        storage = _OffloadedStorage(nbytes)
        self._current_bytes += nbytes
        self.host_bytes = max(self.host_bytes, self._current_bytes)
        weakref.finalize(storage, self._free, nbytes).atexit = False
        return storage

    def _free(self, nbytes: int) -> None:
        self._current_bytes -= nbytes


def _outputs_of_batch(outputs: Any, n: int, size: int) -> Any:
    """Return empty outputs for ``n`` samples, given the outputs of ``size`` samples."""
    leaves, rebuild = flatten(outputs)
    return rebuild(
        leaf.new_empty((len(leaf) * n // size, *leaf.shape[1:])) if leaf.ndim else leaf
        for _, leaf in leaves
    )
