"""What each strategy takes of a batch, predicted: the steps of strategies.py on tensors without data."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from pinfeed.tensors.pytree import flatten
from pinfeed.training.large_batch.strategies.recompute import recomputed
from pinfeed.training.memory_model.estimate import Run, plain_step

# Of a storage that is worth its way to the host.
_LEAST_BYTES = 64 << 10


def accumulate_step(run: Run, batch_size: int) -> Any:
    """A chunk, and another one while there are gradients."""
    for _ in range(2):
        inputs, targets = run.batch(batch_size)
        loss = run.loss(run.outputs(inputs), targets)
        run.backward(loss)
    return inputs, targets, loss


class TwoPassStep:
    """A whole batch in two passes of chunks."""

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size

    def __call__(self, run: Run, batch_size: int) -> Any:
        _, targets = run.batch(batch_size)
        with torch.no_grad():
            size = min(self._chunk_size, batch_size)
            first = run.outputs(run.batch(size)[0])
            outputs = _repeated(first, batch_size, size)
        leaves, rebuild = flatten(outputs)
        held = [leaf.detach().requires_grad_(leaf.is_floating_point()) for _, leaf in leaves]
        run.backward(run.loss(rebuild(iter(held)), targets))
        for _ in range(2):
            inputs, _ = run.batch(min(self._chunk_size, batch_size))
            again = [leaf for _, leaf in flatten(run.outputs(inputs))[0] if leaf.requires_grad]
            run.tracker.enter("backward")
            torch.autograd.backward(again, [torch.empty_like(leaf) for leaf in again])
            run.tracker.label((p.grad for p in run.model.parameters()), "gradients")
        return held, targets


def checkpoint_step(run: Run, batch_size: int) -> Any:
    """A whole batch, parts of the model computed again."""
    with recomputed(run.model):
        return plain_step(run, batch_size)


class _Moved:
    """A storage on the host, and what it is on the device again, while somebody has that."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.back: Callable[[], torch.Tensor | None] = lambda: None

    def on_device(self) -> torch.Tensor:
        whole = self.back()
        if whole is None:
            whole = torch.empty(self.nbytes, dtype=torch.uint8)
            self.back = weakref.ref(whole)
        return whole


class OffloadStep:
    """A whole batch, what is kept for the backward pass on the host.

    Attributes:
        host_bytes: Most bytes there.
    """

    def __init__(self) -> None:
        self.host_bytes = self._now = 0

    def __call__(self, run: Run, batch_size: int) -> Any:
        stay = {
            tensor.untyped_storage()._cdata
            for tensor in (*run.model.parameters(), *run.model.buffers())
        }
        # By storage, while that lives: its address may be another one's then.
        moved: dict[int, _Moved] = {}

        def pack(tensor: torch.Tensor) -> Any:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in stay or storage.nbytes() < _LEAST_BYTES:
                return tensor
            if key not in moved:
                moved[key] = self._move(storage.nbytes())
                weakref.finalize(storage, moved.pop, key, None).atexit = False
            return moved[key], tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            there, dtype, shape, stride, offset = packed
            whole: torch.Tensor = there.on_device()
            return whole.view(dtype).as_strided(shape, stride, offset)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return plain_step(run, batch_size)

    def _move(self, nbytes: int) -> _Moved:
        found = _Moved(nbytes)
        self._now += nbytes
        self.host_bytes = max(self.host_bytes, self._now)
        weakref.finalize(found, self._gone, nbytes).atexit = False
        return found

    def _gone(self, nbytes: int) -> None:
        self._now -= nbytes


def _repeated(value: Any, n: int, size: int) -> Any:
    """Outputs of a whole batch, of those of a chunk."""
    leaves, rebuild = flatten(value)
    return rebuild(
        leaf.new_empty((len(leaf) * n // size, *leaf.shape[1:])) if leaf.ndim else leaf
        for _, leaf in leaves
    )
