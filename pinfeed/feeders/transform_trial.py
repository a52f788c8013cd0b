"""measure_transforms(): calls transforms on trial batches, to predict the memory that they take."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import NamedTuple

import numpy as np

from pinfeed.devices.base import Device
from pinfeed.errors import add_note
from pinfeed.feeders.loop_options import LoopOptions
from pinfeed.memory.transform_memory import Nbytes, TransformMemory, linear
from pinfeed.pipeline.host_transfer import rows_on_host
from pinfeed.pipeline.lent_batch import LentBatch
from pinfeed.pipeline.loop_transforms import LoopTransforms
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.sources.store_rows import RowSource
from pinfeed.pipeline.store_tree import StoreTree
from pinfeed.readahead import RaggedReads
from pinfeed.readahead.base import DirectReads
from pinfeed.rows.batches import OrderBatches
from pinfeed.rows.orders import sequential
from pinfeed.stores.base import row_nbytes

_TRIAL_BYTES = 1 << 20
"""Bytes of the rows of the smaller trial batch. Allocators round up the memory of small batches."""


class _Trial(NamedTuple):
    """Bytes that a trial batch took."""

    rows: int
    host_returned: int
    host_new: int
    device_new: int
    device_working: int


def measure_transforms(
    tree: StoreTree, device: Device, transforms: LoopTransforms
) -> TransformMemory:
    """Predict the memory of transforms from two batches of the first rows.

    Args:
        tree: Stores of the rows.
        device: Device of the batches.
        transforms: The transforms, without their ``gather``.

    Raises:
        Exception: If a transform raised it; a note says that this was a trial.
    """
    n_rows = min(max(2, _TRIAL_BYTES // max(1, tree.row_nbytes)), max(1, tree.n_rows // 2))
    with contextlib.ExitStack() as stack:
        if transforms.host is not None:
            gather = rows_on_host((), 1)
            stack.callback(gather.device.close)
            transforms = dataclasses.replace(transforms, gather=gather)
        small = _run(tree, device, transforms, n_rows)
        large = _run(tree, device, transforms, min(2 * n_rows, tree.n_rows))

    def predicted(name: str) -> Nbytes:
        return linear((small.rows, getattr(small, name)), (large.rows, getattr(large, name)))

    return TransformMemory(
        has_host=transforms.host is not None,
        **{name: predicted(name) for name in _Trial._fields if name != "rows"},
    )


def _run(tree: StoreTree, device: Device, transforms: LoopTransforms, n_rows: int) -> _Trial:
    """Run the synchronous loop over one batch of the first rows."""
    from pinfeed.tensors.trial import trial

    reads = [DirectReads(store) for store in tree.stores]
    ragged = [RaggedReads(one, DirectReads(one.items), one.items, None) for one in tree.ragged]
    batches = OrderBatches(sequential(), n_rows, n_rows, False)
    source = RowSource(tree.stores, reads, tree.rebuild, batches, ragged)
    options = LoopOptions("refuse", progress=False, timeline=False)
    runner = options.runner(source, device, PrefetchSchedule(0), transforms)
    with contextlib.closing(runner), trial(device.name) as peak:
        try:
            next(runner.run(LentBatch.take))
        except Exception as error:
            add_note(error, f"in a trial with the first {n_rows} rows, for the limits of config")
            raise
        peak_nbytes = peak()
    rows_nbytes = n_rows * sum(map(row_nbytes, tree.stores))
    # The bounds of ragged rows do not count: their share is larger in small rows than in large
    # ones.
    rows_nbytes += sum(one.read(np.arange(n_rows))[0].nbytes for one in tree.ragged)
    host_returned, host_new, device_new = transforms.measured_nbytes
    moved = host_returned if transforms.host is not None else rows_nbytes
    working = max(0, peak_nbytes - moved - device_new)
    return _Trial(rows_nbytes, host_returned, host_new, device_new, working)
