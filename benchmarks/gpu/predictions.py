"""Predictions for one NVIDIA H200 that were made before the first run, compared with results.

    python -m benchmarks.gpu.predictions benchmarks/results/gpu-*.json

prints the table of docs/benchmarks.md. If several files have a measurement, the last one counts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.recorder import Fields
from benchmarks.rowcells import RowCell

NOT_MEASURED = "not measured yet"


@dataclass(frozen=True)
class Prediction:
    """A predicted range, and the place of the measurement in the results.

    Args:
        what: What is measured, in words.
        low: Smallest value that was predicted.
        high: Largest value.
        unit: Unit of the values.
        part: Part of the results.
        key: Fields that identify the cell.
        field: Field of the cell with the measured value.
    """

    what: str
    low: float
    high: float
    unit: str
    part: str
    key: Fields
    field: str

    def measured(self, records: Iterable[Mapping[str, Any]]) -> str:
        """Return the measured value, why there is none, or ``NOT_MEASURED``."""
        found = NOT_MEASURED
        for record in records:
            for cell in record["cells"] if record["part"] == self.part else ():
                if self.key.items() <= cell.items():
                    found = self._value(cell)
        return found

    def _value(self, cell: Fields) -> str:
        for reason in ("skipped", "error"):
            if reason in cell:
                return f"{reason}: {cell[reason]}".splitlines()[0]
        return f"{cell[self.field]:.3g} {self.unit}"


def predictions() -> list[Prediction]:
    """Return all predictions, in the order of the table."""
    return [*_link(), *_rows(), *_loops(), *_products(), *_steps()]


def _link() -> list[Prediction]:
    engine = {"by": "copy engine", "table_gb": 8}
    kernel = {**engine, "by": "row kernel", "what": "random rows", "direction": "to the device"}
    ranges = {4: (40, 50), 8: (50, 54), 16: (52, 55)}
    batches = {32: (20, 35), 64: (35, 50), 1024: (52, 55)}
    return [
        *(
            _gb_per_s(f"copy engine, {way}", (53, 56), "ceilings", {**engine, "direction": way})
            for way in ("to the device", "to the host")
        ),
        *(
            _gb_per_s(
                f"row kernel, 4 KiB rows, {n} blocks", both, "ceilings", kernel | {"n_blocks": n}
            )
            for n, both in ranges.items()
        ),
        *(
            _gb_per_s(
                f"copies in batches, rows of {kib} KiB",
                both,
                "batch-copies",
                {"by": "copies in batches", "row_nbytes": kib << 10},
                "gather_gb_per_s",
            )
            for kib, both in batches.items()
        ),
    ]


def _rows() -> list[Prediction]:
    cells = [
        ("gather", 512, 1, (48, 53)),
        ("gather", 512, 32, (25, 50)),
        ("gather", 64, 1, (15, 26)),
        ("gather", 128, 1, (28, 42)),
        ("gather", 256, 1, (42, 50)),
        ("scatter", 512, 1, (45, 53)),
    ]
    found = []
    for way, nbytes, gb, both in cells:
        key = {"what": "rows", "table_gb": gb, "row_nbytes": nbytes, "count": 65_536}
        what = f"{way} of {nbytes} B rows, table of {gb} GB"
        key["order"] = "random"
        found.append(_gb_per_s(what, both, "rows", key, f"{way}_gb_per_s"))
    return found


def _loops() -> list[Prediction]:
    cells = [
        ("direct", 512, (38, 50)),
        ("direct", 64, (8, 12)),
        ("staged", 512, (8, 14)),
        ("staged", 4096, (15, 25)),
    ]
    found = []
    for route, nbytes, both in cells:
        key = {"row_nbytes": nbytes, "write": False, "route": route, "order": "shuffled"}
        found.append(_gb_per_s(f"loop, {route} route, {nbytes} B rows", both, "routes", key))
    return found


def _products() -> list[Prediction]:
    cells = [
        ("8 thick blocks", 1.2, 1.9),
        ("thin blocks, 1 per multiprocessor", 1.05, 2),
        ("copy engine", 1.0, 1.05),
    ]
    found = []
    for by, low, high in cells:
        what = f"products of 8,192 during copies by {by}, relative to alone"
        found.append(
            Prediction(what, low, high, "times", "slowdown", {"by": by}, "during_to_alone")
        )
    return found


def _steps() -> list[Prediction]:
    ranges = {
        "prefetch": (1.5, 2.5),
        "synchronous": (4, 5),
        "UVA gathers": (3.5, 4.5),
        "SpeedTorch's": (4.5, 5.5),
        "whole table": (0.6, 0.8),
    }
    found = []
    for name, (low, high) in ranges.items():
        key = {"table": str(RowCell(128, 32_768, 0.0)), "model": "small", "contestant": name}
        what = f"step on 32,768 ids, {name}"
        found.append(Prediction(what, low, high, "ms", "tables", key, "step_ms"))
    return found


def _gb_per_s(
    what: str, both: tuple[float, float], part: str, key: Fields, field: str = "gb_per_s"
) -> Prediction:
    return Prediction(what, *both, "GB/s", part, key, field)


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table of the predictions and what the records of parts say.

    Measurements on a CPU do not count.
    """
    on_gpu = [record for record in records if record["device"] == "cuda"]
    lines = ["| what | predicted | measured |", "|---|---|---|"]
    for one in predictions():
        expected = f"{one.low:g} to {one.high:g} {one.unit}"
        lines.append(f"| {one.what} | {expected} | {one.measured(on_gpu)} |")
    return "\n".join(lines)


def records_of(names: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the records of JSON files. A file that a call left incomplete is named and skipped."""
    for name in names:
        try:
            yield json.loads(Path(name).read_text())
        except ValueError as error:
            print(f"{name} is skipped: {error}", file=sys.stderr)


if __name__ == "__main__":
    print(table(list(records_of(sys.argv[1:]))))
