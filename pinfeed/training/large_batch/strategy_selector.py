"""StrategySelector: chooses the strategy for each batch of a BigBatch, once per shape and mode."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

import torch
from torch import nn

from pinfeed.errors import ArgumentError
from pinfeed.training.large_batch.equivalence.conditions import (
    MOST_COMPARED,
    ONE_BY_ONE,
    PLAIN_FAILS,
)
from pinfeed.training.large_batch.equivalence.verifier import EquivalenceVerifier
from pinfeed.training.large_batch.memory_predictor import MemoryPredictor, memory_predictor_for
from pinfeed.training.large_batch.select import (
    Strategy,
    StrategyChoice,
    choose_strategy,
    chunk_strategies,
    describe_problems,
)
from pinfeed.training.large_batch.strategies.batch_norms import batch_norms
from pinfeed.training.large_batch.strategies.micro_batches import (
    n_samples,
    sample_spec_of,
    shapes_and_dtypes,
)
from pinfeed.training.large_batch.strategies.step_spec import StepSpec
from pinfeed.training.large_batch.strategy_options import StrategyOptions

SOURCE = object()
"""Key of all batches that an iterable source yields."""


class StrategySelector:
    """Chooses the strategy for a batch, once for each batch shape and each mode of the model.

    Args:
        spec: The model and the loss.
        device: Device of the model.
        options: The user's limits, chunk size and strategy.
        has_known_reduction: Whether the loss is known to be the mean or sum of its terms.
    """

    def __init__(
        self,
        spec: StepSpec,
        device: torch.device,
        options: StrategyOptions,
        *,
        has_known_reduction: bool,
    ) -> None:
        self._spec = spec
        self._options = options
        self._has_known_reduction = has_known_reduction
        self._verifier = EquivalenceVerifier(options.prove, options.autocast)
        self._choices: dict[Any, StrategyChoice] = {}
        self._predictors = _Predictors(spec, device, options)
        self._is_source_reported = False

    def choose(self, inputs: Any, targets: Any) -> StrategyChoice:
        """Choose the strategy for a batch.

        Raises:
            ArgumentError: If no strategy is right for this model and loss.
            NotEnoughGPUMemory: If not even one sample fits on the GPU.
            NotEnoughCPUMemory: If the model is on the CPU and not even one sample fits.
        """
        key = self.key_of(inputs, targets)
        if key in self._choices:
            return self._choices[key]
        n = n_samples(inputs)
        if self._options.strategy == "auto":
            chosen = choose_strategy(
                self._spec.model,
                n,
                self._options.chunk_size,
                self._has_known_reduction,
                None if self._options.config is None else self._predictors.get(inputs, targets),
                functools.partial(self._problem_of, inputs=inputs, targets=targets),
            )
            return self.keep(key, chosen)
        strategy: Strategy = self._options.strategy  # type: ignore[assignment]
        size = self._chunk_size(strategy, n, inputs, targets)
        chosen = self.keep(key, self.choice_as_named(strategy, n, size))
        if _may_differ(chosen, n, self._spec.model):
            self._report(strategy, self._problem_of(strategy, inputs, targets))
        return chosen

    def choose_for_source(
        self, inputs: Any, targets: Any, *, is_one_of_several: bool
    ) -> StrategyChoice:
        """Choose the strategy for the batches of a source, from its first batches.

        Args:
            inputs: Samples of those first batches that have the same shape.
            targets: Targets of these samples.
            is_one_of_several: Whether ``inputs`` is a single sample although more batches follow.

        Raises:
            ArgumentError: If the batches cannot be added up.
        """
        norms = batch_norms(self._spec.model)
        if self._options.strategy == "auto" and norms:
            raise ArgumentError(
                f"{norms[0]} normalizes over the batch, but batches of a source arrive one by one, "
                "so only their gradients can be added; give the whole batch as tensors, or "
                "strategy='accumulate' to normalize over each chunk"
            )
        if SOURCE not in self._choices:
            size = self._chunk_size("accumulate", None, inputs, targets)
            self._choices[SOURCE] = self.choice_as_named("accumulate", None, size)
            self._is_source_reported = bool(norms)
        if is_one_of_several and self._verifier.is_on and not self._is_source_reported:
            self._report(
                "accumulate",
                "no two samples of the first batches have the same shape, so the strategy cannot "
                "be compared with the plain step",
            )
            self._is_source_reported = True
        self.check_part_of_source(inputs, targets)
        return self._choices[SOURCE]

    def check_part_of_source(self, inputs: Any, targets: Any) -> None:
        """Compare the strategy with the plain step on samples of a source, if their shape is new.

        Raises:
            ArgumentError: If the batches cannot be added up.
        """
        if self._is_source_reported:
            return
        if problem := self._problem_of(ONE_BY_ONE, inputs, targets):
            self._report("accumulate", problem)
            self._is_source_reported = True

    def keep(self, key: Any, chosen: StrategyChoice) -> StrategyChoice:
        """Use this choice for batches with this key from now on."""
        self._choices[key] = chosen
        return chosen

    def halve(self, key: Any) -> None:
        """Cut batches with this key into chunks of half the size from now on."""
        if chosen := self._choices.get(key):
            self.keep(key, dataclasses.replace(chosen, chunk_size=-(-chosen.chunk_size // 2)))

    def strategy_in_chunks(self, inputs: Any, targets: Any) -> Strategy:
        """Return the strategy in chunks for a batch that did not fit as a whole.

        Raises:
            ArgumentError: If no strategy that computes chunks is right.
        """
        problems: dict[str, str] = {}
        for strategy in chunk_strategies(self._has_known_reduction):
            problem = self._problem_of(strategy, inputs, targets)
            if not problem:
                return strategy
            problems[strategy] = problem
        raise ArgumentError(
            "the whole batch does not fit in memory, and chunks do not give its gradients "
            f"({describe_problems(problems)}); give strategy='offload'"
        )

    def choice_as_named(self, strategy: Strategy, n: int | None, chunk_size: int) -> StrategyChoice:
        """Return the choice for a strategy that the user named.

        Args:
            strategy: The strategy.
            n: Samples of the batch; None for a source, because its number of samples is unknown
                until its end.
            chunk_size: Samples of a chunk, if the strategy computes chunks.

        Raises:
            ArgumentError: If the strategy is ``"accumulate"`` and the reduction is unknown.
        """
        size = n or 1
        if strategy in ("accumulate", "two_pass"):
            size = chunk_size if n is None else min(n, chunk_size)
        if (n is None or size < n) and (norms := batch_norms(self._spec.model)):
            warnings.warn(
                f"{norms[0]} normalizes over chunks of {size} samples, not over the whole batch, "
                "so gradients and running statistics differ from the plain step; to normalize over "
                "the whole batch, give strategy='offload' or 'checkpoint'",
                stacklevel=4,
            )
        if strategy == "accumulate" and not self._has_known_reduction:
            raise ArgumentError(
                "strategy='accumulate' needs a loss whose reduction is known, and torch does not "
                "define this loss; give reduction='mean' or 'sum' if the loss is a mean or sum of "
                "terms (and count= if the terms are neither samples nor classes), or "
                "strategy='two_pass'"
            )
        why = f"strategy={strategy!r} was given"
        if n is None:
            why = "the batches of a source arrive one by one"
        return StrategyChoice(strategy, size, why, {})

    def key_of(self, inputs: Any, targets: Any) -> Any:
        """Return the key of a choice: the batch's shapes and dtypes, and the modules' modes."""
        return shapes_and_dtypes(inputs, targets), self._spec.training_modes

    def _problem_of(self, strategy: str, inputs: Any, targets: Any) -> str:
        def most_that_fit() -> int:
            if self._options.config is None or self._options.chunk_size is not None:
                return MOST_COMPARED
            return self._predictors.get(inputs, targets).n_compared(n_samples(inputs))

        return self._verifier.problem_of(strategy, self._spec, inputs, targets, most_that_fit)

    def _report(self, strategy: Strategy, problem: str) -> None:
        """Raise for a problem of a strategy that ``"auto"`` chose; warn if the user named it."""
        if not problem:
            return
        sentence = f"strategy={strategy!r} does not give the gradients of the plain step: {problem}"
        if self._options.strategy == "auto":
            raise ArgumentError(
                f"{sentence}; batches of a source arrive one by one, so only their gradients can "
                "be added; give the whole batch as tensors, or, if the difference does not matter, "
                "strategy='accumulate' or prove=False"
            )
        if problem.startswith(PLAIN_FAILS):
            # The step is about to raise the error itself.
            return
        warnings.warn(
            f"{sentence}; give strategy='auto', or prove=False if the difference does not matter",
            stacklevel=4,
        )

    def _chunk_size(self, strategy: Strategy, n: int | None, inputs: Any, targets: Any) -> int:
        """Return the number of samples in a chunk."""
        if strategy not in ("accumulate", "two_pass"):
            return n or 1
        if self._options.chunk_size is not None:
            return self._options.chunk_size
        if self._options.config is None:
            raise ArgumentError(
                "the size of chunks is unknown without chunk_size and config; give chunk_size= or "
                "config="
            )
        is_two_pass = strategy == "two_pass"
        return self._predictors.get(inputs, targets).chunk_size(n, in_two_passes=is_two_pass)


class _Predictors:
    """Memory predictors of a model, one for each shape of samples."""

    def __init__(self, spec: StepSpec, device: torch.device, options: StrategyOptions) -> None:
        self._spec = spec
        self._device = device
        self._options = options
        self._by_shape: dict[Any, MemoryPredictor] = {}

    def get(self, inputs: Any, targets: Any) -> MemoryPredictor:
        """Return the predictor for batches of this shape; requires a config."""
        target_key = targets is not None and sample_spec_of(targets).key
        key = sample_spec_of(inputs).key, target_key, *batch_norms(self._spec.model)
        if key not in self._by_shape:
            assert self._options.config is not None
            self._by_shape[key] = memory_predictor_for(
                self._spec.model,
                self._options.config,
                self._device,
                inputs,
                targets,
                loss=self._spec.loss,
                autocast=self._options.autocast,
            )
        return self._by_shape[key]


def _may_differ(chosen: StrategyChoice, n: int, model: nn.Module) -> bool:
    """Return whether a named strategy may differ from the plain step and no warning said so yet."""
    if chosen.strategy == "checkpoint":
        return True
    is_cut = chosen.strategy in ("accumulate", "two_pass") and chosen.chunk_size < n
    return is_cut and not batch_norms(model)
