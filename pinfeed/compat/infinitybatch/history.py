"""History: the losses, metrics and times of a training loop."""

from __future__ import annotations

import csv
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from pinfeed.errors import ArgumentError
from pinfeed.training.large_batch.step_spec import count_of, reduction_of

Metrics = Mapping[str, Callable[[Any, Any], Any]]

_MOST_UNREAD = 256
"""Number of losses that stay on the device at most; each takes 512 bytes on a GPU."""


@dataclass(frozen=True)
class Record:
    """Measurements of a batch, an epoch, or an evaluation.

    Examples:
        >>> import warnings
        >>> from pinfeed.compat import infinitybatch
        >>> warnings.simplefilter("ignore", infinitybatch.InfinityBatchWarning)  # without a GPU
        >>> model = torch.nn.Linear(8, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = [(torch.randn(32, 8), torch.randn(32, 1)) for _ in range(5)]
        >>> ib = infinitybatch.InfinityBatch(
        ...     model, sgd, torch.nn.MSELoss(), loader, verbose=False
        ... )
        >>> ib.train(2)
        >>> record = ib.history.epochs[-1]
        >>> record.epoch, record.samples
        (1, 160)

    Attributes:
        kind: ``"batch"``, ``"epoch"`` or ``"evaluation"``.
        epoch: Number of the epoch, from 0; for an evaluation, the epochs begun before it.
        batch: Number of the loss in its epoch, from 0; None for the other kinds.
        loss: Loss of the batch or of the evaluation; for an epoch, the mean over its batches,
            weighted by samples.
        samples: Number of samples.
        seconds: Time on the host, without work that the device has not finished. The time of a
            batch begins at the previous loss, or at the beginning of the epoch.
        metrics: Metrics of an evaluation, by name.
    """

    kind: Literal["batch", "epoch", "evaluation"]
    epoch: int
    batch: int | None
    loss: float
    samples: int
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class History:
    """Records of a training run, in the order in which they ended.

    Examples:
        >>> import warnings
        >>> from pinfeed.compat import infinitybatch
        >>> warnings.simplefilter("ignore", infinitybatch.InfinityBatchWarning)  # without a GPU
        >>> model = torch.nn.Linear(8, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = [(torch.randn(32, 8), torch.randn(32, 1)) for _ in range(5)]
        >>> ib = infinitybatch.InfinityBatch(
        ...     model, sgd, torch.nn.MSELoss(), loader, verbose=False
        ... )
        >>> ib.train(2)
        >>> len(ib.history.epochs), len(ib.history.batches)
        (2, 10)
        >>> ib.history.save("history.csv")

    Attributes:
        rows: All records.
    """

    def __init__(self) -> None:
        self.rows: list[Record] = []

    def __repr__(self) -> str:
        return (
            f"<History: {len(self.epochs)} epochs, {len(self.batches)} batches, "
            f"{len(self.evaluations)} evaluations>"
        )

    @property
    def batches(self) -> list[Record]:
        """Records of batches."""
        return [row for row in self.rows if row.kind == "batch"]

    @property
    def epochs(self) -> list[Record]:
        """Records of epochs."""
        return [row for row in self.rows if row.kind == "epoch"]

    @property
    def evaluations(self) -> list[Record]:
        """Records of evaluations."""
        return [row for row in self.rows if row.kind == "evaluation"]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a table (.csv) or a list of objects (.json); each metric has a column of its own.

        Raises:
            ArgumentError: If the path has another ending.
        """
        rows = [vars(record) | dict(record.metrics) for record in self.rows]
        for row in rows:
            del row["metrics"]
        write_table(path, rows)


class Recorder:
    """Records losses, epochs and evaluations.

    Reading a loss waits for its device. The losses of batches are therefore read in groups.

    Attributes:
        history: The history.
        losses: Loss and number of samples of each batch, as ``losses[epoch][batch]``, since the
            last ``clear``.
        n_epochs: Number of epochs that have begun.
    """

    def __init__(self) -> None:
        self.history = History()
        self.losses: list[list[tuple[float, int]]] = []
        self.n_epochs = 0
        self._unread: list[tuple[torch.Tensor, int, float]] = []
        """Losses on the device, with the samples and seconds of their batches."""
        self._epoch_began_s = 0.0
        self._last_loss_s = 0.0

    def begin_epoch(self) -> None:
        """Begin an epoch."""
        self.read()
        self.losses.append([])
        self.n_epochs += 1
        self._epoch_began_s = self._last_loss_s = time.perf_counter()

    def add(self, loss: torch.Tensor, n_samples: int) -> None:
        """Record the loss of a batch, which has one element."""
        now = time.perf_counter()
        self._unread.append((loss.detach().reshape(()), n_samples, now - self._last_loss_s))
        self._last_loss_s = now
        if len(self._unread) == _MOST_UNREAD:
            self.read()

    def read(self) -> None:
        """Wait for the device, and record the losses so far as numbers."""
        unread = self._unread
        self._unread = []
        values = torch.stack([loss.double() for loss, _, _ in unread]).tolist() if unread else []
        for value, (_, n, seconds) in zip(values, unread, strict=True):
            epoch = self.losses[-1]
            record = Record("batch", self.n_epochs - 1, len(epoch), value, n, seconds)
            self.history.rows.append(record)
            epoch.append((value, n))

    def end_epoch(self) -> Record:
        """Add the record of the epoch to the history, and return it."""
        self.read()
        epoch = self.losses[-1] if self.losses else []
        n = sum(n for _, n in epoch)
        mean = sum(loss * n for loss, n in epoch) / n if n else math.nan
        seconds = time.perf_counter() - self._epoch_began_s
        record = Record("epoch", self.n_epochs - 1, None, mean, n, seconds)
        self.history.rows.append(record)
        return record

    def add_evaluation(
        self, loss: float, n_samples: int, seconds: float, metrics: Mapping[str, float]
    ) -> None:
        """Add the record of an evaluation to the history."""
        self.read()
        record = Record("evaluation", self.n_epochs, None, loss, n_samples, seconds, metrics)
        self.history.rows.append(record)

    def clear(self) -> None:
        """Clear ``losses``; the history stays."""
        self.read()
        self.losses.clear()


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


def write_table(path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows to a file.

    In a CSV file None and missing columns are empty fields.

    Raises:
        ArgumentError: If the path ends neither in .csv nor in .json.
    """
    is_path = isinstance(path, (str, os.PathLike))
    ending = os.path.splitext(os.fspath(path))[1] if is_path else None
    if ending not in (".csv", ".json"):
        raise ArgumentError(f"path={path!r}: expected the path of a .csv or .json file")
    with open(path, "w", newline="") as file:
        if ending == ".json":
            json.dump(list(rows), file, indent=1)
            return
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
