"""StrategyRunner: computes the gradients of a batch by its chosen strategy."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from pinfeed.feeders.loader_feeder import LoaderFeeder
from pinfeed.feeders.wrap_loader import wrap_loader
from pinfeed.memory.host import free_host_bytes
from pinfeed.memory.limits import MemoryLimits
from pinfeed.tensors import rng_state
from pinfeed.training.large_batch.batches import Chunk, Chunks, n_samples, slice_samples
from pinfeed.training.large_batch.chunked_gradients import GradientAccumulator, backward_two_pass
from pinfeed.training.large_batch.recompute import recomputed
from pinfeed.training.large_batch.step_spec import StepSpec, batch_norms, gradient_transaction
from pinfeed.training.large_batch.strategy_selector import (
    SOURCE,
    StrategyChoice,
    StrategyOptions,
    StrategySelector,
)
from pinfeed.training.memory_model.real_steps import is_out_of_memory, release_cached_memory
from pinfeed.training.memory_model.tensor_specs import to_device
from pinfeed.training.offload.offload import Offload


class StrategyRunner:
    """Computes gradients by a strategy, and halves the chunks if memory runs out.

    Args:
        spec: The model and the loss.
        options: The user's options.
        selector: Receives smaller chunk sizes when chunks did not fit.

    Attributes:
        chosen: Strategy of the last batch; None before the first batch.
        n_halved: Number of chunks that did not fit and were computed in halves.
    """

    def __init__(
        self, spec: StepSpec, options: StrategyOptions, selector: StrategySelector
    ) -> None:
        self._spec = spec
        self._options = options
        self._selector = selector
        self._stream = _ChunkStream(spec)
        self._whole = WholeSteps(spec.device, options.config)
        self.chosen: StrategyChoice | None = None
        self.n_halved = 0

    def close(self) -> None:
        """End the reader thread and free pinned memory. Further calls do nothing."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._stream.close)
            stack.callback(self._whole.close)

    def run(self, chosen: StrategyChoice, inputs: Any, targets: Any) -> torch.Tensor:
        """Add the gradients of a batch and return its loss; an error leaves gradients unchanged."""
        state = rng_state.capture() if chosen.strategy in ("plain", "two_pass") else {}
        try:
            with gradient_transaction(self._spec.parameters):
                return self._compute(chosen, inputs, targets)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or not self._can_be_cut(chosen):
                raise
        release_cached_memory()
        rng_state.restore(state)
        self.n_halved += 1
        self.chosen = self._selector.choose_smaller(chosen, inputs, targets)
        return self.run(self.chosen, inputs, targets)

    def run_source(self, chunks: Chunks) -> torch.Tensor:
        """Add the gradients of the chunks of an iterable source, and return their loss."""
        with gradient_transaction(self._spec.parameters):
            return self._accumulate(chunks, None, SOURCE)

    def _compute(self, chosen: StrategyChoice, inputs: Any, targets: Any) -> torch.Tensor:
        strategy = chosen.strategy
        size = chosen.chunk_size
        if strategy == "two_pass" and size < n_samples(inputs):
            chunks = functools.partial(self._stream.chunks, inputs, targets, size)
            return backward_two_pass(self._spec, chunks, to_device(targets, self._spec.device))
        if strategy == "accumulate":
            total = self._spec.count_terms(inputs, targets)
            if self._spec.reduction != "mean" or total:
                key = self._selector.key_of(inputs, targets)
                return self._accumulate(self._stream.chunks(inputs, targets, size), total, key)
            # The batch has no terms, so the plain step decides what its mean is.
            inputs, targets = slice_samples((inputs, targets), 0, size)
        with self._whole.context(strategy, self._spec.modules):
            return self._spec.backward_whole(*to_device((inputs, targets), self._spec.device))

    def _accumulate(self, chunks: Chunks, total: float | None, key: Any) -> torch.Tensor:
        accumulator = GradientAccumulator(self._spec)
        try:
            # Without closing, an error that the user keeps would keep the loop over chunks running.
            with contextlib.closing(chunks):
                return accumulator.run(chunks, total)
        finally:
            if accumulator.n_halved:
                # The next batch starts with the smaller chunks.
                self.n_halved += accumulator.n_halved
                self._selector.halve(key)

    def _can_be_cut(self, chosen: StrategyChoice) -> bool:
        """Return whether smaller chunks can compute a batch that does not fit in memory."""
        if chosen.chunk_size == 1 or self._options.strategy == "plain":
            return False
        if chosen.strategy == "plain":
            return not batch_norms(self._spec.model)
        return chosen.strategy == "two_pass"


class WholeSteps:
    """Contexts of steps that compute a whole batch at once, by strategy.

    Args:
        device: Device of the model.
        config: Memory limits; None for the free memory.
    """

    def __init__(self, device: torch.device, config: MemoryLimits | None) -> None:
        self._device = device
        self._config = config
        self._offload: Offload | None = None

    def context(
        self, strategy: str, modules: Sequence[nn.Module]
    ) -> contextlib.AbstractContextManager[Any]:
        """Return the context of the forward pass; the first module is the model."""
        if strategy == "checkpoint":
            return recomputed(modules[0])
        if strategy != "offload":
            return contextlib.nullcontext()
        if self._offload is None:
            limit = None if self._config is None else self._config.host_limit(free_host_bytes())
            self._offload = Offload(self._device, host_limit=limit)
        return self._offload.step(*modules)

    def close(self) -> None:
        """Free page-locked memory. Further calls do nothing."""
        if self._offload is not None:
            self._offload.close()


class _ChunkStream:
    """Copies the chunks of one batch after another to the device, one chunk ahead.

    It is the loader of its own feeder.

    Args:
        spec: The model and the loss, used to count the loss terms of a chunk.
    """

    def __init__(self, spec: StepSpec) -> None:
        self._spec = spec
        self._batch: Any = None
        self._size = 1
        self._feeder: LoaderFeeder[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        batch = self._batch
        size = self._size
        for start in range(0, n_samples(batch), size):
            yield slice_samples(batch, start, start + size)

    def chunks(self, inputs: Any, targets: Any, size: int) -> Chunks:
        """Yield the chunks of a batch, which may be on the host or on the device."""
        if self._feeder is None:
            self._feeder = wrap_loader(self, device=self._spec.device, depth=1)
        self._batch = (inputs, targets)
        self._size = size
        batches: Any = iter(self._feeder)
        try:
            starts = range(0, n_samples(inputs), size)
            for start, (x, y) in zip(starts, batches, strict=True):
                # Terms are counted in the caller's targets, because reading a count from the
                # device would wait for it.
                own_targets = slice_samples(targets, start, start + size)
                yield Chunk(x, y, self._spec.count_terms(x, own_targets))
        finally:
            batches.close()
            self._batch = None

    def close(self) -> None:
        """End the reader thread and free page-locked memory. Further calls do nothing."""
        if self._feeder is not None:
            self._feeder.close()
