"""BigBatch: the gradients of a batch that does not fit on the device."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pinfeed.errors import ArgumentError, ClosedError
from pinfeed.feeders.dataloader import LoaderFeeder, wrap_loader
from pinfeed.memory import limits
from pinfeed.memory.host import free_host_bytes
from pinfeed.training import rng_state
from pinfeed.training.large_batch.check import Check, compare_with_plain_step
from pinfeed.training.large_batch.equivalence.verifier import EquivalenceVerifier
from pinfeed.training.large_batch.select import STRATEGIES, Strategy, StrategyChoice, batch_norms
from pinfeed.training.large_batch.strategies.gradients import (
    Chunks,
    GradientAccumulator,
    StepSpec,
    plain,
    release_cached_memory,
    restore_gradients_on_error,
    two_pass,
)
from pinfeed.training.large_batch.strategies.loss_reduction import (
    Count,
    Reduction,
    check_targets,
    count_of,
    reduction_of,
)
from pinfeed.training.large_batch.strategies.micro_batches import (
    ChunkLoader,
    as_tensors,
    check_no_sample_lists,
    concatenate,
    input_target_pairs,
    is_batch_source,
    n_samples,
    sample_shapes_and_dtypes,
    slice_samples,
)
from pinfeed.training.large_batch.strategies.recompute import recomputed
from pinfeed.training.large_batch.strategy_selector import SOURCE, StrategySelector
from pinfeed.training.memory_model.estimate import check_autocast
from pinfeed.training.memory_model.probe import is_out_of_memory
from pinfeed.training.memory_model.tensor_specs import to_device
from pinfeed.validation.arguments import check_flag, explain_arguments, whole_number

if TYPE_CHECKING:
    from pinfeed.training.offload.offload import Offload


_MOST_AHEAD = 8
"""Batches of a source that are read before the first one is computed, to have samples to compare."""


_HINTS = {
    "batch_size": "the batch is what backward() is given; samples that are computed at a time are chunk_size=",
    **dict.fromkeys(
        ("micro_batch_size", "microbatch_size", "n_chunks", "chunks"),
        "samples that are computed at a time are chunk_size=",
    ),
    "optimizer": "step it after backward(), as without pinfeed",
    "device": "move the model there: model.to(device)",
    **dict.fromkeys(
        ("gpu_memory_limit", "cpu_memory_limit"),
        "limits are given together: config=pinfeed.Config(...)",
    ),
}
"""Advice, by names that users try."""


class BigBatch:
    """Trains with batches of any size: ``backward`` adds the gradients of the whole batch, in the memory of a part of it.

    Strategies:
        ``"plain"``: the whole batch at once.
        ``"accumulate"``: chunk after chunk, the next one on its way; for losses that are sums or
            means of terms, weighed by their number: torch's own (also by ``functools.partial``),
            and others where ``reduction`` says so.
        ``"two_pass"``: the outputs of all chunks, the loss of them, and each chunk again, with the
            same random numbers: for any loss.
        ``"checkpoint"``: the whole batch; parts of the model are computed again in the backward
            pass.
        ``"offload"``: the whole batch; what is kept for the backward pass waits on the host.
        ``"auto"``: decided at the first batch of each size, by what they take and whether they are
            right; ``chosen`` says why. Chunks are taken only where they give the gradients of the
            plain step on some of the first batch's samples (see ``prove``).

    Args:
        model: On the device, in the mode in which it is trained.
        loss: Called with outputs and targets; with outputs and None where there are none.
        config: Limits. A chunk is the largest that fits.
        chunk_size: Samples at a time, in place of that.
        strategy: One of the above.
        reduction: ``"mean"`` or ``"sum"`` of terms, which only the caller knows of a loss that is
            none of torch's.
        count: Called with targets, the number of terms that a mean is taken of. None for samples;
            of classes, in the first tensor of the targets, for those that are not ``ignore_index``
            (-100), by the weight of their class.
        modules: Others that have parameters, where the loss uses them.
        autocast: The dtype of autocast for forward passes and losses.
        scaler: A ``torch.amp.GradScaler``; unscale and step are the caller's.
        prove: Compare ``"accumulate"``, ``"two_pass"`` and ``"checkpoint"`` with the plain step
            before they are used: at the first batch, and again for another shape of samples and
            after ``train()`` or ``eval()``. Three samples are computed, whole and in chunks of two
            and one; outputs, gradients, the loss and what the forward pass changes are compared.
            ``"auto"`` takes another strategy or refuses where they differ; of one that was named, a
            warning tells. False leaves that out.

    Raises:
        ArgumentError: What cannot be.
    """

    @explain_arguments(_HINTS)
    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], torch.Tensor],
        *,
        config: limits.MemoryLimits | None = None,
        chunk_size: int | None = None,
        strategy: str = "auto",
        reduction: Reduction | None = None,
        count: Count | None = None,
        modules: Sequence[nn.Module] = (),
        autocast: torch.dtype | None = None,
        scaler: Any = None,
        prove: bool = True,
    ) -> None:
        modules = _modules(modules)
        check_step(model, loss, config, chunk_size, strategy, autocast, scaler, prove)
        if reduction not in (None, "mean", "sum"):
            raise ArgumentError(f"reduction={reduction!r}: expected 'mean', 'sum' or None")
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._model = model
        self._config = config
        self._strategy = strategy
        self._count = count or count_of(loss)
        self._dtype = autocast
        found: Reduction | None = reduction or reduction_of(loss)
        every = (model, *([loss] if isinstance(loss, nn.Module) else []), *modules)
        scale = (lambda loss: loss) if scaler is None else scaler.scale
        self._spec = StepSpec(model, loss, every, found or "sum", self._count, self._context, scale)
        self._selector = StrategySelector(
            self._spec,
            self._device,
            config,
            chunk_size,
            strategy,
            found is not None,
            EquivalenceVerifier(prove, autocast),
            autocast,
        )
        self._cut = ChunkLoader()
        self._is_closed = False
        self._stream: LoaderFeeder | None = None
        self._offload: Offload | None = None
        self.chosen: StrategyChoice | None = None
        """How the last batch was computed."""
        self.n_halved = 0
        """Chunks that did not fit, and were computed in halves."""

    def __enter__(self) -> BigBatch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread that brings chunks, give page-locked memory back. Idempotent."""
        self._is_closed = True
        with contextlib.ExitStack() as stack:
            for owned in (self._stream, self._offload):
                if owned is not None:
                    stack.callback(owned.close)

    def backward(self, inputs: Any, targets: Any = None) -> torch.Tensor:
        """Add the gradients of a whole batch to those that are there.

        Args:
            inputs: Tensors or numpy arrays, on the host or on the device, in any structure, as the
                model takes them: a tuple is positional arguments, a dict keyword arguments. Or a
                Feeder, a DataLoader or an iterator of (inputs, targets), all of whose batches are
                one; then only ``"accumulate"`` is possible, and they are cut where they are larger
                than a chunk.
            targets: Likewise, of the same samples.

        Returns:
            The loss of the whole batch, a tensor of shape ().

        Raises:
            ClosedError: This is closed.
            ArgumentError: Tensors of different numbers of samples; a strategy that is wrong for
                this model and loss.
            NotEnoughGPUMemory: Not even one sample fits.
            NotEnoughCPUMemory: Likewise, where the model is on the CPU.
        """
        self._require_open()
        if targets is None and is_batch_source(inputs):
            return self._of_source(inputs)
        check_targets(self._spec.loss, inputs, targets)
        inputs, targets = as_tensors(inputs), as_tensors(targets)
        n = n_samples(inputs)
        if targets is not None and n_samples(targets) != n:
            raise ArgumentError(
                f"inputs have {n} samples and targets {n_samples(targets)}; expected equally many"
            )
        if n == 0:
            raise ArgumentError("the batch is empty; expected at least one sample")
        check_no_sample_lists((inputs, targets), n, " (inputs, targets)")
        self.chosen = self._selector.of(inputs, targets)
        return self._compute(self.chosen, inputs, targets)

    def check(self, inputs: Any, targets: Any = None, *, chunk_size: int | None = None) -> Check:
        """Compare the gradients of a small batch with those of the plain step; nothing is changed.

        Args:
            inputs: As for ``backward``; as many samples as fit on the device at once, and no more.
            targets: Likewise.
            chunk_size: For this; None for a third of the samples.

        Returns:
            How far they are apart; true as a bool if by no more than rounding.

        Raises:
            ClosedError: This is closed.
            ArgumentError: As for ``backward``.
        """
        self._require_open()
        check_targets(self._spec.loss, inputs, targets)
        inputs, targets = as_tensors(inputs), as_tensors(targets)
        n, strategy = n_samples(inputs), self._strategy
        if strategy == "auto":
            strategy = (self.chosen or self._selector.of(inputs, targets)).strategy
        chosen = self._selector.as_told(strategy, n, chunk_size or max(1, n // 3))  # type: ignore[arg-type]
        whole, spec = (self._to_device(inputs), self._to_device(targets)), self._spec
        return compare_with_plain_step(
            spec,
            strategy,
            lambda: plain(spec, *whole),
            lambda: self._compute(chosen, inputs, targets),
        )

    def _compute(self, chosen: StrategyChoice, inputs: Any, targets: Any) -> torch.Tensor:
        spec, size = self._spec, chosen.chunk_size
        with restore_gradients_on_error(spec):
            if chosen.strategy == "accumulate":
                total = float(n_samples(inputs) if targets is None else self._count(targets))
                if spec.reduction == "mean" and not total:
                    # A mean of nothing: as the plain step has it, whatever that is.
                    return plain(
                        spec,
                        self._to_device(slice_samples(inputs, 0, size)),
                        self._to_device(slice_samples(targets, 0, size)),
                    )
                return self._accumulated(
                    spec,
                    self._pieces(inputs, targets, size),
                    total,
                    self._selector.key_of(inputs, targets),
                )
            if chosen.strategy in ("plain", "two_pass"):
                return self._again_if_it_does_not_fit(spec, chosen, inputs, targets)
            with recomputed(self._model) if chosen.strategy == "checkpoint" else self._offloaded():
                return plain(spec, self._to_device(inputs), self._to_device(targets))

    def _accumulated(
        self, spec: StepSpec, pieces: Chunks, total: float | None, key: Any
    ) -> torch.Tensor:
        accumulation = GradientAccumulator(spec)
        try:
            with contextlib.closing(pieces):
                # An error that somebody keeps would keep the loop over chunks, too.
                return accumulation.run(pieces, total)
        finally:
            if accumulation.n_halved:
                # The next batch is cut smaller at once.
                self.n_halved += accumulation.n_halved
                self._selector.halve(key)

    def _again_if_it_does_not_fit(
        self, spec: StepSpec, chosen: StrategyChoice, inputs: Any, targets: Any
    ) -> torch.Tensor:
        """The whole batch, or two passes; from the beginning in smaller chunks, as long as there is no memory."""
        state, size = rng_state.capture(), chosen.chunk_size
        try:
            with restore_gradients_on_error(spec):
                if chosen.strategy == "plain" or size >= n_samples(inputs):
                    return plain(spec, self._to_device(inputs), self._to_device(targets))
                return two_pass(
                    spec,
                    functools.partial(self._pieces, inputs, targets, size),
                    self._to_device(targets),
                )
        except (RuntimeError, MemoryError) as error:
            cannot_cut = (
                size == 1
                or self._strategy == "plain"
                or (chosen.strategy == "plain" and batch_norms(self._model))
            )
            if not is_out_of_memory(error) or cannot_cut:
                raise
        # Out of the except block: until then the traceback keeps the tensors of the frames that
        # failed.
        release_cached_memory()
        rng_state.restore(state)
        self.n_halved += 1
        strategy: Strategy = "two_pass"
        if chosen.strategy == "plain":
            strategy = self._selector.right_chunks(inputs, targets)
        smaller = dataclasses.replace(
            chosen, strategy=strategy, chunk_size=-(-size // 2), why="more did not fit"
        )
        self.chosen = self._selector.keep(self._selector.key_of(inputs, targets), smaller)
        return self._compute(smaller, inputs, targets)

    def _of_source(self, source: Any) -> torch.Tensor:
        if self._strategy not in ("auto", "accumulate"):
            raise ArgumentError(
                f"strategy={self._strategy!r} needs all samples at once; give the whole batch as tensors, or strategy='accumulate'"
            )
        with contextlib.ExitStack() as stack:
            batches = source
            if not hasattr(source, "batches") and not isinstance(source, LoaderFeeder):
                batches = stack.enter_context(wrap_loader(source, device=self._device, depth=1))
            coming = stack.enter_context(contextlib.closing(input_target_pairs(batches)))
            first = list(itertools.islice(_until_comparable(coming, self._spec), _MOST_AHEAD))
            if not first:
                raise ArgumentError("there is no batch; expected at least one")
            alike, spec = _like_the_first(first), self._spec
            self.chosen = self._selector.of_source(
                *alike, is_one_of_several=len(first) > 1 and n_samples(alike[0]) == 1
            )
            pieces = self._cut_pieces(itertools.chain(first, coming), self.chosen.chunk_size)
            with restore_gradients_on_error(spec):
                return self._accumulated(spec, pieces, None, SOURCE)

    def _cut_pieces(self, batches: Iterable[tuple[Any, Any]], size: int) -> Chunks:
        for inputs, targets in batches:
            self._selector.check_part_of_source(inputs, targets)
            for start in range(0, n_samples(inputs), size):
                # Tensors are on the device already; numpy arrays are moved here.
                x, y = (
                    self._to_device(slice_samples(batch, start, start + size))
                    for batch in (inputs, targets)
                )
                yield x, y, float(n_samples(x) if y is None else self._count(y))

    def _pieces(self, inputs: Any, targets: Any, size: int) -> Chunks:
        """Chunks, on the device, one ahead."""
        if self._stream is None:
            self._stream = wrap_loader(self._cut, device=self._device, depth=1)
        self._cut.batch = (inputs, targets)
        self._cut.size = size
        chunks: Any = iter(self._stream)
        try:
            for start, (x, y) in zip(range(0, n_samples(inputs), size), chunks, strict=True):
                yield (
                    x,
                    y,
                    float(
                        n_samples(x)
                        if y is None
                        else self._count(slice_samples(targets, start, start + size))
                    ),
                )
        finally:
            chunks.close()
            self._cut.batch = None

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this BigBatch is closed; make another one")

    def _context(self) -> contextlib.AbstractContextManager[Any]:
        return (
            contextlib.nullcontext()
            if self._dtype is None
            else torch.autocast(self._device.type, self._dtype)
        )

    def _to_device(self, batch: Any) -> Any:
        return to_device(batch, self._device)

    def _offloaded(self) -> contextlib.AbstractContextManager[Any]:
        if self._offload is None:
            from pinfeed.training.offload.offload import Offload

            limit = None if self._config is None else self._config.host_limit(free_host_bytes())
            self._offload = Offload(self._device, host_limit=limit)
        return self._offload.step(*self._spec.modules)


def _until_comparable(
    batches: Iterable[tuple[Any, Any]], spec: StepSpec
) -> Iterator[tuple[Any, Any]]:
    """Batches up to the one with which there are samples to compare: two or more, with terms of the loss."""
    n = terms = 0.0
    for inputs, targets in batches:
        yield inputs, targets
        n += n_samples(inputs)
        terms += spec.terms(inputs, targets)
        if n > 1 and terms:
            return


def _like_the_first(batches: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Those of some batches that can be concatenated, as one."""
    shape = sample_shapes_and_dtypes(*batches[0])
    alike = [batch for batch in batches if sample_shapes_and_dtypes(*batch) == shape]
    inputs, targets = zip(*alike, strict=True)
    return concatenate(list(inputs)), None if targets[0] is None else concatenate(list(targets))


def check_step(
    model: Any,
    loss: Any,
    config: Any,
    chunk_size: int | None,
    strategy: str,
    autocast: Any,
    scaler: Any,
    prove: Any,
) -> None:
    """Refuse arguments of a BigBatch, or of a Trainer, with which no step can be computed.

    Raises:
        ArgumentError: One of them is invalid.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model={model!r}: expected a torch module")
    if isinstance(loss, type):
        raise ArgumentError(
            f"loss is the class {loss.__name__}; expected a function of outputs and targets; give {loss.__name__}()"
        )
    if not callable(loss):
        raise ArgumentError(f"loss={loss!r}: expected a function of outputs and targets")
    if config is not None and not isinstance(config, limits.MemoryLimits):
        raise ArgumentError(f"config={config!r}: expected a pinfeed.Config, or None")
    if chunk_size is not None:
        whole_number(chunk_size, "chunk_size")
    if strategy != "auto" and strategy not in STRATEGIES:
        raise ArgumentError(
            f"strategy={strategy!r}: expected 'auto', {', '.join(map(repr, STRATEGIES))}"
        )
    check_autocast(autocast)
    if scaler is not None and (
        isinstance(scaler, type) or not callable(getattr(scaler, "scale", None))
    ):
        raise ArgumentError(f"scaler={scaler!r}: expected a torch.amp.GradScaler, or None")
    check_flag(prove, "prove")


def _modules(modules: Any) -> tuple[nn.Module, ...]:
    """``modules`` as a tuple.

    Raises:
        ArgumentError: They are no torch modules.
    """
    found = tuple(modules) if isinstance(modules, Iterable) else (modules,)
    if not isinstance(modules, Iterable) or not all(isinstance(one, nn.Module) for one in found):
        raise ArgumentError(f"modules={modules!r}: expected a list of torch modules")
    return found
