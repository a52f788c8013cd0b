"""Plot of a training history: losses and memory over epochs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from pinfeed.errors import ArgumentError, MissingDependency
from pinfeed.training.trainer.record import Record
from pinfeed.validation.requirements import install_line

_COLOURS = {"batch": "#4878a8", "epoch": "#cc4125", "evaluation": "#6aa84f"}
_LABELS = {"batch": "batch", "epoch": "epoch, mean", "evaluation": "evaluation"}
_MEMORY_LABELS = {
    "allocated_bytes": "device",
    "peak_bytes": "device, peak",
    "host_bytes": "host, resident",
}
_POSITION_IN_EPOCH = {"batch": 0.0, "epoch": 0.5, "evaluation": 0.0}
_GIB = 1 << 30


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
    positions = _positions(records)
    _draw_losses(losses, records, positions)
    _draw_memory(memory, records, positions)
    figure.savefig(os.fspath(path), dpi=120)


def _check_path(path: Any, endings: Any) -> None:
    ending = os.path.splitext(path)[1] if isinstance(path, (str, os.PathLike)) else None
    # matplotlib adds an ending if there is none.
    if ending is None or (ending and ending[1:].lower() not in endings):
        raise ArgumentError(
            f"path={path!r}: expected the path of a picture, such as history.png; save() writes "
            ".csv and .json files"
        )


def _draw_losses(axes: Any, records: Sequence[Record], positions: Sequence[float]) -> None:
    for kind, label in _LABELS.items():
        pairs = zip(positions, records, strict=True)
        points = [(x, record.loss) for x, record in pairs if record.kind == kind]
        style: dict[str, Any] = {"marker": "o", "markersize": 4}
        if kind == "batch":
            style = {"linewidth": 0.8, "alpha": 0.6}
        if points:
            axes.plot(*zip(*points, strict=True), color=_COLOURS[kind], label=label, **style)
    axes.set_ylabel("loss")
    axes.legend()


def _draw_memory(axes: Any, records: Sequence[Record], positions: Sequence[float]) -> None:
    for name, label in _MEMORY_LABELS.items():
        points = []
        for x, record in zip(positions, records, strict=True):
            nbytes = getattr(record, name)
            # The memory of an epoch is measured at its end, but its point is in its middle.
            if record.kind != "epoch" and nbytes is not None:
                points.append((x, nbytes / _GIB))
        if points:
            axes.plot(*zip(*points, strict=True), label=label, linewidth=1)
    axes.set_ylabel("GiB")
    axes.set_xlabel("epoch")
    if axes.lines:
        axes.set_ylim(0, 1.15 * axes.dataLim.y1)
        axes.legend()


def _positions(records: Sequence[Record]) -> list[float]:
    """Return the position of each record on an axis of epochs.

    Batches are spread over their epoch; the mean of an epoch is in its middle.
    """
    counts: dict[int, int] = {}
    for record in records:
        if record.batch is not None:
            counts[record.epoch] = max(counts.get(record.epoch, 0), record.batch + 1)
    positions = []
    for record in records:
        if record.batch is None:
            positions.append(record.epoch + _POSITION_IN_EPOCH[record.kind])
        else:
            positions.append(record.epoch + (record.batch + 1) / counts[record.epoch])
    return positions
