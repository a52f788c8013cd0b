"""Conditions under which a strategy is compared with the plain step: model, samples, rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from pinfeed.errors import described
from pinfeed.tensors.pytree import flatten
from pinfeed.training.large_batch.equivalence.rounding import Rounding
from pinfeed.training.large_batch.strategies.step_spec import StepSpec

MOST_COMPARED = 3
"""Most samples on which a strategy is compared with the plain step."""
ONE_BY_ONE = "accumulate one by one"
"""``"accumulate"`` for batches that arrive one by one; their term count is known at the end."""
PLAIN_FAILS = "the plain step fails"
"""Beginning of the message for a problem that the plain step has as well."""

Edges = Sequence[tuple[int, int]]
"""First row, and row after the last, of each chunk."""


@dataclass(frozen=True)
class StepSamples:
    """Samples on which a strategy is compared with the plain step.

    Attributes:
        inputs: The samples, on the device.
        targets: Their targets, on the device; or None.
        edges: Edges of their chunks.
    """

    inputs: Any
    targets: Any
    edges: Edges

    @property
    def n(self) -> int:
        """Number of samples."""
        return self.edges[-1][1]


@dataclass(frozen=True)
class Conditions:
    """Inputs and settings that both sides of a comparison share.

    Attributes:
        spec: The model and the loss.
        samples: The samples.
        random: State of the random generators at the beginning of each computation.
        context: Function that makes the context for forward passes and losses.
        rounding: Differences that count as rounding.
    """

    spec: StepSpec
    samples: StepSamples
    random: dict[str, Any]
    context: Callable[[], AbstractContextManager[Any]]
    rounding: Rounding


def cloned(batch: Any) -> Any:
    """Return a copy of the batch in memory of its own, because a model may change its inputs."""
    leaves, rebuild = flatten(batch)
    return rebuild(_clone(leaf) for _, leaf in leaves)


def _clone(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip() or described(error)).splitlines()[0]
