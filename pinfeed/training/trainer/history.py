"""History: what a training run measured, as plain numbers."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pinfeed.errors import ArgumentError, MissingDependency
from pinfeed.training.trainer import table_file

_COLOURS = {"batch": "#4878a8", "epoch": "#cc4125", "evaluation": "#6aa84f"}
_GIB = 1 << 30


@dataclass(frozen=True)
class Record:
    """A backward pass, an epoch, or an evaluation.

    Attributes:
        kind: Which of these.
        epoch: Its number, from 0; of an evaluation, of epochs that were begun before it.
        batch: The number of the backward pass in its epoch, from 0; else None.
        loss: Of the batch; of an epoch the mean of its batches, weighed by their samples.
        samples: How many.
        seconds: From the one before, or the beginning of the epoch, to its end on the host: what
            the device still computes is not in it.
        allocated_bytes: What torch's tensors took on the device at its end; None on the CPU.
        peak_bytes: The most that they took until then, since torch's peak was last reset; None on
            the CPU.
        host_bytes: Resident memory of the process at its end; None where the system does not tell
            it.
        metrics: Of an evaluation.
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
    """Rows of numbers, in the order in which things ended; no tensor is kept."""

    def __init__(self) -> None:
        self.rows: list[Record] = []

    def __repr__(self) -> str:
        ended = [row for row in self.rows if row.kind != "batch"]
        last = f", last {ended[-1].kind} with loss {ended[-1].loss:.4g}" if ended else ""
        return f"<History: {len(self.epochs)} epochs, {len(self.batches)} batches, {len(self.evaluations)} evaluations{last}>"

    @property
    def batches(self) -> list[Record]:
        """Of backward passes; those of an epoch are there when it has ended."""
        return [row for row in self.rows if row.kind == "batch"]

    @property
    def epochs(self) -> list[Record]:
        return [row for row in self.rows if row.kind == "epoch"]

    @property
    def evaluations(self) -> list[Record]:
        return [row for row in self.rows if row.kind == "evaluation"]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a table (.csv) or a list of objects (.json); metrics are columns beside the others.

        Raises:
            ArgumentError: The path ends in something else.
        """
        table_file.write(
            path,
            [
                {name: getattr(row, name) for name in COLUMNS} | dict(row.metrics)
                for row in self.rows
            ],
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> History:
        """What ``save`` wrote.

        Raises:
            ArgumentError: The path ends in neither .csv nor .json, or the file is no history.
        """
        found = cls()
        for number, row in enumerate(table_file.read(path)):
            if missing := [name for name in COLUMNS if name not in row]:
                raise ArgumentError(
                    f"{os.fspath(path)!r}, row {number} has no {missing[0]!r}; expected a file that History.save wrote"
                )
            metrics = {
                name: value
                for name, value in row.items()
                if name not in COLUMNS and value is not None
            }
            found.rows.append(Record(**{name: row[name] for name in COLUMNS}, metrics=metrics))
        return found

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw losses and memory (.png, .svg, .pdf; needs matplotlib).

        Raises:
            MissingDependency: There is no matplotlib.
            ArgumentError: There is nothing to draw, or the path is not that of a picture.
        """
        if not self.rows:
            raise ArgumentError("the history is empty: train first")
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            raise MissingDependency(
                'a picture needs matplotlib: pip install "pinfeed[plot]"'
            ) from None
        figure = Figure(figsize=(10, 7), layout="constrained")
        endings = FigureCanvasAgg(figure).get_supported_filetypes()
        given: Any = path
        ending = os.path.splitext(path)[1] if isinstance(given, (str, os.PathLike)) else None
        # matplotlib adds an ending where there is none.
        if ending is None or (ending and ending[1:].lower() not in endings):
            raise ArgumentError(
                f"path={path!r}: expected the path of a picture, such as history.png; save() writes .csv and .json files"
            )
        losses, memory = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        self._draw_losses(losses)
        self._draw_memory(memory)
        figure.savefig(os.fspath(path), dpi=120)

    def _draw_losses(self, axes: Any) -> None:
        places = self._places()
        labels = {"batch": "batch", "epoch": "epoch, mean", "evaluation": "evaluation"}
        for kind, label in labels.items():
            points = [
                (x, row.loss) for x, row in zip(places, self.rows, strict=True) if row.kind == kind
            ]
            style = (
                {"linewidth": 0.8, "alpha": 0.6}
                if kind == "batch"
                else {"marker": "o", "markersize": 4}
            )
            if points:
                axes.plot(*zip(*points, strict=True), color=_COLOURS[kind], label=label, **style)
        axes.set_ylabel("loss")
        axes.legend()

    def _draw_memory(self, axes: Any) -> None:
        places = self._places()
        for name, label in (
            ("allocated_bytes", "device"),
            ("peak_bytes", "device, peak"),
            ("host_bytes", "host, resident"),
        ):
            # That is no moment.
            taken = [
                (x, getattr(row, name))
                for x, row in zip(places, self.rows, strict=True)
                if row.kind != "epoch"
            ]
            points = [(x, nbytes / _GIB) for x, nbytes in taken if nbytes is not None]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, linewidth=1)
        axes.set_ylabel("GiB")
        axes.set_xlabel("epoch")
        if axes.lines:
            axes.set_ylim(0, 1.15 * axes.dataLim.y1)
            axes.legend()

    def _places(self) -> list[float]:
        """Where each row is on an axis of epochs: batches within theirs, an epoch's mean in its middle."""
        counts: dict[int, int] = {}
        for row in self.rows:
            if row.batch is not None:
                counts[row.epoch] = max(counts.get(row.epoch, 0), row.batch + 1)
        inside = {"batch": 0.0, "epoch": 0.5, "evaluation": 0.0}
        return [
            row.epoch
            + (inside[row.kind] if row.batch is None else (row.batch + 1) / counts[row.epoch])
            for row in self.rows
        ]
