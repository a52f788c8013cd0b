"""StrategyRunner: computes the gradients of a batch by its chosen strategy."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

from pinfeed.memory.host import free_host_bytes
from pinfeed.tensors import rng_state
from pinfeed.training.large_batch.chunk_stream import ChunkStream
from pinfeed.training.large_batch.select import Strategy, StrategyChoice
from pinfeed.training.large_batch.strategies.accumulation import GradientAccumulator
from pinfeed.training.large_batch.strategies.batch_norms import batch_norms
from pinfeed.training.large_batch.strategies.gradients import backward_whole, gradient_transaction
from pinfeed.training.large_batch.strategies.micro_batches import (
    Chunks,
    n_samples,
    slice_samples,
)
from pinfeed.training.large_batch.strategies.recompute import recomputed
from pinfeed.training.large_batch.strategies.step_spec import StepSpec
from pinfeed.training.large_batch.strategies.two_pass import backward_two_pass
from pinfeed.training.large_batch.strategy_options import StrategyOptions
from pinfeed.training.large_batch.strategy_selector import SOURCE, StrategySelector
from pinfeed.training.memory_model.out_of_memory import is_out_of_memory, release_cached_memory
from pinfeed.training.memory_model.tensor_specs import to_device

if TYPE_CHECKING:
    from pinfeed.training.offload.offload import Offload


class StrategyRunner:
    """Computes gradients by a strategy, and halves the chunks if memory runs out.

    Args:
        spec: The model and the loss.
        device: Device of the model.
        options: The user's options.
        selector: Receives smaller chunk sizes when chunks did not fit.

    Attributes:
        chosen: Strategy of the last batch; None before the first batch.
        n_halved: Number of chunks that did not fit and were computed in halves.
    """

    def __init__(
        self,
        spec: StepSpec,
        device: torch.device,
        options: StrategyOptions,
        selector: StrategySelector,
    ) -> None:
        self._spec = spec
        self._device = device
        self._options = options
        self._selector = selector
        self._stream = ChunkStream(spec, device)
        self._offload: Offload | None = None
        self.chosen: StrategyChoice | None = None
        self.n_halved = 0

    def close(self) -> None:
        """End the reader thread and free pinned memory. Further calls do nothing."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._stream.close)
            if self._offload is not None:
                stack.callback(self._offload.close)

    def run(self, chosen: StrategyChoice, inputs: Any, targets: Any) -> torch.Tensor:
        """Add the gradients of a batch and return its loss; an error leaves gradients unchanged."""
        with gradient_transaction(self._spec):
            if chosen.strategy == "accumulate":
                return self._accumulate_batch(chosen.chunk_size, inputs, targets)
            if chosen.strategy in ("plain", "two_pass"):
                return self._compute_or_halve(chosen, inputs, targets)
            is_checkpoint = chosen.strategy == "checkpoint"
            with recomputed(self._spec.model) if is_checkpoint else self._offloaded():
                return self._backward_whole(inputs, targets)

    def run_source(self, chunks: Chunks) -> torch.Tensor:
        """Add the gradients of the chunks of an iterable source, and return their loss."""
        with gradient_transaction(self._spec):
            return self._accumulate(chunks, None, SOURCE)

    def _backward_whole(self, inputs: Any, targets: Any) -> torch.Tensor:
        return backward_whole(
            self._spec, to_device(inputs, self._device), to_device(targets, self._device)
        )

    def _accumulate_batch(self, size: int, inputs: Any, targets: Any) -> torch.Tensor:
        total = self._spec.count_terms(inputs, targets)
        if self._spec.reduction == "mean" and not total:
            # The batch has no terms, so the plain step decides what its mean is.
            return self._backward_whole(
                slice_samples(inputs, 0, size), slice_samples(targets, 0, size)
            )
        chunks = self._stream.chunks(inputs, targets, size)
        return self._accumulate(chunks, total, self._selector.key_of(inputs, targets))

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

    def _compute_or_halve(self, chosen: StrategyChoice, inputs: Any, targets: Any) -> torch.Tensor:
        """Compute the whole batch or two passes; if memory runs out, retry in smaller chunks."""
        state = rng_state.capture()
        size = chosen.chunk_size
        try:
            with gradient_transaction(self._spec):
                if chosen.strategy == "plain" or size >= n_samples(inputs):
                    return self._backward_whole(inputs, targets)
                chunks = functools.partial(self._stream.chunks, inputs, targets, size)
                return backward_two_pass(self._spec, chunks, to_device(targets, self._device))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or not self._can_be_cut(chosen):
                raise
        # This is after the except block, because within the block the traceback keeps the
        # tensors of the failed frames alive.
        release_cached_memory()
        rng_state.restore(state)
        self.n_halved += 1
        strategy: Strategy = "two_pass"
        if chosen.strategy == "plain":
            strategy = self._selector.strategy_in_chunks(inputs, targets)
        smaller = dataclasses.replace(
            chosen,
            strategy=strategy,
            chunk_size=-(-size // 2),
            why="more samples did not fit in memory",
        )
        self.chosen = self._selector.keep(self._selector.key_of(inputs, targets), smaller)
        return self.run(smaller, inputs, targets)

    def _can_be_cut(self, chosen: StrategyChoice) -> bool:
        if chosen.chunk_size == 1 or self._options.strategy == "plain":
            return False
        return chosen.strategy != "plain" or not batch_norms(self._spec.model)

    def _offloaded(self) -> contextlib.AbstractContextManager[Any]:
        if self._offload is None:
            from pinfeed.training.offload.offload import Offload

            config = self._options.config
            limit = None if config is None else config.host_limit(free_host_bytes())
            self._offload = Offload(self._device, host_limit=limit)
        return self._offload.step(*self._spec.modules)
