"""BigBatch: gradients of a batch that does not fit on the device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from pinfeed.errors import ArgumentError, ClosedError
from pinfeed.feeders.loader_feeder import LoaderFeeder
from pinfeed.feeders.wrap_loader import wrap_loader
from pinfeed.memory import limits
from pinfeed.training.large_batch import batches
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
from pinfeed.training.large_batch.strategy_choice import STRATEGIES, StrategyChoice, is_in_chunks
from pinfeed.training.large_batch.strategy_runner import StrategyOptions, StrategyRunner
from pinfeed.training.memory_model.tensor_specs import to_device
from pinfeed.training.memory_model.training_step import autocast_context, check_autocast
from pinfeed.validation.arguments import check_flag, explain_arguments, whole_number


def _check_arguments(
    model: Any, loss: Any, options: StrategyOptions, reduction: Any, modules: Any, scaler: Any
) -> None:
    if isinstance(loss, type):
        raise ArgumentError(
            f"loss={loss.__name__} is a class; expected a function of outputs and targets; give "
            f"loss={loss.__name__}()"
        )
    config = options.config
    strategy = options.strategy
    strategies = ("auto", *STRATEGIES)
    is_config = config is None or isinstance(config, limits.MemoryLimits)
    are_modules = isinstance(modules, list) and all(isinstance(one, nn.Module) for one in modules)
    is_scaler = not isinstance(scaler, type) and callable(getattr(scaler, "scale", None))
    for name, value, is_valid, expected in (
        ("model", model, isinstance(model, nn.Module), "a torch module"),
        ("loss", loss, callable(loss), "a function of outputs and targets"),
        ("config", config, is_config, "a pinfeed.Config, or None"),
        ("strategy", strategy, strategy in strategies, f"one of {str(strategies)[1:-1]}"),
        ("reduction", reduction, reduction in (None, "mean", "sum"), "'mean', 'sum' or None"),
        ("modules", modules, are_modules, "a list of torch modules"),
        ("scaler", scaler, scaler is None or is_scaler, "a torch.amp.GradScaler, or None"),
    ):
        if not is_valid:
            raise ArgumentError(f"{name}={value!r}: expected {expected}")
    if options.chunk_size is not None:
        whole_number(options.chunk_size, "chunk_size")
    check_autocast(options.autocast)
    check_flag(options.verify, "verify")


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
        ``"offload"``: Computes the whole batch, and keeps activations in host memory until the
            backward pass.
        ``"auto"``: Chooses a strategy at the first batch of each size, by memory and by
            correctness; ``chosen`` says why. It uses chunks only if they give the gradients of the
            plain step on a few samples of the first batch (see ``verify``).

    Random numbers:
        ``"accumulate"`` and ``"two_pass"`` draw other random numbers than the plain step. With
        dropout, their gradients therefore equal those of the plain step only in the mean.

    Args:
        model: The model, on its device, in the mode in which it is trained.
        loss: Function of outputs and targets, called with None for a batch without targets.
        config: A ``pinfeed.Config`` with memory limits; BigBatch uses the largest chunks that fit.
        chunk_size: Samples per chunk; None for the largest chunk that fits ``config``. It has no
            effect on ``"plain"``, ``"checkpoint"`` and ``"offload"``, which compute the whole
            batch.
        strategy: One of the strategies above.
        reduction: ``"mean"`` or ``"sum"`` of terms, for a loss that torch does not define.
        count: Function that returns the number of terms of the mean for given targets. None
            counts samples. If targets are classes, None leaves out ``ignore_index`` (-100) and
            weights each target by its class.
        modules: Other modules with parameters that the loss uses.
        autocast: Dtype of autocast for forward passes and losses; None for no autocast.
        scaler: A ``torch.amp.GradScaler``; the caller unscales and steps.
        verify: Whether to compare ``"accumulate"``, ``"two_pass"`` and ``"checkpoint"`` with the
            plain step before using them. The comparison runs at the first batch, for each new
            shape of samples, and after ``train()`` or ``eval()``. It computes three samples, whole
            and in chunks of two and one, and compares outputs, gradients, the loss and the model's
            state. If they differ, ``"auto"`` takes another strategy or raises, and a named
            strategy warns. False skips the comparison.

    Raises:
        ArgumentError: If an argument is invalid.
    """

    @explain_arguments({})
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
        scaler: torch.amp.GradScaler | None = None,
        verify: bool = True,
    ) -> None:
        others: Any = modules
        others = list(others) if isinstance(others, Iterable) else others
        options = StrategyOptions(config, chunk_size, strategy, autocast, verify)
        _check_arguments(model, loss, options, reduction, others, scaler)
        self._options = options
        self._spec = StepSpec(
            model=model,
            loss=loss,
            modules=(model, *([loss] if isinstance(loss, nn.Module) else []), *others),
            reduction=reduction or reduction_of(loss),
            count=count or count_of(loss),
            context=functools.partial(autocast_context, device_of(model).type, autocast),
            scale=(lambda loss: loss) if scaler is None else scaler.scale,
        )
        self._runner = StrategyRunner(self._spec, options)
        self._is_closed = False

    def __repr__(self) -> str:
        options = self._options
        return (
            f"<BigBatch: {type(self._spec.model).__name__} on {self._spec.device}, "
            f"strategy={options.strategy!r}, chunk_size={options.chunk_size}"
            f"{', closed' if self._is_closed else ''}>"
        )

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
        """Number of chunks that did not fit in memory and were computed in halves."""
        return self._runner.n_halved

    def backward(self, inputs: Any, targets: Any = None) -> torch.Tensor:
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
        chosen = self._runner.choose(inputs, targets)
        self._runner.chosen = chosen
        return self._runner.run(chosen, inputs, targets)

    def check(self, inputs: Any, targets: Any = None, *, chunk_size: int | None = None) -> Check:
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
        strategy = self._options.strategy
        if strategy == "auto":
            strategy = (self.chosen or self._runner.choose(inputs, targets)).strategy
        size = chunk_size or max(1, n // 3)
        chosen = self._runner.named(strategy, n, size)  # type: ignore[arg-type]
        whole = to_device((inputs, targets), self._spec.device)
        return compare_with_plain_step(
            self._spec,
            strategy,
            lambda: self._spec.backward_whole(*whole),
            lambda: self._runner.run(chosen, inputs, targets),
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
        if self._options.strategy not in ("auto", "accumulate"):
            raise ArgumentError(
                f"strategy={self._options.strategy!r} needs all samples at once, and batches "
                "arrive one by one; give the whole batch as tensors, or strategy='accumulate'"
            )
        is_feeder = hasattr(source, "batches") or isinstance(source, LoaderFeeder)
        feeder = source if is_feeder else wrap_loader(source, device=self._spec.device, depth=1)
        with (
            contextlib.nullcontext() if is_feeder else feeder,
            contextlib.closing(batches.input_target_pairs(feeder)) as pairs,
        ):
            return self._runner.run_source(pairs)

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this BigBatch is closed; make another one")
