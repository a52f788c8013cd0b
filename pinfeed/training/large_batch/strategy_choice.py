"""StrategyChoice: the strategy for a batch; StrategyChooser and the rules that choose it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from pinfeed.errors import ArgumentError
from pinfeed.memory.limits import MemoryLimits
from pinfeed.memory.units import MiB
from pinfeed.training.large_batch import batches
from pinfeed.training.large_batch.memory_predictor import MemoryPredictor
from pinfeed.training.large_batch.step_comparison import PLAIN_FAILS
from pinfeed.training.large_batch.step_spec import StepSpec
from pinfeed.training.large_batch.verifier import Verifier
from pinfeed.training.large_batch.whole_steps import can_be_recomputed, recomputes
from pinfeed.training.memory_model.training_step import check_autocast
from pinfeed.validation.arguments import check_choice, check_flag, whole_number

Strategy = Literal["plain", "accumulate", "two_pass", "checkpoint", "checkpoint_offload", "offload"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
CHUNK_STRATEGIES: tuple[Strategy, ...] = ("accumulate", "two_pass")
"""Strategies that compute a batch in chunks, the fastest first."""
_HOW_WHOLE: dict[Strategy, str] = {
    "checkpoint": "parts of the model are recomputed",
    "checkpoint_offload": "parts of the model are recomputed and their inputs wait in host memory",
    "offload": "its activations wait in host memory",
}
"""Strategies that compute the whole batch in less memory, the fastest first, and how it fits."""
DIFFERS = "does not give the gradients of the plain step"
"""Description of a strategy that is not right."""
SOURCE = object()
"""Key of all batches that an iterable source yields."""
_OTHER_NUMBERS = (
    "the model draws random numbers, and chunks draw others than the whole batch, so the gradients "
    "are those of the plain step only in the mean"
)


@dataclass(frozen=True, repr=False)
class StrategyChoice:
    """Strategy that a BigBatch has chosen for a batch; ``str(chosen)`` says why.

    Examples:
        >>> model = torch.nn.Linear(8, 1)
        >>> with pinfeed.BigBatch(model, torch.nn.MSELoss(), chunk_size=64) as big_batch:
        ...     loss = big_batch.backward(torch.randn(512, 8), torch.randn(512, 1))
        ...     chosen = big_batch.chosen
        >>> chosen.strategy, chosen.chunk_size
        ('accumulate', 64)

    Attributes:
        strategy: Name of the strategy.
        chunk_size: Samples that are computed at a time.
        why: Reason for the choice, as a sentence.
        device_limit: Device memory that offloaded activations may hold, in bytes.
    """

    strategy: Strategy
    chunk_size: int
    why: str
    device_limit: int = MiB(512)

    def __repr__(self) -> str:
        return f"{self.strategy}, {self.chunk_size} samples at a time: {self.why}"


def is_in_chunks(chosen: StrategyChoice, n: int | None) -> bool:
    """Return whether a batch of ``n`` samples, None for more than a chunk, is cut into chunks."""
    return chosen.strategy in CHUNK_STRATEGIES and (n is None or chosen.chunk_size < n)


def size_of_chunks(
    strategy: Strategy, n: int | None, chunk_size: int | None, predictor: MemoryPredictor | None
) -> int:
    """Return ``chunk_size``, or the largest chunk of ``n`` samples that fits.

    Raises:
        ArgumentError: If there is neither a chunk size nor a limit.
        NotEnoughGPUMemory: If not even one sample fits.
    """
    if chunk_size is not None:
        return chunk_size
    if predictor is None:
        raise ArgumentError(
            "the size of chunks is unknown without chunk_size and config; give chunk_size= or "
            "config="
        )
    return predictor.chunk_size(strategy, n)


def choose_strategy(
    spec: StepSpec,
    batch: tuple[Any, Any],
    chunk_size: int | None,
    predictor: MemoryPredictor | None,
    verifier: Verifier,
    failed: Strategy | None = None,
) -> StrategyChoice:
    """Choose the strategy for a batch, as ``"auto"`` does.

    Args:
        spec: The model, in the mode in which it is trained, and the loss.
        batch: Inputs and targets.
        chunk_size: Samples of a chunk; None for the largest chunk that fits.
        predictor: Predicts the memory of strategies; None if there is no limit.
        verifier: Compares strategies with the plain step.
        failed: Strategy with which the batch did not fit in memory, whatever was predicted. If no
            chunks are right, the ones after it are taken in order, without a prediction.

    Raises:
        ArgumentError: If no strategy gives the gradients of the plain step, or there is neither a
            limit nor a chunk size.
        NotEnoughGPUMemory: If not even one sample fits.
    """
    n = batches.n_samples(batch[0])
    problems: dict[str, str] = {}

    def is_right(strategy: Strategy) -> bool:
        if problem := verifier.problem_of(strategy, spec, *batch):
            problems[strategy] = problem
        return not problem

    has_one_chunk = chunk_size is not None and chunk_size >= n
    if has_one_chunk or (predictor is not None and predictor.fits("plain", n)):
        return StrategyChoice("plain", n, "the whole batch fits in memory")
    for strategy in CHUNK_STRATEGIES if spec.reduction else CHUNK_STRATEGIES[1:]:
        if is_right(strategy):
            size = size_of_chunks(strategy, n, chunk_size, predictor)
            return StrategyChoice(strategy, min(size, n), _why_chunks(strategy, problems))
    fits = "the whole batch fits if" if failed is None else f"{failed!r} ran out of memory, so"
    why = f"chunks do not give its gradients ({_described(problems)}) and {fits}"
    whole = list(_HOW_WHOLE)
    for strategy in whole[whole.index(failed) + 1 if failed in whole else 0 :]:
        if failed is None and (predictor is None or not predictor.fits(strategy, n)):
            continue
        if not recomputes(strategy) or (can_be_recomputed(spec.model) and is_right(strategy)):
            why = f"{why} {_HOW_WHOLE[strategy]}"
            room = 0 if predictor is None else predictor.room_for_activations(strategy, n)
            return StrategyChoice(strategy, n, why, room)
    raise _no_strategy(n, problems)


def _why_chunks(strategy: Strategy, problems: Mapping[str, str]) -> str:
    if problems:
        problem = problems["accumulate"]
        return f"accumulate {DIFFERS}: {problem}"
    if strategy == "accumulate":
        return "the loss is a sum or mean of terms"
    return (
        "the loss is not known to be a sum or mean of terms, so it needs all outputs (give "
        "reduction= if it is)"
    )


def _no_strategy(n: int, problems: Mapping[str, str]) -> ArgumentError:
    """Return the error that says why no strategy is possible for ``n`` samples."""
    if all(one.startswith(PLAIN_FAILS) for one in problems.values()):
        return ArgumentError(
            f"{next(iter(problems.values()))}, so no strategy can be compared with it; expected "
            "inputs and targets with which the step runs without pinfeed; if the step fails only "
            "with few samples, name a strategy and give verify=False"
        )
    return ArgumentError(
        f"chunks do not give the gradients of {n} samples ({_described(problems)}), and no "
        "strategy that computes the whole batch is known to fit in memory; give config= with "
        "larger limits, or strategy='checkpoint'; or change the model (GroupNorm "
        "instead of BatchNorm, eval() for layers whose state changes, outputs with one row for "
        "each sample); or, if the difference does not matter, give strategy='accumulate', "
        "strategy='two_pass' or verify=False"
    )


def _described(problems: Mapping[str, str]) -> str:
    """Return the problems of strategies as a clause that names each problem once."""
    names: dict[str, list[str]] = {}
    for name, problem in problems.items():
        names.setdefault(problem, []).append(name)
    return "; ".join(f"{', '.join(found)}: {problem}" for problem, found in names.items())


@dataclass(eq=False)
class StrategyChooser:
    """Chooses a strategy once for each batch shape and each mode of the model.

    Args:
        spec: The model and the loss.
        config: Memory limits; None for no limits.
        chunk_size: Samples of a chunk; None for the largest chunk that fits.
        strategy: ``"auto"``, or the strategy that the user named.
        autocast: The dtype of autocast, or None.
        verify: Whether strategies are compared with the plain step before they are used.

    Raises:
        ArgumentError: If an argument is invalid.
    """

    spec: StepSpec
    config: MemoryLimits | None
    chunk_size: int | None
    strategy: str
    autocast: torch.dtype | None
    verify: bool

    def __post_init__(self) -> None:
        if not (self.config is None or isinstance(self.config, MemoryLimits)):
            raise ArgumentError(f"config={self.config!r}: expected a pinfeed.Config, or None")
        check_choice(self.strategy, "strategy", ("auto", *STRATEGIES))
        if self.chunk_size is not None:
            whole_number(self.chunk_size, "chunk_size")
        check_autocast(self.autocast)
        check_flag(self.verify, "verify")
        self._verifier = Verifier(self.verify)
        self._choices: dict[Any, StrategyChoice] = {}
        self._predictors: dict[Any, MemoryPredictor] = {}
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
        n = batches.n_samples(inputs)
        if self.strategy == "auto":
            predictor = self._predictor(inputs, targets)
            batch = inputs, targets
            chosen = choose_strategy(self.spec, batch, self.chunk_size, predictor, self._verifier)
            return self._keep(key, chosen, n)
        strategy: Strategy = self.strategy  # type: ignore[assignment]
        size = n
        if strategy in CHUNK_STRATEGIES:
            size = self._chunk_size(strategy, n, inputs, targets)
        chosen = self.named(strategy, n, size)
        problem = ""
        if is_in_chunks(chosen, n) or recomputes(strategy):
            problem = self._verifier.problem_of(strategy, self.spec, inputs, targets)
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
        return StrategyChoice(strategy, size, f"strategy={strategy!r} was given")

    def smaller(self, chosen: StrategyChoice, inputs: Any, targets: Any) -> StrategyChoice:
        """Choose chunks of half the size, or else the next strategy, for a batch that did not fit.

        Raises:
            ArgumentError: If no strategy is left.
        """
        size = -(-chosen.chunk_size // 2)
        batch = inputs, targets
        if chosen.strategy != "two_pass":
            failed = chosen.strategy
            chosen = choose_strategy(self.spec, batch, size, None, self._verifier, failed)
        if chosen.strategy in CHUNK_STRATEGIES:
            why = "more samples did not fit in memory"
            chosen = StrategyChoice(chosen.strategy, size, why)
        return self._keep(self.key_of(inputs, targets), chosen)

    def halve_chunks(self, key: Any) -> None:
        """Let the next batch with this key start with chunks of half the size."""
        if (chosen := self._choices.get(key)) is not None:
            size = -(-chosen.chunk_size // 2)
            self._keep(key, dataclasses.replace(chosen, chunk_size=size))

    def choose_for_source(self, first: list[tuple[Any, Any]]) -> StrategyChoice:
        """Choose the strategy for the batches of a source, from its first batches.

        Raises:
            ArgumentError: If the batches cannot be added up.
        """
        inputs, targets = batches.joined_with_first(first)
        chosen = self._choices.get(SOURCE)
        if chosen is None:
            self._check_reduction("accumulate")
            size = self._chunk_size("accumulate", None, inputs, targets)
            why = "the batches of a source arrive one by one"
            chosen = StrategyChoice("accumulate", size, why)
        problem = ""
        if self.verify and len(first) > batches.n_samples(inputs) == 1:
            problem = (
                "no two samples of the first batches have the same shape, so the strategy cannot "
                "be compared with the plain step"
            )
        self.check_part_of_source(inputs, targets, problem)
        return self._keep(SOURCE, chosen)

    def check_part_of_source(self, inputs: Any, targets: Any, problem: str = "") -> None:
        """Compare the strategy with the plain step on samples of a source, if their shape is new.

        Args:
            inputs: The samples.
            targets: Their targets.
            problem: A difference from the plain step that is known already.
        """
        if self._is_source_reported:
            return
        if not problem:
            problem = self._verifier.problem_of("accumulate", self.spec, inputs, targets)
        if problem and self.strategy == "auto":
            raise ArgumentError(
                f"strategy='accumulate' {DIFFERS}: {problem}; batches of a source arrive one by "
                "one, so only their gradients can be added; give the whole batch as tensors, or, "
                "if the difference does not matter, strategy='accumulate'"
            )
        _warn("accumulate", problem)
        self._is_source_reported = bool(problem)

    def key_of(self, inputs: Any, targets: Any) -> Any:
        """Return the key of a choice: the batch's shapes and dtypes, and the modules' modes."""
        return batches.shapes_and_dtypes(inputs, targets), self.spec.training_modes

    def can_be_smaller(self, chosen: StrategyChoice) -> bool:
        """Return whether ``smaller`` may find a choice; ``accumulate`` halves chunks itself."""
        if chosen.chunk_size == 1 or chosen.strategy == "accumulate":
            return False
        return chosen.strategy == "two_pass" or self.strategy == "auto"

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
        if is_cut and self._verifier.has_drawn(self.spec) and _OTHER_NUMBERS not in chosen.why:
            chosen = dataclasses.replace(chosen, why=f"{chosen.why}; {_OTHER_NUMBERS}")
        self._choices[key] = chosen
        return chosen

    def _check_reduction(self, strategy: Strategy) -> None:
        if strategy == "accumulate" and self.spec.reduction is None:
            raise ArgumentError(
                "strategy='accumulate' needs a loss whose reduction is known, and torch does not "
                "define this loss; give reduction='mean' or 'sum' if the loss is a mean or sum of "
                "terms (and count= if the terms are neither samples nor classes), or "
                "strategy='two_pass'"
            )

    def _chunk_size(self, strategy: Strategy, n: int | None, inputs: Any, targets: Any) -> int:
        """Return the number of samples in a chunk."""
        # Nothing is predicted if the user gave the size.
        size = self.chunk_size
        predictor = None if size else self._predictor(inputs, targets)
        return size_of_chunks(strategy, n, size, predictor)

    def _predictor(self, inputs: Any, targets: Any) -> MemoryPredictor | None:
        """Return the predictor for samples of this shape; None without a config."""
        if self.config is None:
            return None
        key = batches.sample_shapes_and_dtypes(inputs, targets), self.spec.training_modes
        if key not in self._predictors:
            options: Any = {"loss": self.spec.loss, "autocast": self.autocast}
            self._predictors[key] = MemoryPredictor(
                self.spec.model, self.config, inputs, targets, **options
            )
        return self._predictors[key]


def _warn(strategy: str, problem: str) -> None:
    """Warn of a problem of a strategy that the user named, if there is one."""
    # If the plain step fails, the step is about to raise the error itself.
    if problem and not problem.startswith(PLAIN_FAILS):
        warnings.warn(
            f"pinfeed: strategy={strategy!r} {DIFFERS}: {problem}; give strategy='auto', or "
            "ignore this warning if the difference does not matter",
            stacklevel=4,
        )
