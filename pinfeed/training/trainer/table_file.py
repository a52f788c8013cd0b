"""Tables of named values as CSV or JSON files."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from pinfeed.errors import ArgumentError


def write(path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]]) -> None:
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


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
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
