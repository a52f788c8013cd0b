"""BigBatch: the gradients of a batch that does not fit on the device."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from pinfeed.errors import ArgumentError, ClosedError
from pinfeed.feeders.dataloader import LoaderFeeder
from pinfeed.feeders.wrap_loader import wrap_loader
from pinfeed.memory import limits
from pinfeed.training.large_batch.batch_source import first_batches, joined_with_first
from pinfeed.training.large_batch.check import Check, compare_with_plain_step
from pinfeed.training.large_batch.select import StrategyChoice
from pinfeed.training.large_batch.strategies.gradients import backward_whole
from pinfeed.training.large_batch.strategies.loss_reduction import (
    Count,
    Reduction,
    check_targets,
    count_of,
    reduction_of,
)
from pinfeed.training.large_batch.strategies.micro_batches import (
    Chunk,
    Chunks,
    as_tensors,
    check_no_sample_lists,
    input_target_pairs,
    is_batch_source,
    n_samples,
    slice_samples,
)
from pinfeed.training.large_batch.strategies.step_spec import StepSpec
from pinfeed.training.large_batch.strategy_options import StrategyOptions, check_step
from pinfeed.training.large_batch.strategy_runner import StrategyRunner
from pinfeed.training.large_batch.strategy_selector import StrategySelector
from pinfeed.training.memory_model.tensor_specs import to_device
from pinfeed.validation.arguments import explain_arguments

_HINTS = {
    "batch_size": "the batch is what backward() is given; samples that are computed at a time are "
    "chunk_size=",
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
"""Hints for argument names that users try."""


class BigBatch:
    """Computes the gradients of batches of any size in the memory of a part of the batch.

        with BigBatch(model, loss_fn, chunk_size=32) as big_batch:
            for inputs, targets in loader:
                loss = big_batch.backward(inputs, targets)
                optimizer.step()
                optimizer.zero_grad()

    Strategies:
        ``"plain"``: The whole batch at once.
        ``"accumulate"``: Chunk after chunk, with the next one prefetched. The loss must be a sum or
            mean of terms; chunks are weighted by their number of terms. torch's own losses qualify
            (also in ``functools.partial``), and others for which ``reduction`` says so.
        ``"two_pass"``: The outputs of all chunks, their loss, and each chunk again with the same
            random numbers. The loss may be any function of the outputs.
        ``"checkpoint"``: The whole batch. Parts of the model are recomputed in the backward pass.
        ``"offload"``: The whole batch. Activations wait for the backward pass in host memory.
        ``"auto"``: Chosen at the first batch of each size, by memory and by correctness; ``chosen``
            says why. Chunks are used only if they give the gradients of the plain step on some of
            the first batch's samples (see ``prove``).

    Args:
        model: The model, on its device, in the mode in which it is trained.
        loss: Function of outputs and targets; targets are None if there are none.
        config: Memory limits; chunks are the largest that fit.
        chunk_size: Samples of a chunk, instead of a limit.
        strategy: One of the above.
        reduction: ``"mean"`` or ``"sum"`` of terms, for a loss that is none of torch's.
        count: Function that returns, for targets, the number of terms of which the loss is the
            mean. None counts samples; for class targets, those that are not ``ignore_index``
            (-100), by the weight of their class.
        modules: Other modules with parameters that the loss uses.
        autocast: The dtype of autocast for forward passes and losses; None for no autocast.
        scaler: A ``torch.amp.GradScaler``; the caller unscales and steps.
        prove: Compare ``"accumulate"``, ``"two_pass"`` and ``"checkpoint"`` with the plain step
            before they are used: at the first batch, for another shape of samples, and after
            ``train()`` or ``eval()``. Three samples are computed, whole and in chunks of two and
            one. Outputs, gradients, the loss and the model's state are compared. If they differ,
            ``"auto"`` takes another strategy or raises, and a named strategy warns. False skips
            the comparison.

    Raises:
        ArgumentError: If an argument is invalid.
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
        modules = _checked_modules(modules)
        options = StrategyOptions(config, chunk_size, strategy, autocast, prove)
        check_step(model, loss, options, scaler)
        if reduction not in (None, "mean", "sum"):
            raise ArgumentError(f"reduction={reduction!r}: expected 'mean', 'sum' or None")
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._options = options
        known: Reduction | None = reduction or reduction_of(loss)
        self._spec = StepSpec(
            model=model,
            loss=loss,
            modules=(model, *([loss] if isinstance(loss, nn.Module) else []), *modules),
            reduction=known or "sum",
            count=count or count_of(loss),
            context=self._context,
            scale=(lambda loss: loss) if scaler is None else scaler.scale,
        )
        self._selector = StrategySelector(
            self._spec, self._device, options, has_known_reduction=known is not None
        )
        self._runner = StrategyRunner(self._spec, self._device, options, self._selector)
        self._is_closed = False

    def __enter__(self) -> BigBatch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the reader thread and free page-locked memory. Further calls do nothing."""
        self._is_closed = True
        self._runner.close()

    @property
    def chosen(self) -> StrategyChoice | None:
        """Strategy of the last batch; None before the first batch."""
        return self._runner.chosen

    @property
    def n_halved(self) -> int:
        """Number of chunks that did not fit and were computed in halves."""
        return self._runner.n_halved

    def backward(self, inputs: Any, targets: Any = None) -> torch.Tensor:
        """Add the gradients of a whole batch to the gradients of the parameters.

        Args:
            inputs: Tensors or numpy arrays, on the host or on the device, in any structure that the
                model takes: a tuple is positional arguments, a dict keyword arguments. Or a
                Feeder, a DataLoader or an iterator of (inputs, targets), whose batches together
                are one batch. Such a source allows only ``"accumulate"``, and its batches are cut
                if they are larger than a chunk.
            targets: Targets of the same samples, in the same forms; None without targets.

        Returns:
            The loss of the whole batch, a tensor of shape ().

        Raises:
            ClosedError: If this BigBatch is closed.
            ArgumentError: If tensors have different numbers of samples, or the strategy is wrong
                for this model and loss.
            NotEnoughGPUMemory: If not even one sample fits on the GPU.
            NotEnoughCPUMemory: If not even one sample fits on the CPU, where the model is.
        """
        self._require_open()
        if targets is None and is_batch_source(inputs):
            return self._backward_source(inputs)
        check_targets(self._spec.loss, inputs, targets)
        inputs = as_tensors(inputs)
        targets = as_tensors(targets)
        n = n_samples(inputs)
        if targets is not None and n_samples(targets) != n:
            raise ArgumentError(
                f"inputs have {n} samples and targets {n_samples(targets)}; expected equally many"
            )
        if n == 0:
            raise ArgumentError("the batch is empty; expected at least one sample")
        check_no_sample_lists((inputs, targets), n, " (inputs, targets)")
        chosen = self._selector.choose(inputs, targets)
        self._runner.chosen = chosen
        return self._runner.run(chosen, inputs, targets)

    def check(self, inputs: Any, targets: Any = None, *, chunk_size: int | None = None) -> Check:
        """Compare the gradients of a small batch with those of the plain step.

        Nothing is changed.

        Args:
            inputs: Inputs as for ``backward``, at most as many samples as fit on the device at
                once.
            targets: Their targets.
            chunk_size: Samples of a chunk; None for a third of the samples.

        Returns:
            The differences; true as a bool if they are no more than rounding.

        Raises:
            ClosedError: If this BigBatch is closed.
            ArgumentError: If ``backward`` would raise it.
        """
        self._require_open()
        check_targets(self._spec.loss, inputs, targets)
        inputs = as_tensors(inputs)
        targets = as_tensors(targets)
        n = n_samples(inputs)
        strategy = self._options.strategy
        if strategy == "auto":
            strategy = (self.chosen or self._selector.choose(inputs, targets)).strategy
        size = chunk_size or max(1, n // 3)
        chosen = self._selector.choice_as_named(strategy, n, size)  # type: ignore[arg-type]
        whole = self._to_device(inputs), self._to_device(targets)
        return compare_with_plain_step(
            self._spec,
            strategy,
            lambda: backward_whole(self._spec, *whole),
            lambda: self._runner.run(chosen, inputs, targets),
        )

    def _backward_source(self, source: Any) -> torch.Tensor:
        """Add the gradients of all batches of an iterable, as those of one batch."""
        if self._options.strategy not in ("auto", "accumulate"):
            raise ArgumentError(
                f"strategy={self._options.strategy!r} needs all samples at once; give the whole "
                "batch as tensors, or strategy='accumulate'"
            )
        with contextlib.ExitStack() as stack:
            batches = source
            if not hasattr(source, "batches") and not isinstance(source, LoaderFeeder):
                batches = stack.enter_context(wrap_loader(source, device=self._device, depth=1))
            pairs = stack.enter_context(contextlib.closing(input_target_pairs(batches)))
            first = first_batches(pairs, self._spec)
            if not first:
                raise ArgumentError("there is no batch; expected at least one")
            inputs, targets = joined_with_first(first)
            is_one_of_several = len(first) > 1 and n_samples(inputs) == 1
            chosen = self._selector.choose_for_source(
                inputs, targets, is_one_of_several=is_one_of_several
            )
            chunks = self._source_chunks(itertools.chain(first, pairs), chosen.chunk_size)
            self._runner.chosen = chosen
            return self._runner.run_source(chunks)

    def _source_chunks(self, batches: Iterable[tuple[Any, Any]], size: int) -> Chunks:
        for inputs, targets in batches:
            self._selector.check_part_of_source(inputs, targets)
            for start in range(0, n_samples(inputs), size):
                # Tensors are on the device already; numpy arrays are copied here.
                x = self._to_device(slice_samples(inputs, start, start + size))
                y = self._to_device(slice_samples(targets, start, start + size))
                yield Chunk(x, y, self._spec.count_terms(x, y))

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this BigBatch is closed; make another one")

    def _context(self) -> contextlib.AbstractContextManager[Any]:
        if self._options.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self._options.autocast)

    def _to_device(self, batch: Any) -> Any:
        return to_device(batch, self._device)


def _checked_modules(modules: Any) -> tuple[nn.Module, ...]:
    """Return ``modules`` as a tuple.

    Raises:
        ArgumentError: If they are no torch modules.
    """
    found = tuple(modules) if isinstance(modules, Iterable) else (modules,)
    if not isinstance(modules, Iterable) or not all(isinstance(one, nn.Module) for one in found):
        raise ArgumentError(f"modules={modules!r}: expected a list of torch modules")
    return found
