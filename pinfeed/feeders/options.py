"""LoopOptions and others: groups of keyword options, for ``**options: Unpack[...]``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from pinfeed.pipeline.sources.samples import Apply
from pinfeed.rows.ranks import Ranks
from pinfeed.validation.options import Default


class LoopOptions(TypedDict, total=False):
    """Options that observe a loop over batches."""

    progress: Annotated[bool, Default(False)]
    """Whether to show a progress bar."""
    timeline: Annotated[bool, Default(False)]
    """Whether to record what takes time in every batch."""


class FeederOptions(LoopOptions, total=False):
    """Options that observe and check a loop over rows; the last arguments of ``Feeder``."""

    verify: Annotated[bool, Default(False)]
    """Whether to compare each batch with its rows in the stores."""


class LoaderOptions(LoopOptions, total=False):
    """Options that observe a loop over a loader; the last arguments of ``wrap_loader``."""


class TableLoopOptions(LoopOptions, total=False):
    """Options that observe and check a loop over tables; the last arguments of ``train_rows``."""

    verify: Annotated[bool, Default(False)]
    """Whether to compare the rows with those of the synchronous loop."""


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
    progress: Annotated[bool, Default(False)]
    """Whether to show a progress bar."""
    timeline: Annotated[bool, Default(False)]
    """Whether to record what takes time in every batch."""
