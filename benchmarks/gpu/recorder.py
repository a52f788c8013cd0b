"""Recorder: measures the cells of a part, and saves after every cell."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CHARACTERS = 3000

Fields = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Args:
        key: The fields that identify it among the cells of its part.
        measure: Function that returns the measured fields, or raises ``Skipped``.
    """

    key: Fields
    measure: Callable[[], Fields]


class Skipped(Exception):
    """The cell cannot be measured on this machine; the message says why."""


class Recorder:
    """Measures cells until a deadline, and keeps the JSON file of the part up to date.

    Args:
        path: Path of an existing JSON file with the header of the part.
        deadline: The time of ``time.monotonic()`` after which no cell is begun.
        settle: Function that frees memory after every cell. If it raises, the device is lost, and
            the part ends.
    """

    def __init__(self, path: Path, deadline: float, settle: Callable[[], object]) -> None:
        self.path = path
        self.deadline = deadline
        self.record: Fields = json.loads(path.read_text())
        self._settle = settle
        self._began = time.monotonic()
        self._cells: list[Fields] = []
        self._waiting: deque[Cell] = deque()

    def add(self, cells: Iterable[Cell]) -> None:
        """Append cells. A cell that is being measured may call this."""
        self._waiting.extend(cells)

    def run(self) -> None:
        """Measure the cells in their order."""
        while self._waiting:
            if time.monotonic() >= self.deadline:
                self.save("ended at its deadline")
                return
            cell = self._waiting.popleft()
            self._measure(cell)
            if "note" in self.record:
                self.save("ended after an error of the device")
                return
        self.save("ended")

    def save(self, status: str, running: Fields | None = None) -> None:
        """Replace the file as a whole, so that it is always complete, even if the process dies."""
        not_reached = [cell.key for cell in self._waiting]
        self.record |= {
            "status": status,
            "running": running,
            "cells": self._cells,
            "not_reached": not_reached,
        }
        aside = self.path.with_name(f"{self.path.name}.aside")
        aside.write_text(json.dumps(self.record, indent=1, default=str) + "\n")
        os.replace(aside, self.path)

    def _measure(self, cell: Cell) -> None:
        self._say(f"begin {_text(cell.key)}")
        self.save("running", running=cell.key)
        begin = time.monotonic()
        found = _measured(cell)
        seconds = round(time.monotonic() - begin, 2)
        self._cells.append({**cell.key, **found, "took_s": seconds})
        self.save("running")
        try:
            self._settle()
        except Exception as error:
            self.record["note"] = (
                f"the device is lost after the cell {_text(cell.key)}: {_text_of(error)}"
            )
        self._say(f"end   {_text(found)}")

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:7.1f} s  {text[:400]}", flush=True)


@dataclass(frozen=True)
class Run:
    """Arguments of a part.

    Args:
        device: ``cuda``, or ``cpu`` for small sizes that check the code.
        recorder: Recorder of the cells.
    """

    device: str
    recorder: Recorder

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def left_s(self) -> float:
        """Return the seconds until the deadline of the part."""
        return max(0.0, self.recorder.deadline - time.monotonic())

    def require_cuda(self, what: str) -> None:
        """Skip the cell if there is no GPU."""
        if not self.cuda:
            raise Skipped(f"{what} needs a GPU; the device is {self.device}")


def _measured(cell: Cell) -> Fields:
    try:
        return cell.measure()
    except Skipped as reason:
        return {"skipped": str(reason)}
    except Exception as error:
        return {
            "error": _text_of(error),
            "traceback": traceback.format_exc()[-_CHARACTERS:],
        }


def _text(fields: Fields) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items() if name != "traceback")


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_CHARACTERS]
