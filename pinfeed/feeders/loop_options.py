"""LoopOptions: arguments that all loops over batches have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pinfeed.devices.device import Device
from pinfeed.errors import ArgumentError
from pinfeed.memory.heap import trim_heap
from pinfeed.pipeline.active_run import Again
from pinfeed.pipeline.epochs import EpochRunner
from pinfeed.pipeline.loop_transforms import NO_TRANSFORMS, LoopTransforms
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.sources.base import Source
from pinfeed.pipeline.sources.transforms import BatchTransform, Seed
from pinfeed.validation.arguments import check_choice, check_flag, check_seed
from pinfeed.validation.functions import check_function, takes_generator


@dataclass(frozen=True)
class LoopOptions:
    """Arguments of every loop over batches: how it ends, what it records, and its transforms.

    Raises:
        ArgumentError: If a flag is not a bool, a function is not callable, or ``again`` is neither
            ``"end"`` nor ``"refuse"``.
    """

    again: Again
    progress: bool
    timeline: bool
    host_transform: Callable[..., Any] | None = None
    device_transform: Callable[..., Any] | None = None
    seed: int | None = None
    """Seed of the generators of the transforms; None for 0."""

    def __post_init__(self) -> None:
        check_flag(self.progress, "progress")
        check_flag(self.timeline, "timeline")
        check_choice(self.again, "again", ("end", "refuse"))
        check_function(self.host_transform, "host_transform")
        check_function(self.device_transform, "device_transform")

    @property
    def has_transforms(self) -> bool:
        """Whether the loop has transforms."""
        return self.host_transform is not None or self.device_transform is not None

    def require_generator_for_seed(self) -> None:
        """Check the seed of a loop over a loader, which draws the order itself.

        Raises:
            ArgumentError: If the seed is not a whole number, or no transform takes a generator.
        """
        if self.seed is None:
            return
        check_seed(self.seed)
        if not any(map(takes_generator, (self.host_transform, self.device_transform))):
            raise ArgumentError(
                f"seed={self.seed!r} was given, but no function with a parameter generator; "
                "expected a host_transform or device_transform that has it; to seed the order, "
                "give the DataLoader generator=torch.Generator().manual_seed(seed)"
            )

    def transforms(
        self, device: str, rank: int | None = None, *, is_limited: bool
    ) -> LoopTransforms:
        """Return the transforms of a loop, without the ``gather`` that reads rows for them.

        Args:
            device: Name of the device of the batches.
            rank: Rank of this process, if several processes share the epoch.
            is_limited: Whether the loop has a ``cpu_memory_limit``.
        """
        if not self.has_transforms:
            return NO_TRANSFORMS
        seed = 0 if self.seed is None else check_seed(self.seed)

        def transform(name: str, function: Any, which: int, device: str) -> BatchTransform | None:
            if function is None:
                return None
            # Otherwise, malloc keeps several times the memory of the plan after a few calls.
            after_call = trim_heap if is_limited and device == "cpu" else None
            return BatchTransform(name, function, Seed(seed, which, rank), device, after_call)

        return LoopTransforms(
            transform("host_transform", self.host_transform, 0, "cpu"),
            transform("device_transform", self.device_transform, 1, device),
        )

    def runner(
        self,
        source: Source,
        device: Device,
        schedule: PrefetchSchedule,
        transforms: LoopTransforms = NO_TRANSFORMS,
        capacity: Sequence[int] = (),
    ) -> EpochRunner:
        """Return the runner of the epochs of a feeder; see ``EpochRunner``."""
        return EpochRunner(
            source,
            device,
            schedule=schedule,
            capacity=capacity,
            progress=self.progress,
            timeline=self.timeline,
            again=self.again,
            transforms=transforms,
        )
