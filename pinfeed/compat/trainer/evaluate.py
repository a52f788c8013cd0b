"""Evaluation: loss and metrics of a loader's batches, without gradients, in chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pinfeed.errors import ArgumentError
from pinfeed.feeders.wrap_loader import wrap_loader
from pinfeed.training.large_batch.batches import (
    as_tensors,
    concatenate,
    n_samples,
    slice_samples,
)
from pinfeed.training.large_batch.loss_reduction import count_of, reduction_of
from pinfeed.training.memory_model.models import call_model
from pinfeed.training.memory_model.out_of_memory import is_out_of_memory, release_cached_memory
from pinfeed.training.memory_model.tensor_specs import to_device

Metrics = Mapping[str, Callable[[Any, Any], Any]]


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a model on the batches of a loader.

    Attributes:
        model: The model.
        loss: Function of outputs and targets.
        device: Device of the model.
        size: Samples that are computed at a time; None for whole batches.
        context: Function that makes the context for forward passes and losses.
    """

    model: nn.Module
    loss: Callable[[Any, Any], Any]
    device: torch.device
    size: int | None
    context: Callable[[], contextlib.AbstractContextManager[Any]]

    def run(self, loader: Any, metrics: Metrics, is_feeder: bool) -> tuple[dict[str, float], int]:
        """Return the means of loss and metrics, and the number of samples.

        Args:
            loader: Yields pairs of inputs and targets, or inputs alone.
            metrics: Functions of the outputs and targets of a batch, by name.
            is_feeder: Whether the loader yields batches on the device.
        """
        totals = _Totals(self.loss, metrics)
        with (
            contextlib.ExitStack() as stack,
            torch.no_grad(),
            in_eval_mode([self.model, self.loss]),
        ):
            parts: Iterable[Any] = _parts_of(loader, self.size)
            if not is_feeder:
                parts = stack.enter_context(wrap_loader(parts, device=self.device))
            for outputs, targets, n in self._batches(parts):
                with self.context():
                    loss = torch.as_tensor(self.loss(outputs, targets)).detach().double()
                totals.add(loss, outputs, targets, n)
        if not totals.n_samples:
            raise ArgumentError(
                f"loader={loader!r} yielded no samples; expected at least one batch"
            )
        return totals.means(), totals.n_samples

    def _batches(self, parts: Iterable[Any]) -> Iterator[tuple[Any, Any, int]]:
        """Yield outputs, targets and the number of samples of each batch."""
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
        """Run the forward pass, in halves if memory runs out."""
        n = n_samples(inputs)
        try:
            with self.context():
                return call_model(self.model, inputs)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or n == 1:
                raise
        release_cached_memory()
        halves = ((0, n // 2), (n // 2, n))
        return concatenate([self._outputs(slice_samples(inputs, *half)) for half in halves])


class _Totals:
    """Sums of loss and metrics over batches, which stay on the device until ``means``.

    Attributes:
        n_samples: Number of samples.
    """

    def __init__(self, loss: Any, metrics: Metrics) -> None:
        self._metrics = metrics
        self._reduction = reduction_of(loss)
        self._count = count_of(loss) if self._reduction == "mean" else None
        self._sums: dict[str, Any] = dict.fromkeys(("loss", *metrics), 0.0)
        self._n_terms: Any = 0.0
        self.n_samples = 0

    def add(self, loss: torch.Tensor, outputs: Any, targets: Any, n: int) -> None:
        """Add a batch of ``n`` samples."""
        terms = n if self._count is None or targets is None else self._count(targets)
        weight = torch.as_tensor(terms, dtype=torch.float64, device=loss.device)
        if self._reduction != "sum":
            # The mean of no terms is NaN, so such a batch has no weight.
            loss = torch.where(weight > 0, loss * weight, 0.0)
        self._sums["loss"] = self._sums["loss"] + loss
        for name, metric in self._metrics.items():
            value = torch.as_tensor(metric(outputs, targets)).detach().double()
            self._sums[name] = self._sums[name] + value * n
        self.n_samples += n
        self._n_terms = self._n_terms + weight

    def means(self) -> dict[str, float]:
        """Return the mean loss (the sum, if the loss is a sum) and the mean of each metric."""
        weights = dict.fromkeys(self._sums, float(self.n_samples))
        weights["loss"] = 1.0 if self._reduction == "sum" else float(self._n_terms)
        return {name: float(total) / weights[name] for name, total in self._sums.items()}


def _parts_of(loader: Any, size: int | None) -> Iterator[tuple[Any, Any, bool]]:
    """Yield parts of a loader's batches: inputs, targets, and whether the part ends its batch."""
    for batch in loader:
        inputs, targets = (as_tensors(one) for one in pair_of(batch))
        n = n_samples(inputs)
        for start in range(0, n, size or n or 1):
            stop = start + (size or n)
            x = slice_samples(inputs, start, stop)
            yield x, slice_samples(targets, start, stop), stop >= n


def check_metrics(metrics: Any) -> None:
    """Check that metrics are a dict of functions.

    Raises:
        ArgumentError: If they are not a dict, or one of them is not a named function.
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ArgumentError(
            f"metrics={metrics!r}: expected a dict of functions of outputs and targets, such as "
            "{'accuracy': function}"
        )
    for name, metric in (metrics or {}).items():
        if not isinstance(name, str) or isinstance(metric, type) or not callable(metric):
            raise ArgumentError(
                f"metrics= has {name!r}: {metric!r}; expected a name and a function of outputs and "
                "targets"
            )


def pair_of(batch: Any) -> tuple[Any, Any]:
    """Return inputs and targets of a batch; targets are None if the batch has inputs only.

    Raises:
        ArgumentError: If the batch is a tuple or list that is not a pair.
    """
    if not isinstance(batch, (tuple, list)):
        return batch, None
    if len(batch) != 2:
        raise ArgumentError(
            f"a batch has {len(batch)} parts; expected a pair of inputs and targets, each of any "
            "structure"
        )
    return batch[0], batch[1]


@contextlib.contextmanager
def in_eval_mode(values: Sequence[Any]) -> Iterator[None]:
    """Put the modules among the values in eval mode, and restore the modes at the end."""
    modules = [module for module in values if isinstance(module, nn.Module)]
    were_training = [part for module in modules for part in module.modules() if part.training]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module in were_training:
            module.training = True
