"""Which way to take for a batch: by what each takes, and whether it gives the gradients of the whole batch for this model and loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tabulate import tabulate
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pinfeed.devices import resolve
from pinfeed.errors import ArgumentError, EstimateError, NotEnoughCPUMemory, NotEnoughGPUMemory
from pinfeed.memory.host import free_host_bytes
from pinfeed.memory.limits import MemoryLimits
from pinfeed.memory.units import human
from pinfeed.training.large_batch.equivalence.comparison import PLAIN_FAILS
from pinfeed.training.large_batch.simulated_steps import (
    OffloadStep,
    TwoPassStep,
    accumulate_step,
    checkpoint_step,
)
from pinfeed.training.large_batch.strategies.micro_batches import NEED_ROWS, sample_spec_of
from pinfeed.training.large_batch.strategies.recompute import can_be_recomputed
from pinfeed.training.memory_model.estimate import Step, StepEstimator, bytes_there, plain_step
from pinfeed.training.memory_model.sizing import largest_that_fits

Strategy = Literal["plain", "accumulate", "two_pass", "checkpoint", "offload"]
MOST_COMPARED = 3
"""Samples on which a strategy is compared with the plain step."""
STRATEGIES: tuple[Strategy, ...] = ("plain", "accumulate", "two_pass", "checkpoint", "offload")


@dataclass(frozen=True)
class StrategyChoice:
    """A decision. ``str(chosen)`` says it.

    Attributes:
        strategy: How gradients are computed.
        chunk_size: Samples at a time.
        why: A sentence.
        device_bytes: What the strategies that were looked at are predicted to take, in bytes; None
            where that is not known.
    """

    strategy: Strategy
    chunk_size: int
    why: str
    device_bytes: dict[str, int | None]

    def __str__(self) -> str:
        said = f"{self.strategy}, {self.chunk_size} samples at a time: {self.why}"
        rows = [
            (name, "?" if nbytes is None else human(nbytes))
            for name, nbytes in self.device_bytes.items()
        ]
        return (
            f"{said}\n{tabulate(rows, headers=('strategy', 'device memory'))}"
            if any(self.device_bytes.values())
            else said
        )


def batch_norms(model: nn.Module) -> list[str]:
    """Modules whose output for a sample depends on the other samples, and whose statistics on how many there are."""
    norms = [
        (name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)
    ]
    return [name for name, norm in norms if norm.training or norm.running_mean is None]


class MemoryPredictor:
    """What each strategy takes, as far as it can be predicted.

    Args:
        estimator: Of the step.
        limit: Bytes of the device.
        host_limit: Bytes of the host.
        n_ahead: Chunks that are on the device beside the one that is computed.
    """

    def __init__(self, estimator: StepEstimator, limit: int, host_limit: int, n_ahead: int) -> None:
        self._estimator = estimator
        self.limit = limit
        self.host_limit = host_limit
        sample = sum(estimator.inputs.nbytes) + sum(
            estimator.targets.nbytes if estimator.targets is not None else ()
        )
        self._ahead = n_ahead * sample
        self.offload = OffloadStep()
        self.why_not = ""
        # One has no variance.
        self._least = (
            2 if isinstance(estimator.model, nn.Module) and batch_norms(estimator.model) else 1
        )

    def chunk_size(self, n: int | None, *, in_two_passes: bool = False) -> int:
        """The largest chunk of a batch of ``n`` that fits, with gradients that are there already.

        Raises:
            NotEnoughGPUMemory: Not even one sample does.
            NotEnoughCPUMemory: Likewise, where training is on the CPU.
        """

        def need(size: int) -> int:
            taken = self.bytes_of(
                "two_pass" if in_two_passes else "accumulate", n or size, max(size, self._least)
            )
            if taken is None:
                raise EstimateError(f"{self.why_not}; or give chunk_size=")
            return taken

        found = largest_that_fits(need, self.limit, n)
        if not found:
            error, name = self._not_enough()
            raise error(
                f"chunks of one sample need {human(need(1))} ({need(1)} bytes); {name} is {human(self.limit)} ({self.limit} bytes)"
            )
        return found

    def _not_enough(self) -> tuple[type[NotEnoughGPUMemory] | type[NotEnoughCPUMemory], str]:
        if self._estimator.device == "cuda":
            return NotEnoughGPUMemory, "gpu_memory_limit"
        return NotEnoughCPUMemory, "cpu_memory_limit"

    def n_compared(self, n: int) -> int:
        """Return the number of samples that can be compared: they fit whole, with one more set of gradients.

        Raises:
            NotEnoughGPUMemory: Not even two samples fit.
            NotEnoughCPUMemory: Likewise, where training is on the CPU.
        """
        model = self._estimator.model
        gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        most = min(n, MOST_COMPARED)
        for size in range(most, 1, -1):
            taken = self.bytes_of("plain", size, size)
            if taken is None or taken + gradients <= self.limit:
                return size
        error, name = self._not_enough()
        needed = human((taken or 0) + gradients)
        raise error(
            f"two samples, which are compared with the plain step, need {needed}; {name} is {human(self.limit)} ({self.limit} bytes); "
            "raise the limit, or give prove=False"
        )

    def bytes_of(self, strategy: Strategy, n: int, chunk_size: int) -> int | None:
        """What a strategy takes of the device; None if that cannot be predicted."""
        size = n if strategy != "accumulate" else min(n, chunk_size)
        steps: dict[str, Step] = {
            "plain": plain_step,
            "accumulate": accumulate_step,
            "two_pass": TwoPassStep(chunk_size),
            "checkpoint": checkpoint_step,
            "offload": self.offload,
        }
        ahead = min(n, chunk_size) * self._ahead if strategy in ("accumulate", "two_pass") else 0
        try:
            return self._estimator.at(size, steps[strategy]).reserved_bytes + ahead
        except EstimateError as error:
            self.why_not = str(error)
            return None


def choose_strategy(
    model: nn.Module,
    n: int,
    chunk_size: int | None,
    is_made_of_parts: bool,
    predictor: MemoryPredictor | None,
    problem_of: Callable[[Strategy], str],
) -> StrategyChoice:
    """The way for a batch of ``n``.

    Args:
        model: In the mode in which it is trained.
        n: Samples.
        chunk_size: At a time; None for the largest that fits.
        is_made_of_parts: Whether the loss is said to be made of the losses of chunks.
        predictor: None where there is no limit.
        problem_of: Says in what a strategy differs from the plain step; "" if in nothing.

    Raises:
        ArgumentError: No strategy gives the gradients of the plain step, or there is neither a
            limit nor a chunk size.
        NotEnoughGPUMemory: Not even one sample fits.
    """
    if predictor is None and chunk_size is None:
        raise ArgumentError(
            "neither chunk_size nor a config with a limit was given; give one of them"
        )
    taken: dict[str, int | None] = {}
    problems: dict[str, str] = {}

    def fits(name: Strategy) -> bool:
        found = taken[name] = None if predictor is None else predictor.bytes_of(name, n, n)
        return predictor is not None and found is not None and found <= predictor.limit

    def is_right(name: Strategy) -> bool:
        if problem := problem_of(name):
            problems[name] = problem
        return not problem

    if (chunk_size is not None and chunk_size >= n) or fits("plain"):
        return StrategyChoice("plain", n, "the whole batch fits", taken)
    norms = batch_norms(model)
    if norms:
        problems["accumulate, two_pass"] = f"{norms[0]} normalizes over the batch"
    else:
        whole = "the loss is computed of all outputs, for it is not known to be made of those of chunks (reduction= tells)"
        for name in chunk_strategies(is_made_of_parts):
            size = chunk_size
            if size is None and predictor is not None:
                size = predictor.chunk_size(n, in_two_passes=name == "two_pass")
            assert size is not None
            if is_right(name):
                why = "the loss is made of the losses of chunks" if name == "accumulate" else whole
                if problems:
                    why = f"accumulate is wrong: {problems['accumulate']}"
                taken[name] = None if predictor is None else predictor.bytes_of(name, n, size)
                return StrategyChoice(name, min(size, n), why, taken)
    why = describe_problems(problems)
    if (
        fits("offload")
        and predictor is not None
        and predictor.offload.host_bytes <= predictor.host_limit
    ):
        return StrategyChoice(
            "offload",
            n,
            f"chunks are wrong ({why}), and what is kept for the backward pass fits on the host",
            taken,
        )
    if can_be_recomputed(model) and fits("checkpoint") and is_right("checkpoint"):
        return StrategyChoice(
            "checkpoint",
            n,
            f"chunks are wrong ({why}), and the whole batch fits if parts are computed again",
            taken,
        )
    why = describe_problems(problems)
    # Outputs that cannot be cut are a problem of chunks, although the comparison finds it in the
    # plain step.
    if all(
        problem.startswith(PLAIN_FAILS) and NEED_ROWS not in problem
        for problem in problems.values()
    ):
        raise ArgumentError(
            f"{next(iter(problems.values()))}, so that no strategy can be compared with it; expected inputs and targets with which the "
            "step runs without pinfeed, too; if it fails with few samples alone, name a strategy and give prove=False"
        )
    raise ArgumentError(
        f"chunks do not give the gradients of {n} samples ({why}), and no strategy that sees all of them is known to fit; give config= "
        "with larger limits, or strategy='offload' or 'checkpoint'; or change the model: GroupNorm in place of BatchNorm, eval() for "
        "layers whose state changes, outputs with one row for each sample; or, if you know that the difference does not matter, name "
        "strategy='accumulate' or 'two_pass', or give prove=False"
    )


def chunk_strategies(is_made_of_parts: bool) -> tuple[Strategy, ...]:
    """Strategies that compute chunks, the fastest first, for a loss that is said to be made of the losses of chunks or not."""
    return ("accumulate", "two_pass") if is_made_of_parts else ("two_pass",)


def describe_problems(problems: Mapping[str, str]) -> str:
    """Problems of strategies as a clause; those that have the same one together."""
    names: dict[str, list[str]] = {}
    for name, problem in problems.items():
        names.setdefault(problem, []).append(name)
    return "; ".join(f"{', '.join(found)}: {problem}" for problem, found in names.items())


def memory_predictor_for(
    model: nn.Module,
    config: MemoryLimits,
    device: torch.device,
    inputs: Any,
    targets: Any = None,
    *,
    loss: Any = None,
    optimizer: Any = None,
    autocast: torch.dtype | None = None,
) -> MemoryPredictor:
    """A predictor for batches like this one, under the limits of ``config``; without loss and optimizer, as ``estimate`` has it then."""
    # What is free is beside them, and the estimate counts them again.
    there = bytes_there(model, device)
    on_gpu, limit = device.type == "cuda", config.gpu_memory_limit
    host = config.host_limit(free_host_bytes() + (0 if on_gpu else there))
    if on_gpu and limit is None:
        limit = int((resolve(device, n_spare=0).free_bytes() + there) * (1 - config.headroom))
    estimator = StepEstimator(
        model,
        sample_spec_of(inputs),
        None if targets is None else sample_spec_of(targets),
        loss=loss,
        optimizer=optimizer if optimizer is not None else getattr(config, "optimizer", None),
        device="cuda" if limit is not None else "cpu",
        autocast=autocast,
    )
    return MemoryPredictor(estimator, host if limit is None else limit, host, n_ahead=2)
