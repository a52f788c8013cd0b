"""Losses and metrics of a loader's batches, without gradients, in parts that fit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pinfeed.errors import ArgumentError
from pinfeed.feeders.dataloader import wrap_loader
from pinfeed.training.large_batch.strategies.loss_reduction import count_of, reduction_of
from pinfeed.training.large_batch.strategies.micro_batches import (
    as_tensors,
    concatenate,
    n_samples,
    slice_samples,
)
from pinfeed.training.memory_model.models import call_model
from pinfeed.training.memory_model.out_of_memory import is_out_of_memory, release_cached_memory
from pinfeed.training.memory_model.tensor_specs import to_device

Metrics = Mapping[str, Callable[[Any, Any], Any]]


@dataclass(frozen=True)
class Evaluator:
    """What is evaluated, and how.

    Attributes:
        model: The model.
        loss: Of outputs and targets.
        device: Where the model is.
        size: Samples at a time; None for those of a batch.
        context: What forward passes and losses run in.
    """

    model: nn.Module
    loss: Callable[[Any, Any], Any]
    device: torch.device
    size: int | None
    context: Callable[[], contextlib.AbstractContextManager[Any]]

    def run(self, loader: Any, metrics: Metrics, is_there: bool) -> tuple[dict[str, float], int]:
        """The means of loss and metrics, and the number of samples.

        Args:
            loader: Its batches are pairs of inputs and targets, or inputs alone.
            metrics: Called with outputs and targets of a batch.
            is_there: Its batches are on the device when they come.
        """
        sums: dict[str, Any] = dict.fromkeys(("loss", *metrics), 0.0)
        n_terms: Any = 0.0
        n = 0
        count = count_of(self.loss)
        reduction = reduction_of(self.loss)
        with (
            contextlib.ExitStack() as stack,
            torch.no_grad(),
            in_eval_mode([self.model, self.loss]),
        ):
            parts: Iterable[Any] = _Parts(loader, self.size)
            if not is_there:
                parts = stack.enter_context(wrap_loader(parts, device=self.device))
            for outputs, targets, size in self._batches(parts):
                terms = count(targets) if reduction == "mean" and targets is not None else size
                with self.context():
                    found = torch.as_tensor(self.loss(outputs, targets)).detach().double()
                weight = torch.as_tensor(terms, dtype=torch.float64, device=found.device)
                # A mean of no terms is not a number, and has no weight.
                sums["loss"] = sums["loss"] + (
                    found if reduction == "sum" else torch.where(weight > 0, found * weight, 0.0)
                )
                for name, metric in metrics.items():
                    sums[name] = (
                        sums[name]
                        + torch.as_tensor(metric(outputs, targets)).detach().double() * size
                    )
                n, n_terms = n + size, n_terms + weight
        if not n:
            raise ArgumentError(f"loader={loader!r} gave no samples; expected at least one batch")
        means = {name: float(total) / n for name, total in sums.items()}
        means["loss"] = float(sums["loss"]) / (1.0 if reduction == "sum" else float(n_terms))
        return means, n

    def _batches(self, parts: Iterable[Any]) -> Iterator[tuple[Any, Any, int]]:
        """Outputs, targets and the number of samples, batch by batch."""
        outputs = []
        targets = []
        n = 0
        for x, y, is_last in parts:
            n += n_samples(x)
            outputs.append(self._outputs(to_device(x, self.device)))
            targets.append(to_device(y, self.device))
            if is_last:
                yield concatenate(outputs), None if y is None else concatenate(targets), n
                outputs = []
                targets = []
                n = 0

    def _outputs(self, inputs: Any) -> Any:
        n = n_samples(inputs)
        try:
            with self.context():
                return call_model(self.model, inputs)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or n == 1:
                raise
        # Out of the except block: until then the traceback keeps the tensors of the frames that
        # failed.
        release_cached_memory()
        return concatenate(
            [self._outputs(slice_samples(inputs, a, b)) for a, b in ((0, n // 2), (n // 2, n))]
        )


class _Parts:
    """Parts of batches: inputs, targets, and whether it is the last one of its batch."""

    def __init__(self, loader: Any, size: int | None) -> None:
        self._loader = loader
        self._size = size

    def __iter__(self) -> Iterator[tuple[Any, Any, bool]]:
        for batch in self._loader:
            inputs, targets = (as_tensors(one) for one in pair_of(batch))
            n = n_samples(inputs)
            for start in range(0, n, self._size or n or 1):
                stop = start + (self._size or n)
                yield (
                    slice_samples(inputs, start, stop),
                    slice_samples(targets, start, stop),
                    stop >= n,
                )


def check_metrics(metrics: Any) -> None:
    """Refuse metrics that are no functions by name.

    Raises:
        ArgumentError: They are none.
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ArgumentError(
            f"metrics={metrics!r}: expected a dict of functions of outputs and targets, as {{'accuracy': function}}"
        )
    for name, metric in (metrics or {}).items():
        if not isinstance(name, str) or isinstance(metric, type) or not callable(metric):
            raise ArgumentError(
                f"metrics= has {name!r}: {metric!r}; expected a name and a function of outputs and targets"
            )


def pair_of(batch: Any) -> tuple[Any, Any]:
    """Inputs and targets; None where a batch is inputs alone.

    Raises:
        ArgumentError: It is a tuple or list of something else.
    """
    if not isinstance(batch, (tuple, list)):
        return batch, None
    if len(batch) != 2:
        raise ArgumentError(
            f"a batch has {len(batch)} parts; expected a pair of inputs and targets, each of any structure"
        )
    return batch[0], batch[1]


@contextlib.contextmanager
def in_eval_mode(modules: Sequence[Any]) -> Iterator[None]:
    """Modules among these in eval mode; afterwards each part of them is in the mode in which it was."""
    found = [module for module in modules if isinstance(module, nn.Module)]
    was_training = [part for module in found for part in module.modules() if part.training]
    for module in found:
        module.eval()
    try:
        yield
    finally:
        for module in was_training:
            module.training = True
