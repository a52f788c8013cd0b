"""History: losses, times and metrics of a training run as plain numbers, saved to a file."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pinfeed.errors import ArgumentError


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
