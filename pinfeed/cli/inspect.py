"""``pinfeed inspect``: what is in files, from their headers, and what is wrong with them.

Nothing is unpickled.
"""

from __future__ import annotations

import fnmatch
import math
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pinfeed.cli.terminal.output import Report, facts, saying, sections, table, wrapped
from pinfeed.cli.terminal.sources import expanded
from pinfeed.errors import PinfeedError, described
from pinfeed.memory.units import human
from pinfeed.stores import MmapStore
from pinfeed.stores.formats.npy import Header, parse_header, read_header, strange
from pinfeed.stores.paths import has_protocol

_INSIDE = {
    "*.npy": "its files",
    "*.safetensors": "its files",
    "*-of-*": "the parts of its checkpoint, one for each rank",
}
"""What a directory may hold, and what that is."""
# Tensors of a safetensors file.
_SHOWN = 40


@dataclass
class Found:
    """What one file is.

    Attributes:
        path: The file, or directory.
        kind: ``npy``, ``safetensors``, ``checkpoint``, or ``unknown``.
        nbytes: Its size.
        details: What its header says.
        damage: What is wrong, and what to do.
    """

    path: str
    kind: str = "unknown"
    nbytes: int = 0
    details: dict[str, Any] = field(default_factory=dict)
    damage: list[str] = field(default_factory=list)

    @property
    def values(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "path": self.path,
            "kind": self.kind,
            "bytes": self.nbytes,
            **self.details,
            "damage": self.damage,
        }


def inspect(files: Sequence[str]) -> Report:
    """Look at each file, and at all .npy files as shards of one source."""
    found = [look(path) for path in expanded(files)]
    source, mismatch = _together([one for one in found if one.kind == "npy"])
    findings = [sentence for one in found for sentence in one.damage] + mismatch
    values = {"files": [one.values for one in found], "source": source}
    text = _one(found[0]) if len(found) == 1 else _many(found, source)
    return Report(values, text, tuple(findings))


def look(path: str) -> Found:
    """What a file is."""
    found = Found(path)
    if has_protocol(path):
        found.damage.append(
            f"{path} is elsewhere; inspect looks at local files (RemoteStore checks the header when it is opened)"
        )
        return found
    try:
        if os.path.isdir(path):
            _look_at_directory(found)
            return found
        status = os.stat(path)
        found.nbytes = status.st_size
        if not stat.S_ISREG(status.st_mode):
            # A pipe would be waited for.
            found.damage.append(f"{path} is no regular file; expected a .npy file")
            return found
        with open(path, "rb") as file:
            start = file.read(16)
        if path.endswith(".safetensors") and start:
            _look_at_safetensors(found)
        elif start.startswith(b"\x93NUMPY"):
            _look_at_npy(found)
        else:
            found.damage.append(strange(path, start))
    except FileNotFoundError:
        found.damage.append(f"{path}: no such file (looked in {os.getcwd()})")
    except PinfeedError as error:
        found.damage.append(str(error))
    except OSError as error:
        found.damage.append(f"{path} cannot be read: {error.strerror or described(error)}")
    return found


def _look_at_npy(found: Found) -> None:
    found.kind = "npy"
    with open(found.path, "rb") as file:
        header = parse_header(found.path, file)
    found.details = _header_values(header)
    # Which raises what stands in the way of serving the rows.
    extent = read_header(found.path)
    found.details["row_alignment"] = math.gcd(extent.offset, extent.row_nbytes) or 1
    if not extent.n_rows:
        found.damage.append(
            f"{found.path} has no rows (shape {header.shape}); expected at least one"
        )
    if found.nbytes > extent.end:
        more = found.nbytes - extent.end
        rows = f", {more / extent.row_nbytes:,.2f} rows" if extent.row_nbytes else ""
        found.damage.append(
            f"{found.path} has {more:,} bytes more than its header tells{rows}: was it appended to? They would not be read; "
            f"save the array again, or read the file with MmapStore.raw(path, shape=..., dtype=..., offset={extent.offset})"
        )


def _header_values(header: Header) -> dict[str, Any]:
    """Of a .npy file, for scripts."""
    n_items = math.prod(header.shape)
    plain = not header.dtype.hasobject
    return {
        "version": header.version,
        "shape": list(header.shape),
        "dtype": _spelled(header.dtype),
        "order": "Fortran" if header.fortran and len(header.shape) > 1 else "C",
        "header_bytes": header.nbytes,
        "row_bytes": header.dtype.itemsize * math.prod(header.shape[1:])
        if plain and header.shape
        else None,
        "expected_bytes": header.nbytes + n_items * header.dtype.itemsize if plain else None,
        "row_alignment": None,
    }


def _spelled(dtype: np.dtype[Any]) -> str:
    """As people write it, with the byte order where it is not this machine's."""
    return (
        str(dtype)
        if dtype.isnative or dtype.names
        else f"{dtype.name}, big-endian"
        if dtype.str[0] == ">"
        else f"{dtype.name}, little-endian"
    )


def _look_at_safetensors(found: Found) -> None:
    from pinfeed.stores.formats.safetensors import list_tensors

    found.kind = "safetensors"
    tensors = list_tensors(found.path)
    found.details = {
        "tensors": [
            {"name": name, "shape": list(shape), "dtype": dtype}
            for name, (shape, dtype) in tensors.items()
        ]
    }


def _look_at_directory(found: Found) -> None:
    names = os.listdir(found.path)
    if not any(name.isdigit() and len(name) == 8 for name in names):
        give = [
            f"give {what}: {os.path.join(found.path, like)}"
            for like, what in _INSIDE.items()
            if fnmatch.filter(names, like)
        ]
        found.damage.append(
            f"{found.path} is a directory; {give[0] if give else 'it has no .npy files and no checkpoint'}"
        )
        return
    from pinfeed.training import checkpoint

    found.kind = "checkpoint"
    with saying(f"reading {found.path}"):
        found.details = checkpoint.check(found.path)
    found.nbytes = found.details.pop("bytes")


def _together(shards: Sequence[Found]) -> tuple[dict[str, Any] | None, list[str]]:
    """All files as one source, for scripts; and why they cannot be one."""
    good = [one for one in shards if not one.damage]
    if not good or len(good) < len(shards):
        return None, []
    first = good[0]
    for other in good[1:]:
        if (other.details["shape"][1:], other.details["dtype"]) != (
            first.details["shape"][1:],
            first.details["dtype"],
        ):
            told = [
                f"{one.path} has rows of shape {tuple(one.details['shape'][1:])}, {one.details['dtype']}"
                for one in (first, other)
            ]
            return None, [f"the files are not shards of one source: {'; '.join(told)}"]
    with MmapStore([one.path for one in good]) as store:
        return {
            "files": len(good),
            "rows": store.n_rows,
            "bytes": store.n_rows * store.row_nbytes,
        }, []


def _one(found: Found) -> str:
    """One file, in full."""
    if found.kind == "safetensors" and found.details:
        tensors = found.details["tensors"]
        rows = [
            (tensor["name"], str(tuple(tensor["shape"])), tensor["dtype"])
            for tensor in tensors[:_SHOWN]
        ]
        more = (
            f"\n… and {len(tensors) - _SHOWN} more (--json lists all)"
            if len(tensors) > _SHOWN
            else ""
        )
        head = f"{found.path}: safetensors, {human(found.nbytes)}, {len(tensors)} tensors"
        return f"{head}\n\n{table(rows, ('tensor', 'shape', 'dtype'))}{more}"
    if found.kind == "checkpoint" and found.details:
        head = f"{found.path}: a checkpoint, {human(found.nbytes)}; its last save is {found.details['directory']}"
        return f"{wrapped(head)}\n\n{table(found.details['objects'].items(), ('object', 'kind'))}\n\nAll files agree with their checksums."
    if not found.details:
        return ""
    said, shape = found.details, tuple(found.details["shape"])
    alignment = said["row_alignment"]
    pairs = [
        ("rows", f"{shape[0]:,} of shape {shape[1:]}" if shape else "none: it is a single number"),
        ("dtype", said["dtype"]),
        (
            "order",
            "C: each row in one piece"
            if said["order"] == "C"
            else "Fortran: rows are scattered over the file",
        ),
        ("a row", f"{said['row_bytes']:,} bytes" if said["row_bytes"] is not None else ""),
        ("alignment", f"rows begin at multiples of {alignment:,} bytes" if alignment else ""),
        ("header", f".npy version {said['version']}.0, {said['header_bytes']:,} bytes"),
        (
            "size",
            f"{human(found.nbytes)}: {found.nbytes:,} bytes, {_compared(found.nbytes, said['expected_bytes'])}",
        ),
    ]
    return sections({found.path: facts(pairs)})


def _compared(nbytes: int, expected: int | None) -> str:
    if expected is None:
        return "of objects, which are pickled"
    return "as the header tells" if nbytes == expected else f"the header tells {expected:,}"


def _many(found: Sequence[Found], source: dict[str, Any] | None) -> str:
    """A line for each file."""
    rows = [
        (one.path, *_columns(one), human(one.nbytes), "damaged" if one.damage else "")
        for one in found
    ]
    shown = table(rows, ("file", "rows", "row shape", "dtype", "size", ""), "lrllr")
    if source is None:
        return shown
    return f"{shown}\n\nTogether: {source['rows']:,} rows, {human(source['bytes'])}, in {source['files']} shards"


def _columns(one: Found) -> tuple[str, str, str]:
    if one.kind != "npy" or not one.details:
        return "", one.kind if one.kind != "unknown" else "", ""
    shape = one.details["shape"]
    return f"{shape[0]:,}" if shape else "", str(tuple(shape[1:])), one.details["dtype"]
