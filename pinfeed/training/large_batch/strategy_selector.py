"""StrategySelector: how each batch of a BigBatch is computed."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

import torch

from pinfeed.errors import ArgumentError
from pinfeed.memory.limits import MemoryLimits
from pinfeed.training.large_batch.equivalence.comparison import PLAIN_FAILS
from pinfeed.training.large_batch.equivalence.step_comparison import ONE_BY_ONE
from pinfeed.training.large_batch.equivalence.verifier import EquivalenceVerifier
from pinfeed.training.large_batch.select import (
    MOST_COMPARED,
    MemoryPredictor,
    Strategy,
    StrategyChoice,
    batch_norms,
    choose_strategy,
    chunk_strategies,
    describe_problems,
    memory_predictor_for,
)
from pinfeed.training.large_batch.strategies.gradients import StepSpec
from pinfeed.training.large_batch.strategies.micro_batches import (
    n_samples,
    sample_spec_of,
    shapes_and_dtypes,
)

SOURCE = object()
"""The key of all batches that a source gives."""


class StrategySelector:
    """Decides how a batch is computed, once for each shape of batches and each mode of the model.

    Args:
        spec: The model and the loss.
        device: Where the model is.
        config: Limits.
        chunk_size: Samples at a time, in place of what fits.
        strategy: ``"auto"``, or the one that was named.
        is_made_of_parts: Whether the loss is said to be made of the losses of chunks.
        verifier: Whether strategies are right.
        autocast: The dtype of autocast.
    """

    def __init__(
        self,
        spec: StepSpec,
        device: torch.device,
        config: MemoryLimits | None,
        chunk_size: int | None,
        strategy: str,
        is_made_of_parts: bool,
        verifier: EquivalenceVerifier,
        autocast: torch.dtype | None,
    ) -> None:
        self._spec = spec
        self._device = device
        self._config = config
        self._chunk_size = chunk_size
        self._strategy = strategy
        self._is_made_of_parts = is_made_of_parts
        self._verifier = verifier
        self._autocast = autocast
        self._by_shape: dict[Any, StrategyChoice] = {}
        self._predictors: dict[Any, MemoryPredictor] = {}
        self._is_reported = False

    def of_source(self, inputs: Any, targets: Any, *, is_one_of_several: bool) -> StrategyChoice:
        """Decide how the batches of a source are computed, from the first of them.

        Args:
            inputs: Samples of the first batches that have one shape.
            targets: Their targets.
            is_one_of_several: Whether that is one sample, although there are more batches.

        Raises:
            ArgumentError: They cannot be added.
        """
        if self._strategy == "auto" and (norms := batch_norms(self._spec.model)):
            raise ArgumentError(
                f"{norms[0]} normalizes over the batch, and batches that come one by one can only be added; give the whole batch as "
                "tensors, or strategy='accumulate' for statistics of chunks"
            )
        if SOURCE not in self._by_shape:
            size = self._size("accumulate", None, inputs, targets)
            self._by_shape[SOURCE] = self.as_told("accumulate", None, size)
            self._is_reported = bool(batch_norms(self._spec.model))
        if is_one_of_several and self._verifier.is_on and not self._is_reported:
            self._report(
                "accumulate",
                "no two samples of the first batches have one shape, so that nothing can be compared",
            )
            self._is_reported = True
        self.check_part_of_source(inputs, targets)
        return self._by_shape[SOURCE]

    def check_part_of_source(self, inputs: Any, targets: Any) -> None:
        """Compare samples of a source with the plain step, where they have another shape than those before.

        Raises:
            ArgumentError: They cannot be added.
        """
        if not self._is_reported and (problem := self._problem_of(ONE_BY_ONE, inputs, targets)):
            self._report("accumulate", problem)
            self._is_reported = True

    def keep(self, key: Any, chosen: StrategyChoice) -> StrategyChoice:
        """Compute batches with this key so from now on."""
        self._by_shape[key] = chosen
        return chosen

    def halve(self, key: Any) -> None:
        """Cut batches with this key into chunks of half the size from now on."""
        if chosen := self._by_shape.get(key):
            self.keep(key, dataclasses.replace(chosen, chunk_size=-(-chosen.chunk_size // 2)))

    def of(self, inputs: Any, targets: Any) -> StrategyChoice:
        """Decide how a batch is computed.

        Raises:
            ArgumentError: No strategy is right for this model and loss.
            NotEnoughGPUMemory: Not even one sample fits.
            NotEnoughCPUMemory: Likewise, where the model is on the CPU.
        """
        key, n = self.key_of(inputs, targets), n_samples(inputs)
        if key not in self._by_shape:
            if self._strategy == "auto":
                predictor = None if self._config is None else self._predictor(inputs, targets)
                problem_of = functools.partial(self._problem_of, inputs=inputs, targets=targets)
                self._by_shape[key] = choose_strategy(
                    self._spec.model,
                    n,
                    self._chunk_size,
                    self._is_made_of_parts,
                    predictor,
                    problem_of,
                )
            else:
                size = self._size(self._strategy, n, inputs, targets)
                self._by_shape[key] = chosen = self.as_told(self._strategy, n, size)  # type: ignore[arg-type]
                if self._is_doubtful(chosen, n) and (
                    problem := self._problem_of(chosen.strategy, inputs, targets)
                ):
                    self._report(chosen.strategy, problem)
        return self._by_shape[key]

    def _is_doubtful(self, chosen: StrategyChoice, n: int) -> bool:
        """Whether a strategy that was named may compute something else than the plain step, and nothing has warned of that yet."""
        if chosen.strategy == "checkpoint":
            return True
        return (
            chosen.strategy in ("accumulate", "two_pass")
            and chosen.chunk_size < n
            and not batch_norms(self._spec.model)
        )

    def right_chunks(self, inputs: Any, targets: Any) -> Strategy:
        """The strategy for a batch that was to be computed whole and does not fit."""
        problems: dict[str, str] = {}
        for strategy in chunk_strategies(self._is_made_of_parts):
            problems[strategy] = problem = self._problem_of(strategy, inputs, targets)
            if not problem:
                return strategy
        raise ArgumentError(
            f"the whole batch does not fit, and chunks do not give its gradients ({describe_problems(problems)}); give strategy='offload'"
        )

    def _problem_of(self, strategy: str, inputs: Any, targets: Any) -> str:
        def most() -> int:
            is_limited = self._config is not None and self._chunk_size is None
            return (
                MOST_COMPARED
                if not is_limited
                else self._predictor(inputs, targets).n_compared(n_samples(inputs))
            )

        return self._verifier.problem_of(strategy, self._spec, inputs, targets, most)

    def _report(self, strategy: Strategy, problem: str) -> None:
        """Raise for a strategy that was chosen here, warn of one that was named."""
        said = f"strategy={strategy!r} does not give the gradients of the plain step: {problem}"
        if self._strategy == "auto":
            raise ArgumentError(
                f"{said}; batches that come one by one can only be added: give the whole batch as tensors, strategy='accumulate' if the "
                "difference does not matter, or prove=False"
            )
        if problem.startswith(PLAIN_FAILS):
            # The step itself is about to say so.
            return
        warnings.warn(
            f"{said}; take strategy='auto', or give prove=False if the difference does not matter",
            stacklevel=4,
        )

    def key_of(self, inputs: Any, targets: Any) -> Any:
        """Return the key of a decision: shapes, and modes, in which a model may compute otherwise."""
        return shapes_and_dtypes(inputs, targets), self._spec.modes

    def _size(self, strategy: str, n: int | None, inputs: Any, targets: Any) -> int:
        """Return the number of samples in a chunk."""
        if strategy not in ("accumulate", "two_pass"):
            return n or 1
        if self._chunk_size is not None:
            return self._chunk_size
        if self._config is None:
            raise ArgumentError(
                "neither chunk_size nor a config with a limit was given; give one of them"
            )
        return self._predictor(inputs, targets).chunk_size(n, in_two_passes=strategy == "two_pass")

    def as_told(self, strategy: Strategy, n: int | None, chunk_size: int) -> StrategyChoice:
        """The decision for a strategy that was named, for ``n`` samples; None for a source, which tells its samples at its end."""
        size = (
            (n or 1)
            if strategy not in ("accumulate", "two_pass")
            else chunk_size
            if n is None
            else min(n, chunk_size)
        )
        if (n is None or size < n) and (norms := batch_norms(self._spec.model)):
            warnings.warn(
                f"{norms[0]} normalizes over chunks of {size} samples, not over the whole batch: gradients and running statistics are "
                "those of the chunks; 'offload' and 'checkpoint' see the whole batch",
                stacklevel=4,
            )
        if strategy == "accumulate" and not self._is_made_of_parts:
            raise ArgumentError(
                "the loss is none of torch's, so it is not known how that of a batch is made of those of its chunks; give reduction='mean' "
                "or 'sum' if it is made so (and count= if it is a mean of other things than samples or classes), or strategy='two_pass'"
            )
        why = "batches that come one by one can only be added" if n is None else "it was asked for"
        return StrategyChoice(strategy, size, why, {})

    def _predictor(self, inputs: Any, targets: Any) -> MemoryPredictor:
        key = (
            sample_spec_of(inputs).key,
            targets is not None and sample_spec_of(targets).key,
            *batch_norms(self._spec.model),
        )
        if key not in self._predictors:
            assert self._config is not None
            self._predictors[key] = memory_predictor_for(
                self._spec.model,
                self._config,
                self._device,
                inputs,
                targets,
                loss=self._spec.loss,
                autocast=self._autocast,
            )
        return self._predictors[key]
