"""StrategyChoice: the strategy for a batch, and the rules that choose it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pinfeed.errors import ArgumentError
from pinfeed.memory.units import MiB
from pinfeed.training.large_batch.batches import n_samples
from pinfeed.training.large_batch.memory_predictor import MemoryPredictor
from pinfeed.training.large_batch.step_comparison import PLAIN_FAILS
from pinfeed.training.large_batch.step_spec import StepSpec, batch_norms
from pinfeed.training.large_batch.verifier import Verifier
from pinfeed.training.large_batch.whole_steps import can_be_recomputed

Strategy = Literal["plain", "accumulate", "two_pass", "checkpoint", "offload"]
STRATEGIES: tuple[Strategy, ...] = ("plain", "accumulate", "two_pass", "checkpoint", "offload")
CHUNK_STRATEGIES: tuple[Strategy, ...] = ("accumulate", "two_pass")
"""Strategies that compute a batch in chunks, the fastest first."""
DIFFERS = "does not give the gradients of the plain step"
"""Description of a strategy that is not right."""


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
) -> StrategyChoice:
    """Choose the strategy for a batch, as ``"auto"`` does.

    Args:
        spec: The model, in the mode in which it is trained, and the loss.
        batch: Inputs and targets.
        chunk_size: Samples of a chunk; None for the largest chunk that fits.
        predictor: Predicts the memory of strategies; None if there is no limit.
        verifier: Compares strategies with the plain step.

    Raises:
        ArgumentError: If no strategy gives the gradients of the plain step, or there is neither a
            limit nor a chunk size.
        NotEnoughGPUMemory: If not even one sample fits.
    """
    n = n_samples(batch[0])
    problems: dict[str, str] = {}

    def fits(strategy: Strategy) -> bool:
        return predictor is not None and predictor.fits(strategy, n)

    def is_right(strategy: Strategy) -> bool:
        if problem := verifier.problem_of(strategy, spec, *batch):
            problems[strategy] = problem
        return not problem

    if (chunk_size is not None and chunk_size >= n) or fits("plain"):
        return StrategyChoice("plain", n, "the whole batch fits in memory")
    norms = batch_norms(spec.model)
    for strategy in CHUNK_STRATEGIES if spec.reduction else CHUNK_STRATEGIES[1:]:
        if norms:
            problems[strategy] = f"{norms[0]} normalizes over the batch"
            continue
        size = size_of_chunks(strategy, n, chunk_size, predictor)
        if is_right(strategy):
            return StrategyChoice(strategy, min(size, n), _why_chunks(strategy, problems))
    why = f"chunks do not give its gradients ({_described(problems)}) and"
    if predictor is not None and fits("offload"):
        why = f"{why} its activations fit in host memory"
        return StrategyChoice("offload", n, why, predictor.room_for_activations(n))
    if can_be_recomputed(spec.model) and fits("checkpoint") and is_right("checkpoint"):
        why = f"{why} the whole batch fits if parts of the model are recomputed"
        return StrategyChoice("checkpoint", n, why)
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
        "larger limits, or strategy='offload' or 'checkpoint'; or change the model (GroupNorm "
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
