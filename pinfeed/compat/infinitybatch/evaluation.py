"""Evaluation: means of loss and metrics over batches, and the eval mode of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from pinfeed.compat.infinitybatch.history import Record
from pinfeed.errors import ArgumentError
from pinfeed.training.large_batch.step_spec import count_of, reduction_of

Metrics = Mapping[str, Callable[[Any, Any], Any]]


class Means:
    """Means of loss and metrics over batches, which stay on the device until ``read``.

    Args:
        loss: The loss function, which says how its values are weighted.
        metrics: Functions of the outputs and targets of a batch, by name.

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

    def read(self) -> dict[str, float]:
        """Return the mean loss (the sum, if the loss is a sum) and the mean of each metric."""
        weights = dict.fromkeys(self._sums, float(self.n_samples))
        weights["loss"] = 1.0 if self._reduction == "sum" else float(self._n_terms)
        return {name: float(total) / weights[name] for name, total in self._sums.items()}


def check_metrics(metrics: Any) -> Metrics:
    """Return metrics as a dict of functions.

    Raises:
        ArgumentError: If they are not a dict, or one of them is not a named function.
    """
    expected = "expected a dict of functions of outputs and targets, such as {'accuracy': function}"
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ArgumentError(f"metrics={metrics!r}: {expected}")
    for name, metric in (metrics or {}).items():
        if not isinstance(name, str) or isinstance(metric, type) or not callable(metric):
            raise ArgumentError(f"metrics= has {name!r}: {metric!r}; {expected}")
        if name in Record.__dataclass_fields__:
            raise ArgumentError(
                f"metrics= has {name!r}, which is the name of a column of the history; give the "
                "metric another name"
            )
    return dict(metrics or {})


@contextlib.contextmanager
def in_eval_mode(*values: Any) -> Iterator[None]:
    """Put the modules among the values in eval mode, and restore the modes at the end."""
    modules = [value for value in values if isinstance(value, nn.Module)]
    were_training = [part for module in modules for part in module.modules() if part.training]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part in were_training:
            part.training = True
