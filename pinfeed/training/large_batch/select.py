"""Selection of a strategy for a batch: by memory, and by whether it gives the right gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from tabulate import tabulate
from torch import nn

from pinfeed.errors import ArgumentError
from pinfeed.memory.units import human
from pinfeed.training.large_batch.equivalence.conditions import PLAIN_FAILS
from pinfeed.training.large_batch.memory_predictor import MemoryPredictor
from pinfeed.training.large_batch.strategies.batch_norms import batch_norms
from pinfeed.training.large_batch.strategies.micro_batches import NEED_ROWS
from pinfeed.training.large_batch.strategies.recompute import can_be_recomputed
from pinfeed.validation.safe_repr import safe_repr

Strategy = Literal["plain", "accumulate", "two_pass", "checkpoint", "offload"]
STRATEGIES: tuple[Strategy, ...] = ("plain", "accumulate", "two_pass", "checkpoint", "offload")


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
        device_bytes: Predicted device memory of each strategy that was considered, in bytes; None
            if the prediction failed.
    """

    strategy: Strategy
    chunk_size: int
    why: str
    device_bytes: dict[str, int | None]

    @safe_repr
    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        sentence = f"{self.strategy}, {self.chunk_size} samples at a time: {self.why}"
        if not any(self.device_bytes.values()):
            return sentence
        rows = [
            (name, "?" if nbytes is None else human(nbytes))
            for name, nbytes in self.device_bytes.items()
        ]
        return f"{sentence}\n{tabulate(rows, headers=('strategy', 'device memory'))}"


def choose_strategy(
    model: nn.Module,
    n: int,
    chunk_size: int | None,
    has_known_reduction: bool,
    predictor: MemoryPredictor | None,
    problem_of: Callable[[Strategy], str],
) -> StrategyChoice:
    """Choose the strategy for a batch.

    Args:
        model: The model, in the mode in which it is trained.
        n: Samples of the batch.
        chunk_size: Samples of a chunk; None for the largest chunk that fits.
        has_known_reduction: Whether the loss is known to be the mean or sum of its terms.
        predictor: Predicts the memory of strategies; None if there is no limit.
        problem_of: Returns how a strategy differs from the plain step; "" if it does not.

    Raises:
        ArgumentError: If no strategy gives the gradients of the plain step, or there is neither a
            limit nor a chunk size.
        NotEnoughGPUMemory: If not even one sample fits.
    """
    if predictor is None and chunk_size is None:
        raise ArgumentError(
            "the size of chunks is unknown without chunk_size and config; give chunk_size= or "
            "config="
        )
    selection = _Selection(model, n, predictor, problem_of)
    if (chunk_size is not None and chunk_size >= n) or selection.fits("plain"):
        return selection.choice("plain", n, "the whole batch fits in memory")
    chosen = selection.in_chunks(chunk_size, has_known_reduction) or selection.as_a_whole()
    if chosen is None:
        raise selection.error()
    return chosen


class _Selection:
    """Strategies that were considered for one batch, with their memory and their problems."""

    def __init__(
        self,
        model: nn.Module,
        n: int,
        predictor: MemoryPredictor | None,
        problem_of: Callable[[Strategy], str],
    ) -> None:
        self._model = model
        self._n = n
        self._predictor = predictor
        self._problem_of = problem_of
        self._device_bytes: dict[str, int | None] = {}
        self._problems: dict[str, str] = {}

    def choice(self, strategy: Strategy, chunk_size: int, why: str) -> StrategyChoice:
        return StrategyChoice(strategy, chunk_size, why, self._device_bytes)

    def fits(self, strategy: Strategy) -> bool:
        """Return whether the whole batch fits on the device with a strategy."""
        nbytes = self._predict(strategy, self._n)
        return self._predictor is not None and nbytes is not None and nbytes <= self._limit

    def in_chunks(self, chunk_size: int | None, has_known_reduction: bool) -> StrategyChoice | None:
        """Return the fastest right strategy that computes chunks; None if there is none."""
        if norms := batch_norms(self._model):
            self._problems["accumulate, two_pass"] = f"{norms[0]} normalizes over the batch"
            return None
        for strategy in chunk_strategies(has_known_reduction):
            size = chunk_size
            if size is None and self._predictor is not None:
                is_two_pass = strategy == "two_pass"
                size = self._predictor.chunk_size(self._n, in_two_passes=is_two_pass)
            assert size is not None
            if self._is_right(strategy):
                why = self._why_chunks(strategy)
                self._predict(strategy, size)
                return self.choice(strategy, min(size, self._n), why)
        return None

    def as_a_whole(self) -> StrategyChoice | None:
        """Return a strategy that sees the whole batch and fits; None if there is none."""
        why = describe_problems(self._problems)
        if self.fits("offload") and self._fits_on_host():
            return self.choice(
                "offload",
                self._n,
                f"chunks do not give its gradients ({why}) and its activations fit in host memory",
            )
        can_recompute = can_be_recomputed(self._model)
        if can_recompute and self.fits("checkpoint") and self._is_right("checkpoint"):
            return self.choice(
                "checkpoint",
                self._n,
                f"chunks do not give its gradients ({why}) and the whole batch fits if parts of "
                "the model are recomputed",
            )
        return None

    def error(self) -> ArgumentError:
        """Return the error that says why no strategy is possible."""
        problems = self._problems.values()
        # Outputs that cannot be cut are a problem of chunks, although the comparison finds it in
        # the plain step.
        if all(one.startswith(PLAIN_FAILS) and NEED_ROWS not in one for one in problems):
            return ArgumentError(
                f"{next(iter(problems))}, so no strategy can be compared with it; expected inputs "
                "and targets with which the step runs without pinfeed; if the step fails only with "
                "few samples, name a strategy and give prove=False"
            )
        why = describe_problems(self._problems)
        return ArgumentError(
            f"chunks do not give the gradients of {self._n} samples ({why}), and no strategy that "
            "computes the whole batch is known to fit in memory; give config= with larger limits, "
            "or strategy='offload' or 'checkpoint'; or change the model (GroupNorm instead of "
            "BatchNorm, eval() for layers whose state changes, outputs with one row for each "
            "sample); or, if the difference does not matter, give strategy='accumulate', "
            "strategy='two_pass' or prove=False"
        )

    @property
    def _limit(self) -> int:
        assert self._predictor is not None
        return self._predictor.limit

    def _predict(self, strategy: Strategy, chunk_size: int) -> int | None:
        nbytes = None
        if self._predictor is not None:
            nbytes = self._predictor.bytes_of(strategy, self._n, chunk_size)
        self._device_bytes[strategy] = nbytes
        return nbytes

    def _fits_on_host(self) -> bool:
        predictor = self._predictor
        return predictor is not None and predictor.offload.host_bytes <= predictor.host_limit

    def _is_right(self, strategy: Strategy) -> bool:
        if problem := self._problem_of(strategy):
            self._problems[strategy] = problem
        return not problem

    def _why_chunks(self, strategy: Strategy) -> str:
        if self._problems:
            return (
                "accumulate does not give the gradients of the plain step: "
                f"{self._problems['accumulate']}"
            )
        if strategy == "accumulate":
            return "the loss is a sum or mean of terms"
        return (
            "the loss is not known to be a sum or mean of terms, so it needs all outputs (give "
            "reduction= if it is)"
        )


def chunk_strategies(has_known_reduction: bool) -> tuple[Strategy, ...]:
    """Return the strategies that compute chunks and are possible for a loss, the fastest first."""
    return ("accumulate", "two_pass") if has_known_reduction else ("two_pass",)


def describe_problems(problems: Mapping[str, str]) -> str:
    """Return the problems of strategies as a clause that names each problem once."""
    names: dict[str, list[str]] = {}
    for name, problem in problems.items():
        names.setdefault(problem, []).append(name)
    return "; ".join(f"{', '.join(found)}: {problem}" for problem, found in names.items())
