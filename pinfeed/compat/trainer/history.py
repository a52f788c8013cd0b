"""History: measurements of a training run as plain numbers, in files and in a picture."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pinfeed.errors import ArgumentError, MissingDependency
from pinfeed.validation.requirements import install_line

_LOSSES: dict[str, dict[str, Any]] = {
    "batch": {"label": "batch", "color": "#4878a8", "linewidth": 0.8, "alpha": 0.6},
    "epoch": {"label": "epoch, mean", "color": "#cc4125", "marker": "o", "markersize": 4},
    "evaluation": {"label": "evaluation", "color": "#6aa84f", "marker": "o", "markersize": 4},
}
"""Style of the losses of each kind of record."""
_MEMORY = {
    "allocated_bytes": "device",
    "peak_bytes": "device, peak",
    "host_bytes": "host, resident",
}
_GIB = 1 << 30


@dataclass(frozen=True)
class Record:
    """Measurements of a backward pass, an epoch, or an evaluation.

    Examples:
        >>> from pinfeed.compat.trainer import Trainer
        >>> model = torch.nn.Linear(8, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = [(torch.randn(32, 8), torch.randn(32, 1)) for _ in range(5)]
        >>> with Trainer(model, torch.nn.MSELoss(), sgd, loader) as trainer:
        ...     record = trainer.train(2).epochs[-1]
        >>> record.epoch, record.samples
        (1, 160)

    Attributes:
        kind: ``"batch"`` for a backward pass, ``"epoch"`` or ``"evaluation"``.
        epoch: Number of the epoch, from 0; for an evaluation, the epochs begun before it.
        batch: Number of the backward pass in its epoch, from 0; None for the other kinds.
        loss: Loss of the batch or of the evaluation; for an epoch, the mean over its batches,
            weighted by samples.
        samples: Number of samples.
        seconds: Time on the host, without work that the device has not finished. The time of a
            backward pass begins at the end of the previous one, or at the beginning of the epoch.
        allocated_bytes: Memory of torch's tensors on the device at the end; None on the CPU.
        peak_bytes: Largest such memory since torch's peak was last reset; None on the CPU.
        host_bytes: Resident memory of the process at the end; None if the system does not
            report it.
        metrics: Metrics of an evaluation, by name.
    """

    kind: Literal["batch", "epoch", "evaluation"]
    epoch: int
    batch: int | None
    loss: float
    samples: int
    seconds: float
    allocated_bytes: int | None
    peak_bytes: int | None
    host_bytes: int | None
    metrics: Mapping[str, float] = field(default_factory=dict)


COLUMNS = tuple(one.name for one in dataclasses.fields(Record) if one.name != "metrics")


class History:
    """Records of a training run, as plain numbers, in the order in which they ended.

    Examples:
        >>> from pinfeed.compat.trainer import Trainer
        >>> model = torch.nn.Linear(8, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = [(torch.randn(32, 8), torch.randn(32, 1)) for _ in range(5)]
        >>> with Trainer(model, torch.nn.MSELoss(), sgd, loader) as trainer:
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
        return self._of_kind("batch")

    @property
    def epochs(self) -> list[Record]:
        """Records of epochs."""
        return self._of_kind("epoch")

    @property
    def evaluations(self) -> list[Record]:
        """Records of evaluations."""
        return self._of_kind("evaluation")

    def _of_kind(self, kind: str) -> list[Record]:
        return [row for row in self.rows if row.kind == kind]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a table (.csv) or a list of objects (.json); each metric has a column of its own.

        Raises:
            ArgumentError: If the path has another ending.
        """
        write_table(path, [_as_row(record) for record in self.rows])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> History:
        """Return the history that ``save`` wrote.

        Raises:
            ArgumentError: If the path ends in neither .csv nor .json, or the file is not a history.
        """
        history = cls()
        for number, row in enumerate(read_table(path)):
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


def write_table(path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows to a file.

    In a CSV file None and missing columns are empty fields.

    Raises:
        ArgumentError: If the path ends neither in .csv nor in .json.
    """
    is_csv = _is_csv(path)
    with open(path, "w", newline="" if is_csv else None) as file:
        if not is_csv:
            json.dump(list(rows), file, indent=1)
            return
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)


def read_table(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the rows of a file.

    In a CSV file numbers are parsed, and an empty field is None.

    Raises:
        ArgumentError: If the path ends neither in .csv nor in .json.
    """
    with open(path, newline="") as file:
        if not _is_csv(path):
            found: list[dict[str, Any]] = json.load(file)
            return found
        return [{name: _value(text) for name, text in row.items()} for row in csv.DictReader(file)]


def _is_csv(path: str | os.PathLike[str]) -> bool:
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"path={path!r}: expected the path of a .csv or .json file")
    ending = os.path.splitext(os.fspath(path))[1]
    if ending not in (".csv", ".json"):
        raise ArgumentError(
            f"path={os.fspath(path)!r} ends in {ending!r}; expected a path that ends in .csv or "
            ".json"
        )
    return ending == ".csv"


def _value(text: str) -> int | float | str | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text or None


def draw_history(records: Sequence[Record], path: str | os.PathLike[str]) -> None:
    """Draw the losses and the memory of a history.

    Raises:
        MissingDependency: If matplotlib is not installed.
        ArgumentError: If there are no records, or ``path`` is not the path of a picture.
    """
    if not records:
        raise ArgumentError("the history is empty; expected at least one record; train first")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependency(f"draw() needs matplotlib; {install_line('plot')}") from None
    figure = Figure(figsize=(10, 7), layout="constrained")
    _check_path(path, FigureCanvasAgg(figure).get_supported_filetypes())
    losses, memory = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    points = list(zip(_positions(records), records, strict=True))
    for kind, style in _LOSSES.items():
        _draw_line(losses, [(x, one.loss) for x, one in points if one.kind == kind], **style)
    losses.set_ylabel("loss")
    losses.legend()
    for name, label in _MEMORY.items():
        # The memory of an epoch is measured at its end, but its point is in its middle.
        measured = [(x, getattr(one, name)) for x, one in points if one.kind != "epoch"]
        known = [(x, nbytes / _GIB) for x, nbytes in measured if nbytes is not None]
        _draw_line(memory, known, label=label, linewidth=1)
    memory.set_ylabel("GiB")
    memory.set_xlabel("epoch")
    if memory.lines:
        memory.set_ylim(0, 1.15 * memory.dataLim.y1)
        memory.legend()
    figure.savefig(os.fspath(path), dpi=120)


def _check_path(path: Any, endings: Any) -> None:
    ending = os.path.splitext(path)[1] if isinstance(path, (str, os.PathLike)) else None
    # matplotlib adds an ending if there is none.
    if ending is None or (ending and ending[1:].lower() not in endings):
        raise ArgumentError(
            f"path={path!r}: expected the path of a picture, such as history.png; save() writes "
            ".csv and .json files"
        )


def _draw_line(axes: Any, points: Sequence[tuple[float, float]], **style: Any) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), **style)


def _positions(records: Sequence[Record]) -> list[float]:
    """Return the position of each record on an axis of epochs.

    Batches are spread over their epoch; the mean of an epoch is in its middle.
    """
    n_batches: dict[int, int] = {}
    for record in records:
        if record.batch is not None:
            n_batches[record.epoch] = max(n_batches.get(record.epoch, 0), record.batch + 1)
    positions = []
    for record in records:
        within = 0.5 if record.kind == "epoch" else 0.0
        if record.batch is not None:
            within = (record.batch + 1) / n_batches[record.epoch]
        positions.append(record.epoch + within)
    return positions
