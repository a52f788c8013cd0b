"""BigBatch: gradients of a batch that does not fit on the device."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from pinfeed.errors import ArgumentError, ClosedError
from pinfeed.feeders.loader_feeder import LoaderFeeder, wrap_loader
from pinfeed.memory import limits
from pinfeed.tensors import rng_state
from pinfeed.tensors.argument_types import LossFunction, Tensors
from pinfeed.training.large_batch import batches
from pinfeed.training.large_batch.chunked_gradients import (
    ChunkStream,
    GradientAccumulator,
    backward_two_pass,
)
from pinfeed.training.large_batch.restored_state import (
    buffers_of,
    gradient_transaction,
    restore_buffers,
)
from pinfeed.training.large_batch.step_result import Check, compare_with_plain_step
from pinfeed.training.large_batch.step_spec import (
    Count,
    Reduction,
    StepSpec,
    check_targets,
    count_of,
    device_of,
    reduction_of,
)
from pinfeed.training.large_batch.strategy_choice import (
    SOURCE,
    StrategyChoice,
    StrategyChooser,
    is_in_chunks,
)
from pinfeed.training.large_batch.whole_steps import WholeSteps
from pinfeed.training.memory_model.real_steps import is_out_of_memory, release_cached_memory
from pinfeed.training.memory_model.tensor_specs import to_device
from pinfeed.training.memory_model.training_step import autocast_context
from pinfeed.validation.arguments import explain_arguments


def _check_arguments(model: Any, loss: Any, reduction: Any, modules: Any, scaler: Any) -> None:
    if isinstance(loss, type):
        raise ArgumentError(
            f"loss={loss.__name__} is a class; expected a function of outputs and targets; give "
            f"loss={loss.__name__}()"
        )
    are_modules = isinstance(modules, list) and all(isinstance(one, nn.Module) for one in modules)
    is_scaler = not isinstance(scaler, type) and callable(getattr(scaler, "scale", None))
    for name, value, is_valid, expected in (
        ("model", model, isinstance(model, nn.Module), "a torch module"),
        ("loss", loss, callable(loss), "a function of outputs and targets"),
        ("reduction", reduction, reduction in (None, "mean", "sum"), "'mean', 'sum' or None"),
        ("modules", modules, are_modules, "a list of torch modules"),
        ("scaler", scaler, scaler is None or is_scaler, "a torch.amp.GradScaler, or None"),
    ):
        if not is_valid:
            raise ArgumentError(f"{name}={value!r}: expected {expected}")


class BigBatch:
    """Gradients of batches of any size, computed in the memory of one chunk of the batch.

    A chunk is a part of the batch. The plain step is the training step without BigBatch: one
    forward and one backward pass of the whole batch.

    Examples:
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> inputs, targets = torch.randn(512, 8), torch.randn(512, 1)
        >>> with pinfeed.BigBatch(model, torch.nn.MSELoss(), chunk_size=64) as big_batch:
        ...     loss = big_batch.backward(inputs, targets)
        ...     optimizer.step()
        ...     optimizer.zero_grad()

    Strategies:
        ``"plain"``: Computes the whole batch at once.
        ``"accumulate"``: Computes chunk after chunk and prefetches the next one. The loss must be a
            sum or mean of terms; chunks are weighted by their number of terms. torch's own losses
            qualify (also in ``functools.partial``), and other losses if ``reduction`` is given.
        ``"two_pass"``: Computes the outputs of all chunks, then their loss, then each chunk again
            with the same random numbers. The loss may be any function of the outputs.
        ``"checkpoint"``: Computes the whole batch, and recomputes parts of the model in the
            backward pass.
        ``"checkpoint_offload"``: Does the same, and keeps the inputs of these parts in host memory
            until the backward pass.
        ``"offload"``: Computes the whole batch, and keeps all activations in host memory until the
            backward pass. It is for models that checkpoint parts of themselves.
        ``"auto"``: Chooses a strategy at the first batch of each size, by memory and by
            correctness; ``chosen`` says why. If the batch then runs out of memory, it chooses the
            next one. It uses chunks only if they give the gradients of the
            plain step on a few samples of the first batch (see ``verify``).

    Random numbers:
        ``"accumulate"`` and ``"two_pass"`` draw other random numbers than the plain step. With
        dropout, their gradients therefore equal those of the plain step only in the mean.

    Args:
        model: The model, on its device, in the mode in which it is trained.
        loss: Function of outputs and targets, called with None for a batch without targets.
        config: A ``pinfeed.Config`` with memory limits; BigBatch uses the largest chunks that fit.
        chunk_size: Samples per chunk; None for the largest chunk that fits ``config``. It has no
            effect on strategies that compute the whole batch.
        strategy: One of the strategies above.
        reduction: ``"mean"`` or ``"sum"`` of terms, for a loss that torch does not define.
        count: Function that returns the number of terms of the mean for given targets. None
            counts samples. If targets are classes, None leaves out ``ignore_index`` (-100) and
            weights each target by its class.
        modules: Other modules with parameters that the loss uses.
        autocast: Dtype of autocast for forward passes and losses; None for no autocast.
        scaler: A ``torch.amp.GradScaler``; the caller unscales and steps.
        verify: Whether to compare strategies that compute chunks or recompute parts with the plain
            step before using them. The comparison runs at the first batch, for each new shape of
            samples, and after ``train()`` or ``eval()``. It computes three samples, whole and in
            chunks of two and one, and compares outputs, gradients, the loss and the model's state.
            If they differ, ``"auto"`` takes another strategy or raises, and a named strategy
            warns. Recomputed gradients must be equal bit for bit. False skips the comparison.

    Attributes:
        chosen: Strategy of the last batch; None before the first batch.
        n_halved: Number of chunks that did not fit in memory and were computed in halves.

    Raises:
        ArgumentError: If an argument is invalid.
    """

    @explain_arguments({})
    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        *,
        config: limits.MemoryLimits | None = None,
        chunk_size: int | None = None,
        strategy: str = "auto",
        reduction: Reduction | None = None,
        count: Count | None = None,
        modules: Sequence[nn.Module] = (),
        autocast: torch.dtype | None = None,
        scaler: torch.amp.GradScaler | None = None,
        verify: bool = True,
    ) -> None:
        others: Any = modules
        others = list(others) if isinstance(others, Iterable) else others
        _check_arguments(model, loss, reduction, others, scaler)
        self._spec = StepSpec(
            model=model,
            loss=loss,
            modules=(model, *([loss] if isinstance(loss, nn.Module) else []), *others),
            reduction=reduction or reduction_of(loss),
            count=count or count_of(loss),
            context=functools.partial(autocast_context, device_of(model).type, autocast),
            scale=(lambda loss: loss) if scaler is None else scaler.scale,
        )
        self._chooser = StrategyChooser(self._spec, config, chunk_size, strategy, autocast, verify)
        self._stream = ChunkStream(self._spec)
        self._whole = WholeSteps(self._spec.device, config)
        self._is_closed = False
        self.chosen: StrategyChoice | None = None
        self.n_halved = 0

    def __repr__(self) -> str:
        return (
            f"<BigBatch: {type(self._spec.model).__name__} on {self._spec.device}, "
            f"strategy={self._chooser.strategy!r}, chunk_size={self._chooser.chunk_size}"
            f"{', closed' if self._is_closed else ''}>"
        )

    def __enter__(self) -> BigBatch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the reader thread and free page-locked memory. Further calls do nothing."""
        self._is_closed = True
        with contextlib.ExitStack() as stack:
            stack.callback(self._stream.close)
            stack.callback(self._whole.close)

    def backward(self, inputs: Tensors, targets: Tensors | None = None) -> torch.Tensor:
        """Add the gradients of a whole batch to the gradients of the parameters.

        Args:
            inputs: Tensors or numpy arrays, on the host or on the device, in any structure that the
                model takes: a tuple is positional arguments, a dict keyword arguments. Or a source
                of pairs of inputs and targets: a Feeder, a DataLoader or an iterator. All batches
                of a source together are one batch. Only ``"accumulate"`` works with a source, and
                cuts batches that are larger than a chunk.
            targets: Targets of the same samples, in the same forms; None without targets.

        Returns:
            The loss of the whole batch, a tensor of shape ().

        Raises:
            ClosedError: If this BigBatch is closed.
            ArgumentError: If tensors have different numbers of samples, or the strategy is wrong
                for this model and loss.
            NotEnoughGPUMemory: If not even one sample fits on the GPU.
            NotEnoughCPUMemory: If the model is on the CPU and not even one sample fits.
        """
        self._require_open()
        if targets is None and batches.is_batch_source(inputs):
            return self._backward_source(inputs)
        inputs, targets = self._checked_batch(inputs, targets)
        self.chosen = self._chooser.choose(inputs, targets)
        return self._run(self.chosen, inputs, targets)

    def check(
        self, inputs: Tensors, targets: Tensors | None = None, *, chunk_size: int | None = None
    ) -> Check:
        """Compare the gradients of a small batch with those of the plain step.

        The model, its gradients and the random generators do not change. If the model draws random
        numbers, such as those of dropout, chunks draw others than the whole batch. So torch returns
        fixed numbers in both steps then: once near one end of their range, and once near the other.
        Dropout keeps every number.

        Args:
            inputs: Inputs as for ``backward``, at most as many samples as fit on the device at
                once.
            targets: Targets of these samples.
            chunk_size: Samples per chunk; None for a third of the samples.

        Returns:
            The differences; as a bool, True if they are no more than rounding.

        Raises:
            ClosedError: If this BigBatch is closed.
            ArgumentError: If ``backward`` would raise it, or if chunks draw random numbers that
                cannot be fixed, such as those of numpy.
        """
        self._require_open()
        inputs, targets = self._checked_batch(inputs, targets)
        n = batches.n_samples(inputs)
        strategy = self._chooser.strategy
        if strategy == "auto":
            strategy = (self.chosen or self._chooser.choose(inputs, targets)).strategy
        size = chunk_size or max(1, n // 3)
        chosen = self._chooser.named(strategy, n, size)  # type: ignore[arg-type]
        whole = to_device((inputs, targets), self._spec.device)
        return compare_with_plain_step(
            self._spec,
            strategy,
            lambda: self._spec.backward_whole(*whole),
            lambda: self._run(chosen, inputs, targets),
            is_cut=is_in_chunks(chosen, n),
        )

    def _checked_batch(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return inputs and targets as tensors, with equal numbers of samples."""
        check_targets(self._spec.loss, inputs, targets)
        inputs = batches.as_tensors(inputs)
        targets = batches.as_tensors(targets)
        n = batches.n_samples(inputs)
        n_targets = n if targets is None else batches.n_samples(targets)
        if n_targets != n:
            raise ArgumentError(
                f"inputs have {n} samples and targets {n_targets}; expected equally many"
            )
        if n == 0:
            raise ArgumentError("the batch is empty; expected at least one sample")
        batches.check_no_sample_lists((inputs, targets), n, " (inputs, targets)")
        return inputs, targets

    def _backward_source(self, source: Any) -> torch.Tensor:
        """Add the gradients of all batches of an iterable, as those of one batch."""
        if self._chooser.strategy not in ("auto", "accumulate"):
            raise ArgumentError(
                f"strategy={self._chooser.strategy!r} needs all samples at once, and batches "
                "arrive one by one; give the whole batch as tensors, or strategy='accumulate'"
            )
        is_feeder = hasattr(source, "batches") or isinstance(source, LoaderFeeder)
        feeder = source if is_feeder else wrap_loader(source, device=self._spec.device, depth=1)
        with (
            contextlib.nullcontext() if is_feeder else feeder,
            contextlib.closing(batches.input_target_pairs(feeder)) as pairs,
        ):
            first = batches.first_batches(pairs, self._spec.count_terms)
            if not first:
                raise ArgumentError("the source yields no batch; expected at least one")
            self.chosen = self._chooser.choose_for_source(first)
            chunks = self._source_chunks(itertools.chain(first, pairs), self.chosen.chunk_size)
            with gradient_transaction(self._spec.parameters):
                return self._accumulate(chunks, None, SOURCE)

    def _run(self, chosen: StrategyChoice, inputs: Any, targets: Any) -> torch.Tensor:
        """Add the gradients of a batch and return its loss; an error leaves gradients unchanged."""
        may_repeat = self._chooser.can_be_smaller(chosen)
        state = rng_state.capture() if may_repeat else {}
        buffers = buffers_of(self._spec.modules if may_repeat else ())
        try:
            with gradient_transaction(self._spec.parameters):
                return self._compute(chosen, inputs, targets)
        except (RuntimeError, MemoryError) as error:
            if not (may_repeat and is_out_of_memory(error)):
                raise
        release_cached_memory()
        rng_state.restore(state)
        restore_buffers(buffers)
        self.chosen = self._chooser.smaller(chosen, inputs, targets)
        self.n_halved += is_in_chunks(self.chosen, None)
        return self._run(self.chosen, inputs, targets)

    def _compute(self, chosen: StrategyChoice, inputs: Any, targets: Any) -> torch.Tensor:
        strategy = chosen.strategy
        size = chosen.chunk_size
        device = self._spec.device
        if strategy == "two_pass" and size < batches.n_samples(inputs):
            chunks = functools.partial(self._stream.chunks, inputs, targets, size)
            return backward_two_pass(self._spec, chunks, to_device(targets, device))
        if strategy == "accumulate":
            total = self._spec.count_terms(inputs, targets)
            if self._spec.reduction != "mean" or total:
                key = self._chooser.key_of(inputs, targets)
                return self._accumulate(self._stream.chunks(inputs, targets, size), total, key)
            # The batch has no terms, so the plain step decides what its mean is.
            inputs, targets = batches.slice_samples((inputs, targets), 0, size)
        inputs, targets = to_device((inputs, targets), device)
        with self._whole.context(strategy, self._spec.modules, inputs, chosen.device_limit):
            return self._spec.backward_whole(inputs, targets)

    def _accumulate(self, chunks: batches.Chunks, total: float | None, key: Any) -> torch.Tensor:
        accumulator = GradientAccumulator(self._spec)
        try:
            # Without closing, an error that the user keeps would keep the loop over chunks running.
            with contextlib.closing(chunks):
                return accumulator.run(chunks, total)
        finally:
            self.n_halved += accumulator.n_halved
            if accumulator.n_halved:
                self._chooser.halve_chunks(key)

    def _source_chunks(self, pairs: Iterable[tuple[Any, Any]], size: int) -> batches.Chunks:
        for batch in pairs:
            self._chooser.check_part_of_source(*batch)
            for samples in batches.split(batch, size):
                # Tensors are already on the device, but numpy arrays are not.
                yield self._spec.chunk(*to_device(samples, self._spec.device))

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this BigBatch is closed; make another one")
