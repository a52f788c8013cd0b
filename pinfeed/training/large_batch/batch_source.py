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
    """Read batches until there are two samples and a term of the loss, at most eight of them."""
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
    """Concatenate those batches whose samples have the shape of the first one."""
    shape = sample_shapes_and_dtypes(*batches[0])
    alike = [batch for batch in batches if sample_shapes_and_dtypes(*batch) == shape]
    inputs, targets = zip(*alike, strict=True)
    return concatenate(list(inputs)), None if targets[0] is None else concatenate(list(targets))
