"""Transforms: checks of their options, and the seeds of their generators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pinfeed.errors import ArgumentError
from pinfeed.feeders.options import TRANSFORMS
from pinfeed.memory.heap import trim_heap
from pinfeed.pipeline.sources.transforms import BatchTransform, Seed
from pinfeed.validation.arguments import check_seed
from pinfeed.validation.functions import takes_generator


def has_transforms(options: Mapping[str, Any]) -> bool:
    """Return whether a loop has transforms."""
    return any(options[name] is not None for name in TRANSFORMS)


def check_seed_of_transforms(options: Mapping[str, Any]) -> None:
    """Check the seed of a loop over a loader, which draws the order itself.

    Raises:
        ArgumentError: If the seed is not a whole number, or no transform takes a generator.
    """
    seed = options["seed"]
    if seed is None:
        return
    check_seed(seed)
    if not any(takes_generator(options[name]) for name in TRANSFORMS):
        raise ArgumentError(
            f"seed={seed!r} was given, but no function with a parameter generator; expected a "
            "host_transform or device_transform that has it; to seed the order, give the "
            "DataLoader generator=torch.Generator().manual_seed(seed)"
        )


def batch_transform(
    name: str,
    options: Mapping[str, Any],
    seed: int | None,
    device: str,
    rank: int | None = None,
    *,
    is_limited: bool = False,
) -> BatchTransform | None:
    """Return a transform; None if the user gave none.

    Args:
        name: Name of the option.
        options: Options of the loop.
        seed: Seed of the generators; None for 0.
        device: Name of the device that the generators draw on.
        rank: Rank of this process, if several processes share the epoch.
        is_limited: Whether the loop has a ``cpu_memory_limit``.
    """
    function = options[name]
    if function is None:
        return None
    number = 0 if seed is None else check_seed(seed)
    # Otherwise, malloc keeps several times the memory of the plan after a few calls.
    after_call = trim_heap if is_limited and device == "cpu" else None
    which = TRANSFORMS.index(name)
    return BatchTransform(name, function, Seed(number, which, rank), device, after_call)
