"""History: measurements of a training run, as plain numbers."""

from __future__ import annotations

import os
from typing import Any

from pinfeed.errors import ArgumentError
from pinfeed.training.trainer import table_file
from pinfeed.training.trainer.history_plot import draw_history
from pinfeed.training.trainer.record import COLUMNS, Record


class History:
    """Records of a training run, as plain numbers, in the order in which they ended.

    Examples:
        >>> model = torch.nn.Linear(8, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = [(torch.randn(32, 8), torch.randn(32, 1)) for _ in range(5)]
        >>> with pinfeed.Trainer(model, torch.nn.MSELoss(), sgd, loader) as trainer:
        ...     history = trainer.train(2)
        >>> len(history.epochs), len(history.batches)
        (2, 10)
        >>> history.save("history.csv")

    Attributes:
        rows: All records.
    """

    def __init__(self) -> None:
        self.rows: list[Record] = []

    def __repr__(self) -> str:
        ended = [row for row in self.rows if row.kind != "batch"]
        last = f", last {ended[-1].kind} with loss {ended[-1].loss:.4g}" if ended else ""
        return (
            f"<History: {len(self.epochs)} epochs, {len(self.batches)} batches, "
            f"{len(self.evaluations)} evaluations{last}>"
        )

    @property
    def batches(self) -> list[Record]:
        """Records of backward passes; an epoch adds its records when it ends."""
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
        table_file.write(path, [_as_row(record) for record in self.rows])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> History:
        """Return the history that ``save`` wrote.

        Raises:
            ArgumentError: If the path ends in neither .csv nor .json, or the file is not a history.
        """
        history = cls()
        for number, row in enumerate(table_file.read(path)):
            if missing := [name for name in COLUMNS if name not in row]:
                raise ArgumentError(
                    f"{os.fspath(path)!r}, row {number} has no {missing[0]!r}; expected a file "
                    "that History.save wrote"
                )
            others = {name: value for name, value in row.items() if name not in COLUMNS}
            metrics = {name: value for name, value in others.items() if value is not None}
            history.rows.append(Record(**{name: row[name] for name in COLUMNS}, metrics=metrics))
        return history

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw losses and memory into a picture, such as history.png; needs matplotlib.

        Raises:
            MissingDependency: If matplotlib is not installed.
            ArgumentError: If the history is empty, or ``path`` is not the path of a picture.
        """
        draw_history(self.rows, path)


def _as_row(record: Record) -> dict[str, Any]:
    """Return the values of a record by column, with its metrics as further columns."""
    return {name: getattr(record, name) for name in COLUMNS} | dict(record.metrics)
