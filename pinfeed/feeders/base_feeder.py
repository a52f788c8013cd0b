"""BaseFeeder: what all feeders share, and the arguments that all their loops have."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from pinfeed.devices import DeviceLike, resolve
from pinfeed.devices.device import Device
from pinfeed.errors import ArgumentError
from pinfeed.memory.host import trim_heap
from pinfeed.pipeline.epochs import EpochRunner
from pinfeed.pipeline.loop_transforms import NO_TRANSFORMS, LoopTransforms
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.sources.source import Source
from pinfeed.pipeline.sources.user_calls import BatchTransform, Seed
from pinfeed.profiling.stats import FeederStats
from pinfeed.profiling.timeline import Timeline
from pinfeed.stores.store import ClosedOnExit
from pinfeed.tensors.argument_types import State
from pinfeed.validation.arguments import (
    check_flag,
    check_function,
    check_seed,
    takes_generator,
    whole_number,
)

T_co = TypeVar("T_co", covariant=True)

MAX_TRANSFORM_THREADS = 64
"""Most threads that call ``host_transform``. Each takes the memory of a batch."""


def no_items(feeder: object, rows: object) -> NoReturn:
    """Refuse to give samples to a DataLoader. Every feeder has this as ``__getitems__``.

    No feeder has ``__getitem__``, because numpy would then take a feeder in a list for a sequence,
    and would iterate over an epoch.

    Raises:
        TypeError: Always.
    """
    raise TypeError(
        f"a DataLoader asked a {type(feeder).__name__} for samples; expected a loop over the "
        "feeder itself, `for batch in feeder`, which already batches and prefetches; if you need "
        "a DataLoader, give it pinfeed.RowDataset(source)"
    )


class BaseFeeder(ClosedOnExit, Generic[T_co]):
    """Loop over batches on a device, with statistics, a timeline and ``close``.

    A subclass calls ``_open_device`` and sets ``_loop`` in its constructor, and defines
    ``__iter__``, ``__len__`` and ``_batches_in_words``.
    """

    _device: Device
    _owned_device: Device | None
    _loop: EpochRunner

    if not TYPE_CHECKING:
        # Type checkers know the attributes of each feeder.

        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            text = f"{kind!r} object has no attribute {name!r}"
            if name == "dataset":
                text = (
                    f"a {kind} has no dataset to make a DataLoader of, as skip_first_batches and "
                    "prepare_data_loader of Accelerate do; loop over it as it is; to resume an "
                    "epoch, use its load_state_dict() (a Trainer of transformers then needs "
                    "ignore_data_skip=True); to share its rows among processes, give ranks="
                )
            raise AttributeError(text, name=name, obj=self)

    __getitems__ = no_items

    def __reduce__(self) -> NoReturn:
        """Refuse to pickle or copy a feeder: its threads and buffers belong to one process.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied, because its threads and memory "
            "belong to this process; pass paths, arrays or a function instead, and make the feeder "
            "in the process that uses it (its state_dict() can be sent)"
        )

    def __repr__(self) -> str:
        kind = type(self).__name__
        try:
            return f"<{kind}: {self._batches_in_words} on {self.device}, {self._loop}>"
        except Exception:
            # The constructor has failed, or an object of the user is broken.
            return f"<{kind}>"

    @property
    def device(self) -> str:
        """Name of the device, as torch spells it."""
        return self._device.name

    @property
    def stats(self) -> FeederStats:
        """Statistics of all loops so far; ``print(feeder.stats)`` explains them in words."""
        return self._loop.stats

    @property
    def timeline(self) -> Timeline:
        """Timeline of all loops so far; ``feeder.timeline.save("timeline.png")`` draws it.

        Raises:
            ArgumentError: If the feeder was made without ``timeline=True``.
        """
        return self._loop.timeline

    def close(self) -> None:
        """End a running loop, complete its write-backs, and close what the feeder opened.

        Inside a loop, it ends that loop as ``break`` does. A second call does nothing. Objects
        that the user gave (a loader, a store, a Device) stay open.

        Raises:
            Exception: If a write-back failed and no loop has raised its error; that error.
        """
        with contextlib.ExitStack() as stack:
            if self._owned_device is not None:
                stack.callback(self._owned_device.close)
            self._close_sources(stack)
            stack.callback(self._loop.close)

    @property
    def _batches_in_words(self) -> str:
        """The source and the size of the batches, for ``repr``."""
        raise NotImplementedError

    def _open_device(self, device: DeviceLike, n_spare: int) -> Device:
        """Find the device that the user named, and own it unless the user gave a Device.

        Args:
            device: The user's ``device`` argument.
            n_spare: Number of device buffers that may be kept for reuse.
        """
        self._device = resolve(device, n_spare=n_spare)
        self._owned_device = None if self._device is device else self._device
        return self._device

    def _close_sources(self, stack: contextlib.ExitStack) -> None:
        """Add callbacks that close the sources, which run after the loop has ended."""


class ResumableFeeder(BaseFeeder[T_co]):
    """Feeder that draws its order itself, and so knows its epoch and position."""

    def __len__(self) -> int:
        """Return the number of batches in an epoch.

        Raises:
            TypeError: If the number is unknown, because ``rows`` has no length.
        """
        return len(self._loop.source)

    @property
    def epoch(self) -> int:
        """Number of the running epoch, or of the next one if no loop runs."""
        return self._loop.epoch

    def set_epoch(self, number: int) -> None:
        """Set the number of the next loop's epoch.

        Without a call, every loop is the epoch after the previous one. If a position in epoch
        ``number`` was loaded, the loop still continues there. A program may therefore call this
        before every epoch, including the one that it resumes.

        Args:
            number: Number of the epoch, at least 0.

        Raises:
            ArgumentError: If ``number`` is not a whole number, or is negative.
            ClosedError: If a loop runs and cannot be ended, or the feeder is closed.
        """
        self._loop.set_epoch(number)

    def state_dict(self) -> State:
        """Return the position of the loop, as plain values.

        During a training step, the batch of that step counts as done. Prefetched batches do not
        count.
        """
        return self._loop.state()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Make the next loop continue at a saved position, with the remaining batches.

        With ``ranks``, the state of any rank holds for all ranks, and for another world size: see
        ``Ranks``. An order continues with the next row, whatever the batch size was.

        Args:
            state: Return value of ``state_dict``.

        Raises:
            ArgumentError: If ``state`` is not a state of a feeder, or belongs to a feeder with
                other rows, another order, or a sampler in batches of another size.
            ClosedError: If a loop runs and cannot be ended, or the feeder is closed.
        """
        self._loop.load_state(state)


@dataclass(frozen=True)
class LoopOptions:
    """Arguments of every loop over batches: how it ends, what it records, and its transforms.

    Raises:
        ArgumentError: If a flag is not a bool, a function is not callable, or
            ``transform_threads`` is invalid.
    """

    progress: bool
    timeline: bool
    host_transform: Callable[..., Any] | None = None
    device_transform: Callable[..., Any] | None = None
    seed: int | None = None
    """Seed of the generators of the transforms; None for 0."""
    transform_threads: int | None = None
    """Number of threads that call ``host_transform``; None for one."""
    continuous: bool | None = None
    """Whether a loop that only reads may read the next epoch before one ends; None is False."""
    depth: int | None = None
    """Number of batches to prefetch; None if the loop chooses it, or is given it otherwise."""
    device: DeviceLike = "auto"
    """Target device, as the user named it."""

    def __post_init__(self) -> None:
        check_flag(self.progress, "progress")
        check_flag(self.timeline, "timeline")
        check_function(self.host_transform, "host_transform")
        check_function(self.device_transform, "device_transform")
        if self.continuous is not None:
            check_flag(self.continuous, "continuous")
        given = self.transform_threads
        if given is None:
            return
        note = ", or None for one thread; more threads than cores have no benefit"
        n_threads = whole_number(given, "transform_threads", most=MAX_TRANSFORM_THREADS, note=note)
        object.__setattr__(self, "transform_threads", n_threads)
        if self.host_transform is None:
            raise ArgumentError(
                f"transform_threads={given!r} was given without host_transform, which these "
                "threads call; expected both; give host_transform, or leave out transform_threads "
                "(device_transform is called for one batch at a time)"
            )

    @property
    def has_transforms(self) -> bool:
        """Whether the loop has transforms."""
        return self.host_transform is not None or self.device_transform is not None

    def in_threads(self, schedule: PrefetchSchedule, *, are_readers: bool) -> PrefetchSchedule:
        """Return a schedule with the threads that call ``host_transform``.

        Args:
            schedule: Schedule with the depth that the user has given, or its default.
            are_readers: Whether these threads are the reader threads.
        """
        return schedule.with_transform_threads(self.transform_threads or 1, are_readers=are_readers)

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

    def require_continuous(self, reason: str = "") -> None:
        """Check that ``continuous=True`` does not conflict with other arguments.

        Args:
            reason: Why the loop cannot be continuous, with what to do; empty if it can.

        Raises:
            ArgumentError: If it conflicts.
        """
        if not self.continuous:
            return
        if self.depth == 0:
            reason = "depth=0 reads nothing ahead; give another depth"
        if reason:
            raise ArgumentError(
                f"continuous=True reads the next epoch before one ends, but {reason}, or leave out "
                "continuous"
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
        seed = 0 if self.seed is None else check_seed(self.seed)
        # Otherwise, malloc keeps several times the memory of the plan after a few calls.
        trim = trim_heap if is_limited else None
        host = on_device = None
        if (function := self.host_transform) is not None:
            host = BatchTransform("host_transform", function, Seed(seed, 0, rank), "cpu", trim)
        if (function := self.device_transform) is not None:
            trim = trim if device == "cpu" else None
            on_device = BatchTransform(
                "device_transform", function, Seed(seed, 1, rank), device, trim
            )
        return LoopTransforms(host, on_device)

    def runner(
        self,
        source: Source,
        device: Device,
        schedule: PrefetchSchedule,
        transforms: LoopTransforms = NO_TRANSFORMS,
        capacity: Sequence[int] = (),
    ) -> EpochRunner:
        """Return the runner of the epochs of a feeder; see ``EpochRunner``.

        ``continuous`` decides whether its loops may continue, as the feeder has set it.
        """
        return EpochRunner(
            source,
            device,
            schedule=schedule,
            capacity=capacity,
            progress=self.progress,
            timeline=self.timeline,
            transforms=transforms,
            continuous=bool(self.continuous),
        )
