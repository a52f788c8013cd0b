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

TRANSFORMS = ("host_transform", "device_transform")
"""Names of the options that are transforms."""


class LoopOptions(TypedDict, total=False):
    """Options of every loop over batches: how it ends, what it records, and its transforms.

    A transform that has a parameter ``generator`` receives a new ``torch.Generator`` for every
    batch, so its results depend neither on ``depth`` nor on resuming. ``host_transform`` receives
    a generator on the CPU, and ``device_transform`` one on the device. Both are seeded as follows,
    where ``which`` is 0 for ``host_transform`` and 1 for ``device_transform``:

        numbers = (seed, epoch, batch, which)  # and the rank, if a Feeder has ranks
        state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
        generator = torch.Generator(device).manual_seed(int(state[0]))

    A negative seed counts modulo 2**64.

    A transform must not change a batch that it has returned, or return the same memory again with
    other contents, because prefetched batches still wait for the loop.

    Examples:
        >>> options = {"device_transform": lambda batch: batch.half(), "timeline": True}
        >>> feeder = pinfeed.Feeder(np.zeros((100, 8)), batch_size=10, **options)
        >>> next(iter(feeder)).dtype
        torch.float16

    Attributes:
        again: Rule for a loop that begins before an older loop over the same feeder has ended.
            ``"end"``, the default, ends the older loop. ``"refuse"`` raises ClosedError in the new
            one.
        progress: Whether to show a progress bar; False by default.
        timeline: Whether to record how long each stage of each batch takes; False by default.
        host_transform: Function that takes a batch on the host and returns one; None by default.
            With ``fetch`` or tables, it runs before the ids of its batch are collected.
        device_transform: Function that takes a batch on the device and returns one; None by
            default. Its work on a GPU runs in a side stream.
    """

    again: Annotated[Again, Default("end")]
    progress: Annotated[bool, Default(False)]
    timeline: Annotated[bool, Default(False)]
    host_transform: Annotated[Callable[..., Any] | None, Default(None)]
    device_transform: Annotated[Callable[..., Any] | None, Default(None)]


class FeederOptions(LoopOptions, total=False):
    """Options of a loop over rows; the last arguments of ``Feeder``.

    They include ``LoopOptions``.

    Examples:
        >>> rows = np.zeros((100, 8))
        >>> for batch in pinfeed.Feeder(rows, batch_size=10, verify=True, progress=False):
        ...     loss = batch.mean()

    Attributes:
        verify: Whether to compare each batch with its rows in the stores; False by default.
    """

    verify: Annotated[bool, Default(False)]


class LoaderOptions(LoopOptions, total=False):
    """Options of a loop over a loader; the last arguments of ``wrap_loader``.

    They include ``LoopOptions``.

    Examples:
        >>> loader = torch.utils.data.DataLoader(torch.zeros(100, 8), batch_size=10)
        >>> for batch in pinfeed.wrap_loader(loader, on_error="next", timeline=True):
        ...     loss = batch.mean()

    Attributes:
        on_error: Effect of the error of a batch: ``"raise"``, the default, ends the loop. With
            ``"next"``, the loop's iterator can continue with the next batch.
        seed: Seed of the generators of the transforms; None is 0.
    """

    on_error: Annotated[Literal["raise", "next"], Default("raise")]
    seed: Annotated[int | None, Default(None)]


class TableLoopOptions(LoopOptions, total=False):
    """Options of a loop over tables; the last arguments of ``train_rows`` and ``read_rows``.

    They include ``LoopOptions``.

    Examples:
        >>> table = pinfeed.HostEmbedding(1000, 8)
        >>> ids = [torch.tensor([1, 2]), torch.tensor([2, 3])]
        >>> for batch in pinfeed.read_rows(ids, {table: lambda batch: batch}, verify=True):
        ...     vectors = table(batch)

    Attributes:
        verify: Whether to compare the rows with those of the synchronous loop; False by default.
        seed: Seed of the generators of the transforms; None is 0.
    """

    verify: Annotated[bool, Default(False)]
    seed: Annotated[int | None, Default(None)]


class ReaderOptions(TypedDict, total=False):
    """Options of ``wrap_readers``: samples, order of an epoch, and records of the loop.

    Examples:
        >>> feeder = pinfeed.wrap_readers(
        ...     inputs=[1, 2, 3, 4],
        ...     outputs=[2, 4, 6, 8],
        ...     read_input=lambda value: [value],
        ...     get_output=lambda value: [value],
        ...     batch_size=2,
        ...     shuffle=True,
        ...     input_dtype=torch.float32,
        ... )
        >>> x, y = next(iter(feeder))
        >>> x.dtype
        torch.float32

    Attributes:
        apply_on_input_batch: Function that makes a batch of its input samples; None stacks them.
        apply_on_output_batch: Function that makes a batch of its output samples; None stacks them.
        input_dtype: Dtype to which stacked input samples are converted; None keeps their dtype.
        output_dtype: Dtype to which stacked output samples are converted; None keeps their dtype.
        shuffle: Whether every epoch has a new order; False by default.
        seed: Seed of the shuffle; the order is a function of (seed, epoch). The default, 0, repeats
            the same orders in every run of the program.
        drop_last: Whether to leave out a last batch that is not full; False by default.
        ranks: Rule by which the processes of a job share an epoch; None gives each process all
            rows.
        again: Rule for a loop that begins before an older loop over the same feeder has ended.
            ``"end"``, the default, ends the older loop. ``"refuse"`` raises ClosedError in the new
            one.
        progress: Whether to show a progress bar; False by default.
        timeline: Whether to record how long each stage of each batch takes; False by default.
    """

    apply_on_input_batch: Annotated[Apply | None, Default(None)]
    apply_on_output_batch: Annotated[Apply | None, Default(None)]
    input_dtype: Annotated[Any, Default(None)]
    output_dtype: Annotated[Any, Default(None)]
    shuffle: Annotated[bool, Default(False)]
    seed: Annotated[int, Default(0)]
    drop_last: Annotated[bool, Default(False)]
    ranks: Annotated[Ranks | Literal["pad", "drop", "join", "all"] | None, Default(None)]
    again: Annotated[Again, Default("end")]
    progress: Annotated[bool, Default(False)]
    timeline: Annotated[bool, Default(False)]


def check_options(options: Mapping[str, Any]) -> None:
    """Check the options of a loop that are flags or functions, and ``again``.

    Raises:
        ArgumentError: If a flag is not a bool, a function is not callable, or ``again`` is neither
            ``"end"`` nor ``"refuse"``.
    """
    for name in ("verify", "progress", "timeline"):
        check_flag(options.get(name, False), name)
    check_choice(options["again"], "again", ("end", "refuse"))
    for name in TRANSFORMS:
        check_function(options.get(name), name)
