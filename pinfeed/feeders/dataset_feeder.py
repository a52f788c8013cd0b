"""wrap_dataset(): prefetched batches of the samples of a dataset, which threads make."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sized
from typing import Any, Literal, cast

from pinfeed.devices import DeviceLike
from pinfeed.errors import ArgumentError
from pinfeed.feeders.base_feeder import LoopOptions, ResumableFeeder, T_co
from pinfeed.feeders.hints import SAMPLE_HINTS
from pinfeed.feeders.memory_trials import plan_samples
from pinfeed.feeders.row_selection import RowSelection
from pinfeed.memory.limits import DEFAULT_DEPTH, MemoryLimits, check_optional_depth
from pinfeed.memory.plan import Plan
from pinfeed.pipeline.lent_batch import LentBatch
from pinfeed.pipeline.loop_transforms import NO_TRANSFORMS, LoopTransforms
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.sources.sample_batch import SkippedSamples
from pinfeed.pipeline.sources.sample_maker import SampleMaker, SampleThreads
from pinfeed.pipeline.sources.sample_source import Samples, SampleSource, batch_reader
from pinfeed.pipeline.sources.user_calls import guarded
from pinfeed.rows.order_batches import OrderBatches, RankBatches
from pinfeed.rows.orders import Order
from pinfeed.rows.ranks import Ranks
from pinfeed.tensors.argument_types import BatchFunction, Collate, MapDataset, SampleFunction
from pinfeed.validation.arguments import check_flag, check_function, explain_arguments, whole_number

MAX_THREADS = 1024
"""Maximum number of samples that are made at the same time."""


@explain_arguments(SAMPLE_HINTS)
def wrap_dataset(
    dataset: MapDataset,
    transform: SampleFunction | None = None,
    *,
    batch_size: int | None = None,
    config: MemoryLimits | None = None,
    threads: int | None = None,
    rows: Order | None = None,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    ranks: Ranks | Literal["pad", "drop", "join", "all"] | None = None,
    collate_fn: Collate | None = None,
    device_transform: BatchFunction | None = None,
    on_error: Literal["raise", "next", "skip"] = "raise",
    max_skipped: int = 100,
    reproducible: bool = True,
    depth: int | None = None,
    device: DeviceLike = "auto",
    progress: bool = False,
    timeline: bool = False,
    continuous: bool | None = None,
) -> DatasetFeeder[Any]:
    """Wrap a dataset whose samples take work, such as images, and prefetch batches to the device.

    Threads of this process make the samples, instead of worker processes: nothing is pickled, the
    dataset exists once, and the first batch does not wait for processes to start. Threads run at
    the same time while a function reads files, decodes, or computes in torch or numpy, because this
    code releases the interpreter's lock. They cannot speed up functions of pure Python code.

    Batches, and the random numbers of each sample, do not depend on the number of threads, ranks or
    batches, nor on where an epoch was resumed. The random numbers are a function of (seed, epoch,
    index of the sample):

    - A ``transform`` with a parameter ``generator`` gets a new ``torch.Generator``, and one with a
      parameter ``rng`` a new ``numpy.random.Generator``.
    - Functions of torch without ``generator=``, as in transforms of torchvision, draw from the
      generator of the sample, too. In ``collate_fn``, they draw from one of the batch.
    - Python's ``random`` module and the global generator of numpy are shared by all threads. If
      ``dataset[0]`` draws from them, it is refused, unless ``reproducible`` is False.

    The dataset and the functions must be thread-safe. A file position and an open HDF5 file are
    not; open one for each thread, in a ``threading.local``.

    If the dataset has ``__getitems__``, as those of Hugging Face, one thread makes each batch in
    one call, as in a ``DataLoader``. Functions of torch in that call draw from a generator of the
    batch. Set ``depth`` to the number of threads to keep all of them busy. To make samples one by
    one, wrap ``range(len(dataset))`` with ``transform=dataset.__getitem__``.

    Samples that torch's ``default_collate`` would stack are written straight into their place in a
    batch, which is page-locked (pinned) for a GPU.

    Examples:
        >>> images = [np.full((3, 8, 8), i, np.uint8) for i in range(100)]
        >>> def augment(image, generator):
        ...     flips = torch.rand((), generator=generator) < 0.5
        ...     image = torch.from_numpy(image).float() / 255
        ...     return image.flip(-1) if flips else image
        >>> for batch in pinfeed.wrap_dataset(images, augment, batch_size=32, shuffle=True):
        ...     loss = batch.mean()
        >>> batch.shape
        torch.Size([4, 3, 8, 8])

    Args:
        dataset: Anything with ``__getitem__`` and ``__len__``: a ``torch.utils.data.Dataset``, or a
            list of paths or of pairs of a path and a label. It must not change while a loop runs.
        transform: Function that takes an item of the dataset, such as a pair, as one argument, and
            returns a sample; None if the items are the samples.
        batch_size: Samples per batch. Give either this or ``config``.
        config: A ``pinfeed.Config`` with memory limits, from which pinfeed computes the batch size.
            It makes ``dataset[0]``, and calls ``device_transform`` on batches of it, to predict
            their memory; all samples count as many bytes.
        threads: Number of threads that make samples, each computing with one torch thread, at most
            1,024. None is the number of cores that this process may use.
        rows: Order of the samples, one of ``pinfeed.rows``. None is the order of the dataset.
        shuffle: Whether every epoch has a new order, as for ``Feeder``.
        seed: Seed of the shuffle and of the random numbers of the samples, a whole number.
        drop_last: Whether to leave out a last batch that is not full.
        ranks: Rule by which the processes of a job share the samples, as for ``Feeder``.
        collate_fn: Function that makes a batch from a list of samples. None is torch's
            ``default_collate``.
        device_transform: Function that takes each batch on the device, as for ``Feeder``.
        on_error: Effect of an error. With ``"raise"``, the loop ends with the error of the first
            sample that failed. With ``"next"``, ``next()`` of the loop's iterator raises it, and
            another ``next()`` returns the next batch. With ``"skip"``, bad samples are left out,
            logged, and listed in ``skipped``. Their batch is shorter, and the loop has no batch
            without samples, so that the order, ``len`` and states do not depend on errors. Items
            are then read one by one, even if the dataset has ``__getitems__``.
        max_skipped: Number of samples in a loop that may be skipped; another one raises ReadError.
        reproducible: Whether random numbers depend on the sample alone. False also permits global
            generators.
        depth: Number of batches to prefetch, at most 1,024; 0 is the synchronous loop. None is
            ``config.depth``, or 2.
        device: Target device, as for ``Feeder``.
        progress: Whether to show a progress bar.
        timeline: Whether to record how long each stage of each batch takes.
        continuous: Whether threads make the first batches of the next epoch before an epoch ends,
            so that its loop begins without a pause. Give False if the dataset or a function changes
            between epochs. Between epochs, threads and up to ``depth`` batches stay until
            ``close``.

    Raises:
        ArgumentError: If an argument is invalid, two arguments conflict, the dataset has no items
            by index, or ``dataset[0]`` draws from a global generator.
        UnknownArgument: If an argument does not exist. The message names the one to use.
        BudgetError: If the limits of ``config`` cannot hold batches of one sample.
        DeviceError: If the device does not exist.
        Exception: If the first sample fails; its error.
    """
    _check_dataset(dataset, rows)
    for name, function in (("transform", transform), ("collate_fn", collate_fn)):
        check_function(function, name)
    skipped = SkippedSamples.for_option(on_error, max_skipped)
    check_flag(reproducible, "reproducible")
    n_threads = check_threads(threads)
    depth = check_optional_depth(depth)
    selection = RowSelection(batch_size, config, rows, shuffle, seed, drop_last, ranks)
    if depth is None:
        depth = DEFAULT_DEPTH if config is None or config.depth is None else config.depth
    if continuous is None:
        continuous = depth > 0
    if skipped is not None:
        device_transform = SkippedSamples.passing(device_transform)
    options = LoopOptions(
        progress, timeline, None, device_transform, seed, None, continuous, depth, device
    )
    options.require_continuous()
    # The error of a whole batch would not say which samples to leave out.
    read_batch = batch_reader(dataset) if skipped is None else None
    samples = Samples(
        SampleMaker(dataset.__getitem__, transform, seed, reproducible, read_batch),
        len(cast(Sized, dataset)),
        n_threads if depth else 0,
        collate_fn,
        skipped,
        keeps_errors=on_error == "next",
    )
    return DatasetFeeder(samples, selection, options)


class DatasetFeeder(ResumableFeeder[T_co]):
    """Batches of the samples of a dataset, prefetched to the device; from ``wrap_dataset``.

    Examples:
        >>> feeder = pinfeed.wrap_dataset(range(4), lambda i: i * i, batch_size=2)
        >>> [batch.tolist() for batch in feeder]
        [[0, 1], [4, 9]]
    """

    def __init__(self, samples: Samples, selection: RowSelection, options: LoopOptions) -> None:
        is_limited = selection.config is not None
        first = None
        if samples.n:
            # A loop that continues after errors may begin with one.
            may_fail = samples.may_fail and not is_limited
            first = first_sample(samples.maker, may_fail=may_fail)
        self._samples = samples
        self._selection = selection
        depth = options.depth or 0
        on = self._open_device(options.device, n_spare=depth + 2)
        self._schedule = PrefetchSchedule(depth)
        self._transforms = options.transforms(on.name, selection.rank, is_limited=is_limited)
        self._plan = Plan(selection.batch_size or 1, depth, "staged", ())
        if is_limited and samples.n:
            self._plan = self._planned(first, self._transforms)
        batches = selection.batches(samples.n, self._plan)
        assert isinstance(batches, (OrderBatches, RankBatches))
        threads = SampleThreads(on.worker, samples.n_threads)
        source = SampleSource(batches, threads, samples)
        schedule = samples.schedule(self._schedule, batches.batch_size)
        self._loop = options.runner(source, on, schedule, self._transforms)

    @property
    def plan(self) -> Plan:
        """Batch size and memory of every buffer; ``print(feeder.plan)`` explains them in words.

        Without ``config``, this makes ``dataset[0]`` to measure the bytes of a sample. The plan has
        no memory if that sample fails and the loop would continue.
        """
        if self._selection.config is not None:
            return self._plan
        samples = self._samples
        if samples.n and not self._plan.items:
            first = first_sample(samples.maker, may_fail=samples.may_fail)
            if first is not None:
                self._plan = self._planned(first, NO_TRANSFORMS)
        return self._transforms.with_measured(self._plan, unified=self._device.unified)

    def _planned(self, first: Any, transforms: LoopTransforms) -> Plan:
        """Return the plan, given the first sample."""
        plan = plan_samples(
            self._samples, first, self._selection, self._device, self._schedule, transforms
        )
        return self._selection.with_notes(plan, self._samples.n, unified=self._device.unified)

    def __iter__(self) -> Iterator[T_co]:
        """Begin the next epoch.

        Returns:
            Iterator over batches on the device. ``next()`` raises the error of a sample in place of
            its batch, with its own traceback and a note with the index.

        Raises:
            ClosedError: If the feeder is closed, or an older loop over it runs and cannot be ended.
        """
        skipped = self._samples.skipped
        return self._loop.run(
            LentBatch.take,
            begin=self._begin,
            through=(lambda batches: batches) if skipped is None else skipped.without_empty,
            keeps_errors=self._samples.keeps_errors,
        )

    @property
    def skipped(self) -> list[tuple[int, int, Exception]]:
        """Epoch, index and error of each sample that loops have left out, in order."""
        return [] if self._samples.skipped is None else self._samples.skipped.found

    @property
    def _batches_in_words(self) -> str:
        found = self._loop.source.fingerprint
        return f"{found['n_samples']:,} samples; batches of {found['batch_size']:,}"

    def _begin(self) -> None:
        self._selection.note_workers()
        if self._samples.skipped is not None:
            self._samples.skipped.begin()


def check_threads(threads: int | None) -> int:
    """Return the number of threads that make samples; None is the number of cores.

    Raises:
        ArgumentError: If it is not a whole number from 1 to ``MAX_THREADS``.
    """
    if threads is None:
        return len(os.sched_getaffinity(0))
    note = ", or None for one per core; each is a thread that makes samples"
    return whole_number(threads, "threads", most=MAX_THREADS, note=note)


def _check_dataset(dataset: Any, rows: Any) -> None:
    """Raise ArgumentError unless a dataset has a length, and items by index, in a known order."""
    if rows is not None and not isinstance(rows, Order):
        raise ArgumentError(
            f"rows is a {type(rows).__name__}; expected an order of pinfeed.rows; for a sampler, "
            "use pinfeed.wrap_loader(DataLoader(dataset, sampler=...), threads=...)"
        )
    advice = ""
    if isinstance(dataset, (str, bytes, os.PathLike)):
        advice = (
            "give a list of paths and a transform that reads one, pinfeed.TarDataset(path) for an "
            "archive, or use pinfeed.Feeder(path)"
        )
    elif hasattr(dataset, "batch_sampler"):
        advice = "for a loader, use pinfeed.wrap_loader(loader, threads=...)"
    elif isinstance(dataset, Mapping) or hasattr(dataset, "iloc"):
        advice = "its items have keys; give a list of its values"
    elif not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        advice = (
            "for an iterable of batches, use pinfeed.wrap_loader; for the rows of a store, give "
            "pinfeed.RowDataset(store)"
        )
    if advice:
        raise ArgumentError(
            f"dataset is a {type(dataset).__name__}; expected a dataset with items by index and a "
            f"length; {advice}"
        )


def first_sample(maker: SampleMaker, *, may_fail: bool = False) -> Any:
    """Return ``dataset[0]`` as a sample of epoch 0; global generators stay as they are.

    Args:
        maker: Makes the sample.
        may_fail: Whether to return None if the sample fails.

    Raises:
        ArgumentError: If it draws from a global generator, but samples must be reproducible.
        Exception: If the sample fails; its error.
    """
    from pinfeed.tensors.sample_random import global_draws
    from pinfeed.tensors.transform_calls import trial

    with trial("cpu"), maker.in_thread(0, [0], [0]) as make:
        try:
            sample, drawn = global_draws(functools.partial(guarded, make, 0))
        except Exception:
            if not may_fail:
                raise
            return None
    if drawn and maker.reproducible:
        raise ArgumentError(
            f"dataset[0] draws from the global generator of {' and '.join(drawn)}, which all "
            "threads share, so its numbers would depend on the other threads; expected random "
            "numbers from a parameter of transform named generator (torch.Generator) or rng "
            "(numpy.random.Generator), or from functions of torch; give reproducible=False for "
            "numbers that differ in every run"
        )
    return sample
