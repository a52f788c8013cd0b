"""First batches of an iterable: enough samples to compare a strategy with the plain step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from pinfeed.training.large_batch.strategies.micro_batches import (
    concatenate,
    n_samples,
    sample_shapes_and_dtypes,
)
from pinfeed.training.large_batch.strategies.step_spec import StepSpec

_MOST_BATCHES = 8
"""Most batches that are read before the first one is computed."""


def first_batches(batches: Iterable[tuple[Any, Any]], spec: StepSpec) -> list[tuple[Any, Any]]:
    """Read batches until they have two samples and a loss term, but at most eight batches."""
    return list(itertools.islice(_until_comparable(batches, spec), _MOST_BATCHES))


def _until_comparable(
    batches: Iterable[tuple[Any, Any]], spec: StepSpec
) -> Iterator[tuple[Any, Any]]:
    n = 0
    terms = 0.0
    for inputs, targets in batches:
        yield inputs, targets
        n += n_samples(inputs)
        terms += spec.count_terms(inputs, targets)
        if n > 1 and terms:
            return


def joined_with_first(batches: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Concatenate the batches whose samples have the shape of the first batch's samples."""
    shape = sample_shapes_and_dtypes(*batches[0])
    same_shape = [batch for batch in batches if sample_shapes_and_dtypes(*batch) == shape]
    inputs, targets = zip(*same_shape, strict=True)
    return concatenate(list(inputs)), None if targets[0] is None else concatenate(list(targets))
