"""wrap_readers(): identities that a user's functions read, as a source."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from pinfeed.devices import resolve
from pinfeed.errors import ArgumentError, StoreError, described
from pinfeed.feeders.feeder import HINTS, warn_of_no_batch
from pinfeed.memory.limits import check_depth, safe_repr
from pinfeed.pipeline.epochs import EpochRunner, no_copy, no_items
from pinfeed.pipeline.lent_batch import LentBatch
from pinfeed.pipeline.rank_plan import share_of
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.pipeline.sources.functions import ReaderSource
from pinfeed.pipeline.sources.samples import Apply, SampleReader
from pinfeed.profiling.stats import FeederStats
from pinfeed.profiling.timeline import Timeline
from pinfeed.rows.batches import OrderBatches
from pinfeed.rows.orders import sequential, shuffled
from pinfeed.rows.rank_batches import RankBatches
from pinfeed.rows.rank_warnings import note_workers
from pinfeed.rows.ranks import Ranks
from pinfeed.tensors.dtypes import dtype_of
from pinfeed.validation.arguments import check_flag, check_seed, explain_arguments, whole_number

_MAX_READERS = 1024
"""Most identities that are read at the same time. Each is read in a thread of its own."""
_HINTS = {
    **HINTS,
    **dict.fromkeys(
        ("num_workers", "workers", "n_workers"), "the threads that read are n_readers="
    ),
    **dict.fromkeys(
        ("sampler", "batch_sampler", "rows", "order"),
        "give inputs and outputs in the order that is wanted, or shuffle=True",
    ),
    **dict.fromkeys(
        ("dataset", "data", "source", "path", "x"),
        "the lists of inputs and of outputs come first, without names",
    ),
    "collate_fn": "give apply_on_input_batch= and apply_on_output_batch=",
    "transform": "apply it in read_input, or in apply_on_input_batch=",
    "dtype": "give input_dtype= and output_dtype=",
}


@explain_arguments(_HINTS)
def wrap_readers(
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    *,
    read_input: Callable[[Any], Iterable[Any]],
    get_output: Callable[[Any], Iterable[Any]],
    batch_size: int,
    one_read_count: int = 1,
    apply_on_input_batch: Apply | None = None,
    apply_on_output_batch: Apply | None = None,
    input_dtype: Any = None,
    output_dtype: Any = None,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    ranks: Ranks | Literal["pad", "drop", "join", "all"] | None = None,
    n_readers: int = 1,
    depth: int = 2,
    device: Any = "auto",
    progress: bool = False,
    timeline: bool = False,
) -> ReaderFeeder:
    """What functions read, as batches ``(x, y)`` on the device, ``depth`` batches ahead of the loop; read anew in every epoch.

    Identity i is ``inputs[i]`` and ``outputs[i]``: paths, numbers, whatever the functions take.
    ``read_input(inputs[i])`` and ``get_output(outputs[i])`` are called in background threads, one
    batch after the other. Each yields (or gives another iterable of) ``one_read_count`` samples:
    arrays, CPU tensors or numbers. A batch is the samples of ``batch_size // one_read_count``
    identities, in their order. Each sample is written to its place in the batch before the next one
    of its identity is asked for, so a function may yield one array again and again.

    ``apply_on_input_batch`` and ``apply_on_output_batch`` take an iterator over the samples of a
    batch, which gives each once, and have to take all of them; samples of one identity then are
    collected before they are given. The arrays and tensors that they return, in any structure of
    tuples, lists, mappings, named tuples and dataclasses, are copied to the device; other leaves
    stay as they are.

    At any time the loop has, besides batches that its body keeps, ``depth + 2`` batches on the
    device; with a GPU, ``depth + 1`` page-locked on the host; and of the one that is being read,
    what ``apply_…`` keeps, or without it a sample of each reader. That does not grow from epoch to
    epoch.

    Args:
        inputs: What ``read_input`` is called with, for each identity.
        outputs: What ``get_output`` is called with; as many.
        read_input: Gives the input samples of an identity.
        get_output: Gives its output samples, as many.
        batch_size: Samples of a batch, a multiple of ``one_read_count``.
        one_read_count: Samples of an identity.
        apply_on_input_batch: Makes a batch of its input samples. Without it they are stacked, and
            have one shape.
        apply_on_output_batch: The same for output samples.
        input_dtype: To which stacked input samples are converted, as numpy (or ``"bfloat16"``) or
            torch spells it. None for the one dtype that they have.
        output_dtype: The same for output samples.
        shuffle: Identities come in another order in every epoch; ``pinfeed.rows.shuffled(seed)``.
        seed: Seed of the shuffle, a whole number; the order is a function of (seed, epoch).
        drop_last: Leave out a last batch that is not full.
        ranks: How the processes of a job share the identities, as for ``Feeder``.
        n_readers: Identities of a batch that are read at the same time, each in a thread; at most
            1,024. More than one ask for functions that may be called so. In the synchronous loop,
            ``depth=0``, there are no threads.
        depth: Batches ahead of the loop, at most 1,024; 0 is the synchronous loop.
        device: As for ``Feeder``.
        progress: Show a progress bar.
        timeline: Record what takes time in every batch.

    Raises:
        ArgumentError: If an argument is invalid, two arguments conflict, or ``seed`` is given
            without ``shuffle``.
        UnknownArgument: If there is no such argument. The message names the one that does the same.
        DeviceError: There is no such device.
    """
    _check_identities(inputs, outputs)
    batch_size, one_read_count = (
        whole_number(batch_size, "batch_size"),
        whole_number(one_read_count, "one_read_count"),
    )
    n_readers = whole_number(n_readers, "n_readers", most=_MAX_READERS, note="; each is a thread")
    for name, flag in (
        ("shuffle", shuffle),
        ("drop_last", drop_last),
        ("progress", progress),
        ("timeline", timeline),
    ):
        check_flag(flag, name)
    check_seed(seed)
    order = shuffled(seed) if shuffle else sequential()
    share = share_of(ranks, order, drop_last, batch_size, None)
    if share is not None:
        batch_size = share.batch_size
    if batch_size % one_read_count:
        below, above = (
            batch_size // one_read_count * one_read_count,
            -(-batch_size // one_read_count) * one_read_count,
        )
        raise ArgumentError(
            f"batch_size={batch_size} is no multiple of one_read_count={one_read_count}, and a batch has all samples of its identities; "
            f"give batch_size={below or above}" + (f" or {above}" if below else "")
        )
    readers = [
        _reader("input", read_input, inputs, one_read_count, apply_on_input_batch, input_dtype),
        _reader("output", get_output, outputs, one_read_count, apply_on_output_batch, output_dtype),
    ]
    batches: OrderBatches | RankBatches
    if share is None:
        batches = mine = OrderBatches(order, len(inputs), batch_size // one_read_count, drop_last)
    else:
        share = dataclasses.replace(share, size=share.size // one_read_count)
        batches, mine = RankBatches(share, len(inputs)), share.batches(len(inputs))
    warn_of_no_batch(mine, "identities")
    begin = functools.partial(note_workers, ranks, order)
    depth = check_depth(depth)
    return ReaderFeeder(
        readers,
        batches,
        n_readers,
        begin,
        device=device,
        depth=depth,
        progress=progress,
        timeline=timeline,
    )


class ReaderFeeder:
    """Batches that functions read, epoch by epoch, on the device."""

    def __init__(
        self,
        readers: Sequence[SampleReader],
        batches: OrderBatches | RankBatches,
        n_readers: int,
        begin: Callable[[], object],
        *,
        device: Any,
        depth: int,
        progress: bool,
        timeline: bool,
    ) -> None:
        found = resolve(device, n_spare=len(readers) * (depth + 2))
        self._device = found
        self._owned_device = None if found is device else found
        self._begin = begin
        source = ReaderSource(
            readers, batches, found.worker, min(n_readers, batches.batch_size) if depth else 1
        )
        self._loop = EpochRunner(
            source,
            found,
            schedule=PrefetchSchedule(depth),
            capacity=(),
            progress=progress,
            timeline=timeline,
        )

    __reduce__ = no_copy
    __getitems__ = no_items

    @safe_repr
    def __repr__(self) -> str:
        found = self._loop.source.fingerprint
        size = f"{found['batch_size']:,} samples"
        return f"<ReaderFeeder: {found['identities']:,} identities; batches of {size} on {self.device}, {self._loop}>"

    def __enter__(self) -> ReaderFeeder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._loop.source)

    def __iter__(self) -> Iterator[Any]:
        """The next epoch: ``(x, y)`` for each batch, on the device.

        An error of a function comes in the turn of its batch, with its own traceback and a note
        that names the identity.

        Raises:
            ClosedError: This is closed, or another loop over it runs.
        """
        return self._loop.run(LentBatch.take, begin=self._begin)

    @property
    def device(self) -> str:
        """Name of the device, as torch writes it."""
        return self._device.name

    @property
    def stats(self) -> FeederStats:
        """What was measured so far; rows are samples."""
        return self._loop.stats

    @property
    def timeline(self) -> Timeline:
        """What took time. Only with ``timeline=True``."""
        return self._loop.timeline

    @property
    def epoch(self) -> int:
        """Number of the epoch that runs, or of the one that the next loop is."""
        return self._loop.epoch

    def set_epoch(self, number: int) -> None:
        """Let the next loop be epoch ``number``.

        Without it, every loop is the epoch after the one before.

        A position that was loaded in this epoch is kept, so that a program may set each epoch, the
        one that it goes on with too.
        """
        self._loop.set_epoch(number)

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is, as plain values: taken in the loop's body, the batch of that body counts as done."""
        return self._loop.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next loop go on where the state was taken; identities that were done then are not read.

        Raises:
            ArgumentError: The state is not such a one, or of other identities (as far as their
                number tells), order or batch size.
        """
        self._loop.load_state(state)

    def close(self) -> None:
        """End a loop that runs. Idempotent."""
        with contextlib.ExitStack() as stack:
            if self._owned_device is not None:
                stack.callback(self._owned_device.close)
            stack.callback(self._loop.close)


def _check_identities(inputs: Any, outputs: Any) -> None:
    """Raise ArgumentError unless both can be asked for each identity."""
    for name, values in (("inputs", inputs), ("outputs", outputs)):
        if hasattr(values, "iloc"):
            # Of pandas, which would be asked for labels.
            raise ArgumentError(
                f"{name}: got {type(values).__name__}; expected a list with one value per identity: give .tolist()"
            )
        if (
            isinstance(values, (str, bytes, Mapping))
            or not hasattr(values, "__len__")
            or not hasattr(values, "__getitem__")
        ):
            raise ArgumentError(
                f"{name}: got {type(values).__name__}; expected a list, or another sequence, with one value per identity"
            )
    if len(inputs) != len(outputs):
        raise ArgumentError(
            f"got {len(inputs)} inputs and {len(outputs)} outputs; expected one of each per identity"
        )


def _reader(
    kind: str, function: Any, values: Sequence[Any], n_samples: int, apply: Any, dtype: Any
) -> SampleReader:
    reader = SampleReader(kind, function, values, n_samples, apply, _dtype(dtype, f"{kind}_dtype"))
    if not callable(function):
        raise ArgumentError(
            f"{reader.function_name}={function!r}: expected a function that yields the samples of an identity"
        )
    if apply is not None and not callable(apply):
        raise ArgumentError(
            f"{reader.apply_name}={apply!r}: expected a function that makes a batch of its samples"
        )
    if apply is not None and dtype is not None:
        raise ArgumentError(
            f"both {reader.apply_name} and {kind}_dtype were given; the dtype is that of what the function returns"
        )
    return reader


def _dtype(dtype: Any, name: str) -> np.dtype[Any] | None:
    if dtype is None:
        return None
    try:
        return dtype_of(dtype, name)
    except StoreError as error:
        raise ArgumentError(
            f"{name}={dtype!r} is no dtype of samples ({described(error)}); expected a dtype that numpy and torch have"
        ) from None
