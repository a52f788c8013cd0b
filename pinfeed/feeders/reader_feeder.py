"""wrap_readers(): prefetched batches of samples that a user's functions read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from pinfeed.devices import DeviceLike
from pinfeed.errors import ArgumentError, StoreError, described
from pinfeed.feeders.base_feeder import LoopOptions, ResumableFeeder
from pinfeed.feeders.hints import READER_HINTS
from pinfeed.feeders.row_selection import RowSelection, warn_if_empty
from pinfeed.memory.limits import check_depth
from pinfeed.pipeline.lent_batch import LentBatch
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.sources.sample_maker import SampleThreads
from pinfeed.pipeline.sources.sample_reader import ReaderSource, SampleReader
from pinfeed.rows.order_batches import OrderBatches, RankBatches
from pinfeed.rows.ranks import Ranks
from pinfeed.tensors.argument_types import DTypeLike, JoinSamples, ReadSamples
from pinfeed.tensors.dtypes import dtype_of
from pinfeed.validation.arguments import explain_arguments, whole_number

_MAX_READERS = 1024
"""Maximum number of inputs that are read at the same time, each in a thread of its own."""


@explain_arguments(READER_HINTS)
def wrap_readers(
    inputs: Sequence[object],
    outputs: Sequence[object],
    *,
    read_input: ReadSamples,
    get_output: ReadSamples,
    batch_size: int,
    one_read_count: int = 1,
    n_readers: int = 1,
    depth: int = 2,
    device: DeviceLike = "auto",
    apply_on_input_batch: JoinSamples | None = None,
    apply_on_output_batch: JoinSamples | None = None,
    input_dtype: DTypeLike | None = None,
    output_dtype: DTypeLike | None = None,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    ranks: Ranks | Literal["pad", "drop", "join", "all"] | None = None,
    progress: bool = False,
    timeline: bool = False,
    continuous: bool = False,
) -> ReaderFeeder:
    """Wrap functions that read samples, and prefetch batches ``(x, y)`` of them to the device.

    Inputs and outputs are paths, numbers, or any values that the functions take. Output i belongs
    to input i. Reader threads call ``read_input(inputs[i])`` and ``get_output(outputs[i])``, one
    batch after the other. Each function returns an iterable of ``one_read_count`` samples: arrays,
    CPU tensors or numbers. A batch contains the samples of ``batch_size // one_read_count`` inputs,
    in order. Each sample is copied into its batch before the next sample of that input is
    requested, so a function may yield the same array repeatedly. Every epoch calls the functions
    again.

    ``apply_on_input_batch`` and ``apply_on_output_batch`` take an iterator over the samples of a
    batch, after all of them have been read. They must consume all samples. The functions return
    arrays and tensors in any structure of tuples, lists, mappings, named tuples and dataclasses,
    which are copied to the device. Other leaves stay unchanged.

    In addition to the batches that the caller keeps, the device holds ``depth + 2`` batches. With
    a GPU, the host holds ``depth + 1`` page-locked (pinned) batches. The host also holds the
    samples of one input per reader, or with an ``apply_...`` function all samples of the batch that
    is being read. Memory does not grow from epoch to epoch.

    Examples:
        >>> feeder = pinfeed.wrap_readers(
        ...     inputs=["a.jpg", "b.jpg", "c.jpg", "d.jpg"],
        ...     outputs=[0, 1, 1, 0],
        ...     read_input=lambda path: [np.zeros((3, 32, 32), np.float32)],
        ...     get_output=lambda label: [label],
        ...     batch_size=2,
        ... )
        >>> for x, y in feeder:
        ...     loss = x.mean()
        >>> x.shape, y.shape
        (torch.Size([2, 3, 32, 32]), torch.Size([2]))

    Args:
        inputs: Arguments of ``read_input``, one for each call.
        outputs: Arguments of ``get_output``; as many as ``inputs``.
        read_input: Function that takes one of ``inputs`` and returns its samples.
        get_output: Function that takes one of ``outputs`` and returns as many samples.
        batch_size: Samples per batch, a multiple of ``one_read_count``.
        one_read_count: Samples per input; 1 by default.
        n_readers: Number of inputs of a batch that are read at the same time, each in a thread;
            1 by default, at most 1,024. With more than one, the functions must be thread-safe, and
            their calls run in no fixed order: random numbers from a shared generator differ in
            every run. The synchronous loop, ``depth=0``, has no threads.
        depth: Number of batches to prefetch; 2 by default, at most 1,024; 0 is the synchronous
            loop.
        device: Target device, as for ``Feeder``.
        apply_on_input_batch: Function that makes a batch of its input samples; None stacks samples
            of one shape.
        apply_on_output_batch: The same for output samples.
        input_dtype: Dtype of stacked input samples, of numpy or torch, or ``"bfloat16"``. None
            keeps their dtype, which must be the same for all.
        output_dtype: The same for output samples.
        shuffle: Whether every epoch has a new order of the inputs,
            ``pinfeed.rows.shuffled(seed)``. Every run of the program repeats the same orders, as
            for ``Feeder``, unless ``seed`` changes.
        seed: Seed of the shuffle, a whole number; 0 by default.
        drop_last: Whether to leave out a last batch that is not full.
        ranks: Rule by which the processes of a job share the inputs, as for ``Feeder``.
        progress: Whether to show a progress bar.
        timeline: Whether to record how long each stage of each batch takes.
        continuous: Whether the functions read the first batches of the next epoch before an epoch
            ends, so that its loop begins without a pause. True promises that they return the same
            samples as if they were called later. Between epochs, threads and up to ``depth``
            batches stay until ``close``.

    Raises:
        ArgumentError: If an argument is invalid, two arguments conflict, or ``seed`` is given
            without ``shuffle``.
        UnknownArgument: If an argument does not exist. The message names the one to use.
        DeviceError: If the device does not exist.
    """
    _check_identities(inputs, outputs)
    batch_size = whole_number(batch_size, "batch_size")
    one_read_count = whole_number(one_read_count, "one_read_count")
    n_readers = whole_number(n_readers, "n_readers", most=_MAX_READERS, note="; each is a thread")
    depth = check_depth(depth)
    selection = RowSelection(batch_size, None, None, shuffle, seed, drop_last, ranks)
    options = LoopOptions(progress, timeline, continuous=continuous, depth=depth, device=device)
    options.require_continuous()
    batches = _identity_batches(len(inputs), one_read_count, selection)
    readers = [
        _reader("input", read_input, inputs, one_read_count, apply_on_input_batch, input_dtype),
        _reader("output", get_output, outputs, one_read_count, apply_on_output_batch, output_dtype),
    ]
    return ReaderFeeder(readers, batches, selection.note_workers, n_readers, options)


class ReaderFeeder(ResumableFeeder[tuple[Any, Any]]):
    """Batches that a user's functions read, prefetched to the device; from ``wrap_readers``.

    Examples:
        >>> feeder = pinfeed.wrap_readers(
        ...     inputs=[1, 2, 3, 4],
        ...     outputs=[2, 4, 6, 8],
        ...     read_input=lambda value: [value],
        ...     get_output=lambda value: [value],
        ...     batch_size=2,
        ... )
        >>> [x.tolist() for x, y in feeder]
        [[1, 2], [3, 4]]

    Args:
        readers: Readers of the input samples and of the output samples.
        batches: Identities of each batch, in the order of the epoch.
        begin: Function that the feeder calls when a loop begins.
        n_readers: Number of inputs that are read at the same time.
        options: Options of the loop.
    """

    def __init__(
        self,
        readers: Sequence[SampleReader],
        batches: OrderBatches | RankBatches,
        begin: Callable[[], object],
        n_readers: int,
        options: LoopOptions,
    ) -> None:
        depth = options.depth or 0
        device = self._open_device(options.device, n_spare=len(readers) * (depth + 2))
        self._begin = begin
        # The loop's own reader thread, or the thread of the synchronous loop, reads in turn.
        is_in_turn = min(n_readers, batches.batch_size) == 1 or not depth
        threads = SampleThreads(device.worker, 0 if is_in_turn else n_readers)
        source = ReaderSource(batches, threads, readers)
        self._loop = options.runner(source, device, PrefetchSchedule(depth))

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Begin the next epoch.

        Returns:
            Iterator over batches ``(x, y)`` on the device. ``next()`` raises the error of a
            function in place of its batch, with its own traceback and a note with the input.

        Raises:
            ClosedError: If the feeder is closed, or an older loop over it runs and cannot be ended.
        """
        return self._loop.run(LentBatch.take, begin=self._begin)

    @property
    def _batches_in_words(self) -> str:
        found = self._loop.source.fingerprint
        return f"{found['identities']:,} inputs; batches of {found['batch_size']:,} samples"


def _check_identities(inputs: Any, outputs: Any) -> None:
    """Raise ArgumentError unless both are sequences, and equally long."""
    for name, values in (("inputs", inputs), ("outputs", outputs)):
        kind = type(values).__name__
        # An index into a pandas object is a label, not a position.
        if hasattr(values, "iloc"):
            raise ArgumentError(f"{name}: got {kind}; expected a list; give column.tolist()")
        is_sequence = hasattr(values, "__len__") and hasattr(values, "__getitem__")
        if isinstance(values, (str, bytes, Mapping)) or not is_sequence:
            raise ArgumentError(f"{name}: got {kind}; expected a list, or another sequence")
    if len(inputs) != len(outputs):
        raise ArgumentError(
            f"got {len(inputs)} inputs and {len(outputs)} outputs; expected as many "
            "inputs as outputs"
        )


def _identity_batches(
    n_identities: int, one_read_count: int, selection: RowSelection
) -> OrderBatches | RankBatches:
    """Return the inputs of each batch of this process, and warn if there are none.

    Raises:
        ArgumentError: If a batch would contain a part of an input.
    """
    assert selection.batch_size is not None
    size, remainder = divmod(selection.batch_size, one_read_count)
    if remainder:
        below = size * one_read_count
        above = below + one_read_count
        sizes = f"{below} or {above}" if below else f"{above}"
        raise ArgumentError(
            f"batch_size={selection.batch_size} is not a multiple of "
            f"one_read_count={one_read_count}, but a batch contains all samples of its inputs; "
            f"give batch_size={sizes}"
        )
    if selection.rank_batches is None:
        batches = OrderBatches(selection.all_rows, n_identities, size, selection.drop_last)
        warn_if_empty(batches, "inputs")
        return batches
    size = selection.rank_batches.size // one_read_count
    of_rank = dataclasses.replace(selection.rank_batches, size=size, n_rows=n_identities)
    warn_if_empty(of_rank, "inputs")
    return of_rank


def _reader(
    kind: str, function: Any, values: Sequence[Any], n_samples: int, apply: Any, dtype: Any
) -> SampleReader:
    """Return the reader of the input samples or of the output samples.

    Raises:
        ArgumentError: If a function cannot be called, or the dtype is none of samples.
    """
    reader = SampleReader(kind, function, values, n_samples, apply, None)
    if not callable(function):
        raise ArgumentError(
            f"{reader.function_name}={function!r}: expected a function that returns samples"
        )
    if dtype is not None and apply is not None:
        raise ArgumentError(
            f"both {reader.apply_name} and {kind}_dtype were given, but the function decides the "
            f"dtype of its batch; leave out {kind}_dtype"
        )
    if apply is not None and not callable(apply):
        raise ArgumentError(
            f"{reader.apply_name}={apply!r}: expected a function that makes a batch from its "
            "samples"
        )
    if dtype is None:
        return reader
    try:
        return dataclasses.replace(reader, dtype=dtype_of(dtype, f"{kind}_dtype"))
    except StoreError as error:
        raise ArgumentError(
            f"{kind}_dtype={dtype!r} is no dtype of samples ({described(error)}); expected a dtype "
            "that both numpy and torch have"
        ) from None
