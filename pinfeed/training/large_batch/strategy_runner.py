"""StrategyRunner: computes the gradients of batches, each by the strategy that is chosen for it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pinfeed.errors import ArgumentError
from pinfeed.memory.limits import MemoryLimits
from pinfeed.tensors import rng_state
from pinfeed.training.large_batch import batches
from pinfeed.training.large_batch.chunked_gradients import (
    ChunkStream,
    GradientAccumulator,
    backward_two_pass,
)
from pinfeed.training.large_batch.memory_predictor import MemoryPredictor
from pinfeed.training.large_batch.restored_state import gradient_transaction
from pinfeed.training.large_batch.step_comparison import PLAIN_FAILS
from pinfeed.training.large_batch.step_spec import StepSpec, batch_norms
from pinfeed.training.large_batch.strategy_choice import (
    CHUNK_STRATEGIES,
    DIFFERS,
    Strategy,
    StrategyChoice,
    choose_strategy,
    is_in_chunks,
    size_of_chunks,
)
from pinfeed.training.large_batch.verifier import Verifier
from pinfeed.training.large_batch.whole_steps import WholeSteps
from pinfeed.training.memory_model.real_steps import is_out_of_memory, release_cached_memory
from pinfeed.training.memory_model.tensor_specs import to_device

_SOURCE = object()
"""Key of all batches that an iterable source yields."""
_OTHER_NUMBERS = (
    "the model draws random numbers, and chunks draw others than the whole batch, so the gradients "
    "are those of the plain step only in the mean"
)


@dataclass(frozen=True)
class StrategyOptions:
    """Options of a BigBatch that determine how gradients are computed.

    Attributes:
        config: Memory limits; None for no limits.
        chunk_size: Samples of a chunk; None for the largest chunk that fits.
        strategy: ``"auto"``, or the strategy that the user named.
        autocast: The dtype of autocast, or None.
        verify: Whether strategies are compared with the plain step before they are used.
    """

    config: MemoryLimits | None
    chunk_size: int | None
    strategy: str
    autocast: torch.dtype | None
    verify: bool


class StrategyRunner:
    """Computes the gradients of batches, and halves chunks if memory runs out.

    It chooses a strategy once for each batch shape and each mode of the model.

    Args:
        spec: The model and the loss.
        options: The user's options.

    Attributes:
        chosen: Strategy of the last batch; None before the first batch.
        n_halved: Number of chunks that did not fit and were computed in halves.
    """

    def __init__(self, spec: StepSpec, options: StrategyOptions) -> None:
        self._spec = spec
        self._options = options
        self._verifier = Verifier(options.verify)
        self._choices: dict[Any, StrategyChoice] = {}
        self._predictors: dict[Any, MemoryPredictor] = {}
        self._is_source_reported = False
        self._stream = ChunkStream(spec)
        self._whole = WholeSteps(spec.device, options.config)
        self.chosen: StrategyChoice | None = None
        self.n_halved = 0

    def close(self) -> None:
        """End the reader thread and free pinned memory. Further calls do nothing."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._stream.close)
            stack.callback(self._whole.close)

    def choose(self, inputs: Any, targets: Any) -> StrategyChoice:
        """Choose the strategy for a batch.

        Raises:
            ArgumentError: If no strategy is right for this model and loss.
            NotEnoughGPUMemory: If not even one sample fits on the GPU.
            NotEnoughCPUMemory: If the model is on the CPU and not even one sample fits.
        """
        key = self._key_of(inputs, targets)
        if key in self._choices:
            return self._choices[key]
        n = batches.n_samples(inputs)
        if self._options.strategy == "auto":
            size = self._options.chunk_size
            predictor = self._predictor(inputs, targets)
            batch = inputs, targets
            chosen = choose_strategy(self._spec, batch, size, predictor, self._verifier)
            return self._keep(key, chosen, n)
        strategy: Strategy = self._options.strategy  # type: ignore[assignment]
        size = n
        if strategy in CHUNK_STRATEGIES:
            size = self._chunk_size(strategy, n, inputs, targets)
        chosen = self.named(strategy, n, size)
        # Batches that a normalization sees in chunks have been warned of.
        is_cut = is_in_chunks(chosen, n) and not batch_norms(self._spec.model)
        problem = ""
        if is_cut or strategy == "checkpoint":
            problem = self._verifier.problem_of(strategy, self._spec, inputs, targets)
        chosen = self._keep(key, chosen, n)
        _warn(strategy, problem)
        return chosen

    def named(self, strategy: Strategy, n: int, chunk_size: int) -> StrategyChoice:
        """Return the choice for a strategy that the user named.

        Args:
            strategy: The strategy.
            n: Samples of the batch.
            chunk_size: Samples of a chunk, if the strategy computes chunks.

        Raises:
            ArgumentError: If the strategy is ``"accumulate"`` and the reduction is unknown.
        """
        self._check_reduction(strategy)
        size = min(n, chunk_size) if strategy in CHUNK_STRATEGIES else n
        if size < n and (norms := batch_norms(self._spec.model)):
            _warn(strategy, _normalizes_chunks(norms, size))
        return StrategyChoice(strategy, size, f"strategy={strategy!r} was given")

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
        size = -(-chosen.chunk_size // 2)
        strategy = chosen.strategy
        if strategy == "plain":
            batch = inputs, targets
            strategy = choose_strategy(self._spec, batch, size, None, self._verifier).strategy
        why = "more samples did not fit in memory"
        smaller = StrategyChoice(strategy, size, why)
        self.chosen = self._keep(self._key_of(inputs, targets), smaller)
        return self.run(self.chosen, inputs, targets)

    def run_source(self, pairs: Iterator[tuple[Any, Any]]) -> torch.Tensor:
        """Add the gradients of all batches of a source, as those of one batch.

        Args:
            pairs: Inputs and targets of each batch.

        Returns:
            The loss of all batches.

        Raises:
            ArgumentError: If there is no batch, or if the batches cannot be added up.
        """
        first = batches.first_batches(pairs, self._spec.count_terms)
        if not first:
            raise ArgumentError("the source yields no batch; expected at least one")
        inputs, targets = batches.joined_with_first(first)
        chosen = self._choices.get(_SOURCE)
        if chosen is None:
            self._check_reduction("accumulate")
            size = self._chunk_size("accumulate", None, inputs, targets)
            why = "the batches of a source arrive one by one"
            chosen = StrategyChoice("accumulate", size, why)
        problem = ""
        if norms := batch_norms(self._spec.model):
            problem = _normalizes_chunks(norms, chosen.chunk_size)
        elif self._options.verify and len(first) > batches.n_samples(inputs) == 1:
            problem = (
                "no two samples of the first batches have the same shape, so the strategy cannot "
                "be compared with the plain step"
            )
        self._check_part_of_source(inputs, targets, problem)
        self.chosen = self._keep(_SOURCE, chosen)
        chunks = self._source_chunks(itertools.chain(first, pairs), self.chosen.chunk_size)
        with gradient_transaction(self._spec.parameters):
            return self._accumulate(chunks, None, _SOURCE)

    def _check_part_of_source(self, inputs: Any, targets: Any, problem: str = "") -> None:
        """Compare the strategy with the plain step on samples of a source, if their shape is new.

        Args:
            inputs: The samples.
            targets: Their targets.
            problem: A difference from the plain step that is known already.
        """
        if self._is_source_reported:
            return
        if not problem:
            problem = self._verifier.problem_of("accumulate", self._spec, inputs, targets)
        if problem and self._options.strategy == "auto":
            raise ArgumentError(
                f"strategy='accumulate' {DIFFERS}: {problem}; batches of a source arrive one by "
                "one, so only their gradients can be added; give the whole batch as tensors, or, "
                "if the difference does not matter, strategy='accumulate'"
            )
        _warn("accumulate", problem)
        self._is_source_reported = bool(problem)

    def _source_chunks(self, pairs: Iterable[tuple[Any, Any]], size: int) -> batches.Chunks:
        for batch in pairs:
            self._check_part_of_source(*batch)
            for samples in batches.split(batch, size):
                # Tensors are already on the device, but numpy arrays are not.
                yield self._spec.chunk(*to_device(samples, self._spec.device))

    def _keep(self, key: Any, chosen: StrategyChoice, n: int | None = None) -> StrategyChoice:
        """Use this choice for batches with this key from now on.

        Args:
            key: The key.
            chosen: The choice.
            n: Samples of the batch; None for more than a chunk.

        Returns:
            The choice, which says so if its chunks draw other random numbers than the batch.
        """
        is_cut = is_in_chunks(chosen, n)
        if is_cut and self._verifier.has_drawn(self._spec) and _OTHER_NUMBERS not in chosen.why:
            chosen = dataclasses.replace(chosen, why=f"{chosen.why}; {_OTHER_NUMBERS}")
        self._choices[key] = chosen
        return chosen

    def _key_of(self, inputs: Any, targets: Any) -> Any:
        """Return the key of a choice: the batch's shapes and dtypes, and the modules' modes."""
        return batches.shapes_and_dtypes(inputs, targets), self._spec.training_modes

    def _compute(self, chosen: StrategyChoice, inputs: Any, targets: Any) -> torch.Tensor:
        strategy = chosen.strategy
        size = chosen.chunk_size
        device = self._spec.device
        if strategy == "two_pass" and size < batches.n_samples(inputs):
            chunks = functools.partial(self._stream.chunks, inputs, targets, size)
            return backward_two_pass(self._spec, chunks, to_device(targets, device))
        if strategy == "accumulate":
            total = self._spec.count_terms(inputs, targets)
            if self._spec.reduction != "mean" or total:
                key = self._key_of(inputs, targets)
                return self._accumulate(self._stream.chunks(inputs, targets, size), total, key)
            # The batch has no terms, so the plain step decides what its mean is.
            inputs, targets = batches.slice_samples((inputs, targets), 0, size)
        with self._whole.context(strategy, self._spec.modules, chosen.device_limit):
            return self._spec.backward_whole(*to_device((inputs, targets), device))

    def _accumulate(self, chunks: batches.Chunks, total: float | None, key: Any) -> torch.Tensor:
        accumulator = GradientAccumulator(self._spec)
        try:
            # Without closing, an error that the user keeps would keep the loop over chunks running.
            with contextlib.closing(chunks):
                return accumulator.run(chunks, total)
        finally:
            self.n_halved += accumulator.n_halved
            chosen = self._choices.get(key)
            if accumulator.n_halved and chosen:
                # The next batch starts with the smaller chunks.
                size = -(-chosen.chunk_size // 2)
                self._keep(key, dataclasses.replace(chosen, chunk_size=size))

    def _can_be_cut(self, chosen: StrategyChoice) -> bool:
        """Return whether smaller chunks can compute a batch that does not fit in memory."""
        if chosen.chunk_size == 1 or self._options.strategy == "plain":
            return False
        if chosen.strategy == "plain":
            return not batch_norms(self._spec.model)
        return chosen.strategy == "two_pass"

    def _check_reduction(self, strategy: Strategy) -> None:
        if strategy == "accumulate" and self._spec.reduction is None:
            raise ArgumentError(
                "strategy='accumulate' needs a loss whose reduction is known, and torch does not "
                "define this loss; give reduction='mean' or 'sum' if the loss is a mean or sum of "
                "terms (and count= if the terms are neither samples nor classes), or "
                "strategy='two_pass'"
            )

    def _chunk_size(self, strategy: Strategy, n: int | None, inputs: Any, targets: Any) -> int:
        """Return the number of samples in a chunk."""
        # Nothing is predicted if the user gave the size.
        size = self._options.chunk_size
        predictor = None if size else self._predictor(inputs, targets)
        return size_of_chunks(strategy, n, size, predictor)

    def _predictor(self, inputs: Any, targets: Any) -> MemoryPredictor | None:
        """Return the predictor for samples of this shape; None without a config."""
        config = self._options.config
        if config is None:
            return None
        key = batches.sample_shapes_and_dtypes(inputs, targets), self._spec.training_modes
        if key not in self._predictors:
            dtype = self._options.autocast
            self._predictors[key] = MemoryPredictor(
                self._spec.model, config, inputs, targets, loss=self._spec.loss, autocast=dtype
            )
        return self._predictors[key]


def _normalizes_chunks(norms: list[str], size: int) -> str:
    return (
        f"{norms[0]} normalizes over chunks of {size} samples, not over the whole batch as "
        "strategy='checkpoint' does"
    )


def _warn(strategy: str, problem: str) -> None:
    """Warn of a problem of a strategy that the user named, if there is one."""
    # If the plain step fails, the step is about to raise the error itself.
    if problem and not problem.startswith(PLAIN_FAILS):
        warnings.warn(
            f"pinfeed: strategy={strategy!r} {DIFFERS}: {problem}; give strategy='auto', or "
            "ignore this warning if the difference does not matter",
            stacklevel=4,
        )
