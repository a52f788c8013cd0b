"""measure_transforms(), plan_samples(): predict memory by calls of functions on trial batches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from pinfeed.devices.device import Device
from pinfeed.errors import add_note
from pinfeed.feeders.base_feeder import LoopOptions
from pinfeed.feeders.row_selection import RowSelection
from pinfeed.memory.limits import usual_batch_size
from pinfeed.memory.plan import Allocation, Plan, Route
from pinfeed.pipeline.host_transfer import rows_on_host
from pinfeed.pipeline.lent_batch import LentBatch
from pinfeed.pipeline.loop_memory import PartSize, loop_allocations, order_allocations
from pinfeed.pipeline.loop_transforms import LoopTransforms, TransformNbytes
from pinfeed.pipeline.planner import free_memory
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.sources.row_source import RowSource
from pinfeed.pipeline.sources.sample_maker import SampleThreads
from pinfeed.pipeline.sources.sample_source import Samples, SampleSource
from pinfeed.pipeline.sources.source import Source
from pinfeed.pipeline.sources.text_rows import row_source
from pinfeed.pipeline.store_tree import StoreTree
from pinfeed.readahead.read_plan import RaggedReads
from pinfeed.readahead.strategy import DirectReads
from pinfeed.rows.order_batches import OrderBatches
from pinfeed.rows.orders import Order, sequential
from pinfeed.stores.store import row_nbytes

_TRIAL_BYTES = 1 << 20
"""Bytes of the rows of the smaller trial batch. Allocators round up the memory of small batches."""
_TRIAL_SAMPLES = 4
"""Samples of the larger trial batch."""


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
        small = _run_rows(tree, device, transforms, n_rows)
        large = _run_rows(tree, device, transforms, min(2 * n_rows, tree.n_rows))
    return linear_nbytes(small, large)


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


def _run_rows(
    tree: StoreTree, device: Device, transforms: LoopTransforms, n_rows: int
) -> tuple[int, TransformNbytes]:
    """Run the synchronous loop over one batch of the first rows.

    Returns:
        Bytes of the rows, and bytes that the transforms took.
    """
    reads = [DirectReads(store) for store in tree.stores]
    ragged = [RaggedReads(one, list(map(DirectReads, one.parts))) for one in tree.ragged]
    batches = OrderBatches(sequential(), n_rows, n_rows, False)
    source = RowSource(tree.stores, reads, tree.rebuild, batches, ragged)
    source = row_source(source, tree.texts)
    rows_nbytes = n_rows * (sum(map(row_nbytes, tree.stores)) + tree.made_row_nbytes)
    # The bounds of ragged rows do not count: their share is larger in small rows than in large
    # ones.
    for one in tree.ragged:
        *items, _ = one.read_parts(np.arange(n_rows))
        rows_nbytes += sum(part.nbytes for part in items)
    what = f"in a trial with the first {n_rows} rows, for the limits of config"
    return _run_trial(source, device, transforms, what, rows_nbytes)


def _run_samples(
    samples: Samples, sample: Any, n: int, device: Device, transforms: LoopTransforms
) -> tuple[int, TransformNbytes]:
    """Run the synchronous loop over one batch that has a sample in each of ``n`` places."""
    maker = dataclasses.replace(
        samples.maker, read=lambda index: sample, transform=None, read_batch=None
    )
    same = dataclasses.replace(samples, maker=maker, n_threads=0, skipped=None)
    threads = SampleThreads(device.worker, 0)
    source = SampleSource(OrderBatches(sequential(), n, n), threads, same)
    return _run_trial(source, device, transforms, "with the first sample, for the plan")


def _run_trial(
    source: Source,
    device: Device,
    transforms: LoopTransforms,
    what: str,
    batch_nbytes: int | None = None,
) -> tuple[int, TransformNbytes]:
    """Run the first batch of the synchronous loop over a source as a trial.

    Args:
        source: The source.
        device: Device of the batches.
        transforms: The transforms of the loop.
        what: Note for an error.
        batch_nbytes: Bytes of the rows of the batch; None for those that the loop counts.

    Returns:
        Bytes of the rows, and bytes that the transforms took.
    """
    from pinfeed.tensors.transform_calls import trial

    options = LoopOptions(progress=False, timeline=False)
    runner = options.runner(source, device, PrefetchSchedule(0), transforms)
    with contextlib.closing(runner), trial(device.name) as peak:
        try:
            next(runner.run(LentBatch.take))
        except Exception as error:
            add_note(error, what)
            raise
        took = transforms.measured_nbytes
        if batch_nbytes is None:
            batch_nbytes = runner.stats.bytes
        moved = batch_nbytes if transforms.host is None else took.host_returned
        working = max(0, peak() - moved - took.device_new)
        return batch_nbytes, took._replace(device_working=working)


def plan_samples(
    samples: Samples,
    sample: Any,
    selection: RowSelection,
    device: Device,
    schedule: PrefetchSchedule,
    transforms: LoopTransforms,
) -> Plan:
    """Return the plan of batches whose samples are like one, from trials with batches of it.

    Args:
        samples: The samples, at least one, and how batches are made of them.
        sample: The one sample.
        selection: Order and batch size, or the limits that decide it.
        device: Device of the batches.
        schedule: Number of batches to prefetch.
        transforms: The transforms.

    Raises:
        BudgetError: If the limits cannot hold batches of one sample.
        Exception: If ``collate_fn`` or a transform fails; its error.
    """
    from pinfeed.tensors.sample_layout import SampleLayout
    from pinfeed.tensors.transform_calls import nbytes_of

    one, many = (_run_samples(samples, sample, n, device, transforms) for n in (1, _TRIAL_SAMPLES))
    per_sample = max(1, many[0] // _TRIAL_SAMPLES)
    nbytes_alive = max(per_sample, nbytes_of(sample, ())[0])
    stacks = samples.collate is None and SampleLayout(sample).stacks
    transform_nbytes = linear_nbytes(one, many)
    assert isinstance(selection.order, Order)
    kept = order_allocations(selection.order)
    most = max(1, selection.order.length(samples.n))
    config = selection.config
    unified = device.unified
    route: Route = "direct" if unified else "staged"
    limits: tuple[int | None, int | None] = (None, None)
    if config is not None:
        gpu = None
        if not unified:
            gpu = config.gpu_memory_limit or config.device_limit(device.free_bytes())
        limits = (free_memory((), config).memory, gpu)

    def plan_of(n: int, depth: int) -> Plan:
        at = dataclasses.replace(schedule, depth=depth)
        part = PartSize(n * per_sample, 0, is_staged=not unified)
        items = loop_allocations([part], n, at, unified=unified)
        if transforms:
            items += transform_nbytes(n * per_sample).allocations(depth, unified=unified)
        n_alive = samples.n_alive(at, n, stacks=stacks)
        alive = Allocation("samples that are being made", "host", n_alive, nbytes_alive)
        return Plan(n, depth, route, (*items, *kept, alive), *limits)

    if config is None:
        size = min(selection.batch_size or 1, most)
    else:
        usual = usual_batch_size(lambda n: n * per_sample)
        most = min(most, config.preferred_batch_size or usual)
        size = config.largest_batch(plan_of, most, schedule.depth)
    note = "all samples count as many bytes as dataset[0]"
    return dataclasses.replace(plan_of(size, schedule.depth), notes=(note,))
