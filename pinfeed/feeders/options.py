"""LoopOptions and its subclasses: groups of keyword options, for ``**options: Unpack[...]``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypedDict

from pinfeed.pipeline.active_run import Again
from pinfeed.pipeline.sources.samples import Apply
from pinfeed.rows.ranks import Ranks
from pinfeed.validation.arguments import check_choice, check_flag
from pinfeed.validation.functions import check_function
from pinfeed.validation.options import Default

FUNCTIONS = ("host_transform", "device_transform")
"""Names of the options that are functions on batches."""


class LoopOptions(TypedDict, total=False):
    """Options that every loop over batches has: what ends it, observes it, or changes its batches.

    A function that has a parameter ``generator`` gets a new ``torch.Generator`` for every batch. So
    its results depend neither on ``depth`` nor on resuming. ``host_transform`` gets a generator on
    the CPU, and ``device_transform`` one on the device. Both are seeded as follows, where ``which``
    is 0 for ``host_transform`` and 1 for ``device_transform``:

        numbers = (seed, epoch, batch, which)  # and the rank, if a Feeder has ranks
        state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
        generator = torch.Generator(device).manual_seed(int(state[0]))

    A negative seed counts modulo 2**64.

    A function must not change a batch that it has returned, or return the same memory again with
    other contents, because prefetched batches still wait for the loop.
    """

    again: Annotated[Again, Default("end")]
    """Rule for a loop that begins while an older one over the same feeder has not ended."""
    progress: Annotated[bool, Default(False)]
    """Whether to show a progress bar."""
    timeline: Annotated[bool, Default(False)]
    """Whether to record what takes time in every batch."""
    host_transform: Annotated[Callable[..., Any] | None, Default(None)]
    """Function that takes a batch on the host and returns one, before its ids are asked for."""
    device_transform: Annotated[Callable[..., Any] | None, Default(None)]
    """Function that takes a batch on the device and returns one; it runs in a side stream."""


class FeederOptions(LoopOptions, total=False):
    """Options that observe and check a loop over rows; the last arguments of ``Feeder``."""

    verify: Annotated[bool, Default(False)]
    """Whether to compare each batch with its rows in the stores."""


class LoaderOptions(LoopOptions, total=False):
    """Options of a loop over a loader; the last arguments of ``wrap_loader``."""

    on_error: Annotated[Literal["raise", "next"], Default("raise")]
    """Whether the error of a batch ends the loop, or the loop can continue with the next batch."""
    seed: Annotated[int | None, Default(None)]
    """Seed of the generators of functions on batches; None is 0."""


class TableLoopOptions(LoopOptions, total=False):
    """Options that observe and check a loop over tables; the last arguments of ``train_rows``."""

    verify: Annotated[bool, Default(False)]
    """Whether to compare the rows with those of the synchronous loop."""
    seed: Annotated[int | None, Default(None)]
    """Seed of the generators of functions on batches; None is 0."""


class ReaderOptions(TypedDict, total=False):
    """Options of ``wrap_readers``: samples, order of an epoch, observation of the loop."""

    apply_on_input_batch: Annotated[Apply | None, Default(None)]
    """Function that makes a batch of its input samples; None stacks them."""
    apply_on_output_batch: Annotated[Apply | None, Default(None)]
    """Function that makes a batch of its output samples; None stacks them."""
    input_dtype: Annotated[Any, Default(None)]
    """Dtype to which stacked input samples are converted; None keeps the dtype that they have."""
    output_dtype: Annotated[Any, Default(None)]
    """Dtype to which stacked output samples are converted; None keeps the dtype that they have."""
    shuffle: Annotated[bool, Default(False)]
    """Whether every epoch has another order."""
    seed: Annotated[int, Default(0)]
    """Seed of the shuffle; the order is a function of (seed, epoch)."""
    drop_last: Annotated[bool, Default(False)]
    """Whether to leave out a last batch that is not full."""
    ranks: Annotated[Ranks | Literal["pad", "drop", "join", "all"] | None, Default(None)]
    """Rule by which the processes of a job share an epoch."""
    again: Annotated[Again, Default("end")]
    """Rule for a loop that begins while an older one over the same feeder has not ended."""
    progress: Annotated[bool, Default(False)]
    """Whether to show a progress bar."""
    timeline: Annotated[bool, Default(False)]
    """Whether to record what takes time in every batch."""


def check_options(options: Mapping[str, Any]) -> None:
    """Check the options of a loop that are flags or functions, and ``again``.

    Raises:
        ArgumentError: If a flag is not a bool, a function is not callable, or ``again`` is no rule.
    """
    for name in ("verify", "progress", "timeline"):
        check_flag(options.get(name, False), name)
    check_choice(options["again"], "again", ("end", "refuse"))
    for name in FUNCTIONS:
        check_function(options.get(name), name)
