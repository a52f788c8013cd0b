"""Functions on batches: checks of the options, and the seeds of their generators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pinfeed.errors import ArgumentError
from pinfeed.feeders.options import FUNCTIONS
from pinfeed.pipeline.sources.batch_functions import BatchFunction, Seed
from pinfeed.validation.arguments import check_seed
from pinfeed.validation.functions import takes_generator


def has_functions(options: Mapping[str, Any]) -> bool:
    """Tell whether a loop has functions on batches."""
    return any(options[name] is not None for name in FUNCTIONS)


def check_seed_of_functions(options: Mapping[str, Any]) -> None:
    """Check the seed of a loop whose order is its loader's.

    Raises:
        ArgumentError: If the seed is not a whole number, or no function gets a generator.
    """
    seed = options["seed"]
    if seed is None:
        return
    check_seed(seed)
    if not any(takes_generator(options[name]) for name in FUNCTIONS):
        raise ArgumentError(
            f"seed={seed!r} was given, and no function with a parameter generator; the seed is for "
            "the generators of host_transform and device_transform; the DataLoader draws the "
            "order: give it generator=torch.Generator().manual_seed(seed)"
        )


def batch_function(
    name: str, options: Mapping[str, Any], seed: int | None, device: str, rank: int | None = None
) -> BatchFunction | None:
    """Return a function on batches; None if the user gave none.

    Args:
        name: Name of the option.
        options: Options of the loop.
        seed: Seed of the generators; None for 0.
        device: Name of the device that the generators draw on.
        rank: Number of this process, if several share the epoch.
    """
    function = options[name]
    if function is None:
        return None
    number = 0 if seed is None else check_seed(seed)
    return BatchFunction(name, function, Seed(number, FUNCTIONS.index(name), rank), device)
