"""measure_transforms(): calls transforms on trial batches, to predict the memory that they take."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import numpy as np

from pinfeed.devices.device import Device
from pinfeed.errors import add_note
from pinfeed.feeders.base_feeder import LoopOptions
from pinfeed.pipeline.epochs import EpochRunner
from pinfeed.pipeline.host_transfer import rows_on_host
from pinfeed.pipeline.lent_batch import LentBatch
from pinfeed.pipeline.loop_transforms import LoopTransforms, TransformNbytes
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.sources.row_source import RowSource
from pinfeed.pipeline.store_tree import StoreTree
from pinfeed.readahead.read_plan import RaggedReads
from pinfeed.readahead.strategy import DirectReads
from pinfeed.rows.batches import OrderBatches
from pinfeed.rows.orders import sequential
from pinfeed.stores.store import row_nbytes

_TRIAL_BYTES = 1 << 20
"""Bytes of the rows of the smaller trial batch. Allocators round up the memory of small batches."""


def measure_transforms(
    tree: StoreTree, device: Device, transforms: LoopTransforms
) -> Callable[[int], TransformNbytes]:
    """Predict the memory of transforms from two batches of the first rows.

    Args:
        tree: Stores of the rows.
        device: Device of the batches.
        transforms: The transforms, without their ``gather``.

    Returns:
        Function from the bytes of the rows of a batch to the memory of its transforms.

    Raises:
        Exception: If a transform raised it; a note says that this was a trial.
    """
    n_rows = min(max(2, _TRIAL_BYTES // max(1, tree.row_nbytes)), max(1, tree.n_rows // 2))
    with contextlib.ExitStack() as stack:
        if transforms.host is not None:
            gather = rows_on_host((), 1)
            stack.callback(gather.device.close)
            transforms = dataclasses.replace(transforms, gather=gather)
        small_rows, small = _run(tree, device, transforms, n_rows)
        large_rows, large = _run(tree, device, transforms, min(2 * n_rows, tree.n_rows))

    return linear_nbytes((small_rows, small), (large_rows, large))


def linear_nbytes(
    small: tuple[int, TransformNbytes], large: tuple[int, TransformNbytes]
) -> Callable[[int], TransformNbytes]:
    """Return the memory of transforms as a linear function of the bytes of the rows of a batch.

    Args:
        small: Bytes of the rows of a batch, and the memory measured for it.
        large: The same for a batch of as many rows, or more.
    """
    lines = [
        linear((small[0], y), (large[0], more_y))
        for y, more_y in zip(small[1], large[1], strict=True)
    ]
    return lambda rows_nbytes: TransformNbytes(*(line(rows_nbytes) for line in lines))


def linear(small: tuple[int, int], large: tuple[int, int]) -> Callable[[int], int]:
    """Return the linear function through two measurements, which never decreases.

    Args:
        small: Bytes of the rows of a batch, and the bytes measured for it.
        large: The same for a batch of as many rows, or more.
    """
    x, y = small
    more_x, more_y = large
    if x == more_x:
        # One measurement cannot show memory that does not depend on the batch.
        x, y = 0, 0
    per_byte = max(0.0, (more_y - y) / max(1, more_x - x))
    fixed = max(0.0, more_y - per_byte * more_x)
    return lambda rows_nbytes: round(fixed + per_byte * rows_nbytes)


def _run(
    tree: StoreTree, device: Device, transforms: LoopTransforms, n_rows: int
) -> tuple[int, TransformNbytes]:
    """Run the synchronous loop over one batch of the first rows.

    Returns:
        Bytes of the rows, and bytes that the transforms took.
    """
    reads = [DirectReads(store) for store in tree.stores]
    ragged = [RaggedReads.direct(one) for one in tree.ragged]
    batches = OrderBatches(sequential(), n_rows, n_rows, False)
    source = RowSource(tree.stores, reads, tree.rebuild, batches, ragged)
    options = LoopOptions(progress=False, timeline=False)
    runner = options.runner(source, device, PrefetchSchedule(0), transforms)
    what = f"in a trial with the first {n_rows} rows, for the limits of config"
    took, peak_nbytes = run_trial(runner, device, transforms, what)
    rows_nbytes = n_rows * (sum(map(row_nbytes, tree.stores)) + tree.made_row_nbytes)
    # The bounds of ragged rows do not count: their share is larger in small rows than in large
    # ones.
    for one in tree.ragged:
        *items, _ = one.read_parts(np.arange(n_rows))
        rows_nbytes += sum(part.nbytes for part in items)
    moved = took.host_returned if transforms.host is not None else rows_nbytes
    working = max(0, peak_nbytes - moved - took.device_new)
    return rows_nbytes, took._replace(device_working=working)


def run_trial(
    runner: EpochRunner, device: Device, transforms: LoopTransforms, what: str
) -> tuple[TransformNbytes, int]:
    """Run the first batch of a loop as a trial, and end the loop.

    Args:
        runner: Runner of the loop.
        device: Device of the batches.
        transforms: The transforms of the loop.
        what: Note for an error.

    Returns:
        Bytes that the transforms took, and the peak of GPU memory in bytes.
    """
    from pinfeed.tensors.transform_calls import trial

    with contextlib.closing(runner), trial(device.name) as peak:
        try:
            next(runner.run(LentBatch.take))
        except Exception as error:
            add_note(error, what)
            raise
        return transforms.measured_nbytes, peak()
