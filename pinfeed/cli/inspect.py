"""``pinfeed inspect``: the contents of files by their headers, and what is wrong with them.

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

from pinfeed.cli.contents import Contents, contents_of, dtype_name
from pinfeed.cli.contents_text import contents_text
from pinfeed.cli.report import Report, facts, saying, sections, table
from pinfeed.cli.sources import expanded, format_of
from pinfeed.errors import FileMissing, MissingDependency, PinfeedError, described
from pinfeed.memory.units import human
from pinfeed.stores.npy_header import Header, parse_header, read_header, strange
from pinfeed.stores.paths import has_protocol
from pinfeed.validation.wrapping import wrapped

_INSIDE = {
    "*.npy": "its files",
    "*.safetensors": "its files",
    "*-of-*": "the parts of its checkpoint, one for each rank",
}
"""Patterns of files that a directory may hold, and what these files are."""
# Tensors of a safetensors file that are listed for people.
_SHOWN = 40


@dataclass
class Found:
    """A file, as ``inspect`` found it.

    Attributes:
        path: Path of the file or directory.
        kind: ``npy``, ``safetensors``, ``hdf5``, ``zarr``, ``parquet``, ``checkpoint``, or
            ``unknown``.
        nbytes: Size in bytes.
        details: Facts that the header states.
        contents: Arrays and columns of a file of another format; None if it was not read.
        damage: Sentences that say what is wrong, and what to do.
        problem: Kind of the problem, in one or two words, if ``damage`` is not empty.
    """

    path: str
    kind: str = "unknown"
    nbytes: int = 0
    details: dict[str, Any] = field(default_factory=dict)
    contents: Contents | None = None
    damage: list[str] = field(default_factory=list)
    problem: str = "not supported"

    @property
    def values(self) -> dict[str, Any]:
        """The file for scripts."""
        return {
            "path": self.path,
            "kind": self.kind,
            "bytes": self.nbytes,
            **self.details,
            "damage": self.damage,
        }


def inspect(files: Sequence[str]) -> Report:
    """Report on each file, and on all .npy files as shards of one source."""
    found = [inspected(path) for path in expanded(files)]
    source, mismatch = _together([one for one in found if one.kind == "npy"])
    findings = [sentence for one in found for sentence in one.damage] + mismatch
    values = {"files": [one.values for one in found], "source": source}
    text = _one(found[0]) if len(found) == 1 else _many(found, source)
    return Report(values, text, tuple(findings))


def inspected(path: str) -> Found:
    """Find out the kind of a file, and what is wrong with it."""
    found = Found(path)
    try:
        named = format_of(path)
        if has_protocol(path):
            found.damage.append(
                f"{path} is a remote file; inspect reads local files (RemoteStore checks the "
                "header when it opens a file)"
            )
        elif named is not None:
            _read_contents(found, *named)
        elif os.path.isdir(path):
            _read_directory(found)
        else:
            _read_file(found)
    except FileNotFoundError:
        found.problem = "missing"
        found.damage.append(f"{path}: no such file (looked in {os.getcwd()})")
    except FileMissing as error:
        found.problem = "missing"
        found.damage.append(str(error))
    except PinfeedError as error:
        found.damage.append(str(error))
    except OSError as error:
        found.problem = "unreadable"
        found.damage.append(f"{path} cannot be read: {error.strerror or described(error)}")
    return found


def _read_file(found: Found) -> None:
    status = os.stat(found.path)
    found.nbytes = status.st_size
    if not stat.S_ISREG(status.st_mode):
        # Reading a pipe would wait for its writer.
        found.damage.append(f"{found.path} is not a regular file; expected a .npy file")
        return
    with open(found.path, "rb") as file:
        start = file.read(16)
    if found.path.endswith(".safetensors") and start:
        _read_safetensors(found)
    elif start.startswith(b"\x93NUMPY"):
        _read_npy(found)
    else:
        found.problem = "not supported" if start else "damaged"
        found.damage.append(strange(found.path, start))


def _read_npy(found: Found) -> None:
    found.kind = "npy"
    found.problem = "damaged"
    with open(found.path, "rb") as file:
        header = parse_header(found.path, file)
    found.details = _header_values(header)
    if found.details["expected_bytes"] in (found.nbytes, None):
        found.problem = "not supported"
    # This raises an error if pinfeed cannot serve the rows.
    layout = read_header(found.path)
    found.details["row_alignment"] = math.gcd(layout.offset, layout.row_nbytes) or 1
    if not layout.n_rows:
        found.damage.append(
            f"{found.path} has no rows (shape {header.shape}); expected at least one"
        )
    if found.nbytes > layout.end:
        more = found.nbytes - layout.end
        rows = f", {more / layout.row_nbytes:,.2f} rows" if layout.row_nbytes else ""
        found.damage.append(
            f"{found.path} has {more:,} bytes more than its header says{rows}. pinfeed would not "
            "read them. If data was appended, save the array again, or read the file with "
            f"NpyStore.raw(path, shape=..., dtype=..., offset={layout.offset})"
        )


def _header_values(header: Header) -> dict[str, Any]:
    """Describe the header of a .npy file for scripts; sizes of pickled objects are None."""
    dtype = header.dtype
    size = None if dtype.hasobject else dtype.itemsize
    shape = header.shape
    return {
        "version": header.version,
        "shape": list(shape),
        "dtype": dtype_name(dtype),
        "order": "Fortran" if header.fortran and len(shape) > 1 else "C",
        "header_bytes": header.nbytes,
        "row_bytes": None if size is None or not shape else size * math.prod(shape[1:]),
        "expected_bytes": None if size is None else header.nbytes + size * math.prod(shape),
        "row_alignment": None,
    }


def _read_contents(found: Found, path: str, kind: str, name: str | None) -> None:
    """Find out what is in an HDF5, Zarr or Parquet file, or at one name of it."""
    found.kind = kind
    found.problem = "damaged"
    try:
        contents = contents_of(path, kind, name)
    except MissingDependency:
        found.problem = "not supported"
        raise
    found.contents = contents
    found.nbytes = contents.nbytes or 0
    found.details = {"bytes": contents.nbytes, **contents.values(kind)}
    if not contents.has_source:
        found.problem = "not supported"
        problems = contents.problems or [f"{found.path} has no arrays; expected at least one"]
        found.damage += problems


def _read_safetensors(found: Found) -> None:
    from pinfeed.stores.safetensors import list_tensors

    found.kind = "safetensors"
    found.problem = "damaged"
    tensors = list_tensors(found.path)
    found.details = {
        "tensors": [
            {"name": name, "shape": list(shape), "dtype": dtype}
            for name, (shape, dtype) in tensors.items()
        ]
    }


def _read_directory(found: Found) -> None:
    names = os.listdir(found.path)
    if not any(name.isdigit() and len(name) == 8 for name in names):
        hints = [
            f"give {what}: {os.path.join(found.path, pattern)}"
            for pattern, what in _INSIDE.items()
            if fnmatch.filter(names, pattern)
        ]
        hint = hints[0] if hints else "it contains no .npy files and no checkpoint"
        found.damage.append(f"{found.path} is a directory; {hint}")
        return
    from pinfeed.training.checkpoint.reader import check

    found.kind = "checkpoint"
    found.problem = "damaged"
    with saying(f"reading {found.path}"):
        found.details = check(found.path)
    found.nbytes = found.details.pop("bytes")


def _together(shards: Sequence[Found]) -> tuple[dict[str, Any] | None, list[str]]:
    """Describe all files as one source, for scripts; or say why they cannot be one.

    Returns:
        The values, or None without files or if one has a problem; and findings.
    """
    if not shards or any(shard.damage for shard in shards):
        return None, []
    first = shards[0]
    for other in shards[1:]:
        if _rows_of(other) != _rows_of(first):
            mismatch = "; ".join(f"{one.path} has {_rows_of(one)}" for one in (first, other))
            return None, [f"the files are not shards of one source: {mismatch}"]
    n_rows = sum(shard.details["shape"][0] for shard in shards)
    nbytes = n_rows * first.details["row_bytes"]
    return {"files": len(shards), "rows": n_rows, "bytes": nbytes}, []


def _rows_of(shard: Found) -> str:
    return f"rows of shape {tuple(shard.details['shape'][1:])}, {shard.details['dtype']}"


def _one(found: Found) -> str:
    """Describe one file, in full."""
    if found.contents is not None:
        return contents_text(found.path, found.kind, found.contents)
    texts = {"npy": _npy_text, "safetensors": _safetensors_text, "checkpoint": _checkpoint_text}
    return texts[found.kind](found) if found.details else ""


def _safetensors_text(found: Found) -> str:
    tensors = found.details["tensors"]
    rows = [
        (tensor["name"], str(tuple(tensor["shape"])), tensor["dtype"])
        for tensor in tensors[:_SHOWN]
    ]
    head = f"{found.path}: safetensors, {human(found.nbytes)}, {len(tensors)} tensors"
    text = f"{head}\n\n{table(rows, ('tensor', 'shape', 'dtype'))}"
    if len(tensors) > _SHOWN:
        text += f"\n… and {len(tensors) - _SHOWN} more (--json lists all)"
    return text


def _checkpoint_text(found: Found) -> str:
    last = found.details["directory"]
    head = f"{found.path}: a checkpoint, {human(found.nbytes)}; last save {last}"
    objects = table(found.details["objects"].items(), ("object", "kind"))
    return f"{wrapped(head)}\n\n{objects}\n\nAll files match their checksums."


def _npy_text(found: Found) -> str:
    details = found.details
    shape = tuple(details["shape"])
    alignment = details["row_alignment"]
    rows = "none: it is a single number"
    if shape:
        rows = f"{shape[0]:,} of shape {shape[1:]}"
    order = "Fortran: the items of a row are scattered over the file"
    if details["order"] == "C":
        order = "C: each row is contiguous"
    size = "with pickled objects"
    if (expected := details["expected_bytes"]) is not None:
        is_complete = found.nbytes == expected
        size = "as the header says" if is_complete else f"but the header says {expected:,}"
    row_nbytes = details["row_bytes"]
    pairs = [
        ("rows", rows),
        ("dtype", details["dtype"]),
        ("order", order),
        ("a row", "" if row_nbytes is None else f"{row_nbytes:,} bytes"),
        ("alignment", f"rows begin at multiples of {alignment:,} bytes" if alignment else ""),
        ("header", f".npy version {details['version']}.0, {details['header_bytes']:,} bytes"),
        ("size", f"{human(found.nbytes)}: {found.nbytes:,} bytes, {size}"),
    ]
    return sections({found.path: facts(pairs)})


def _many(found: Sequence[Found], source: dict[str, Any] | None) -> str:
    """Describe several files, in a line each, and then what is in files of other formats."""
    rows = [(one.path, *_columns(one)) for one in found]
    shown = table(rows, ("file", "rows", "row shape", "dtype", "size", "problem"), "lrllr")
    texts = [shown]
    if source is not None and source["files"] > 1:
        size = f"{source['rows']:,} rows, {human(source['bytes'])}"
        texts.append(f"Together: {size}, in {source['files']} shards")
    texts += [_one(one) for one in found if one.contents is not None]
    return "\n\n".join(texts)


def _columns(one: Found) -> tuple[str, ...]:
    """Return the cells of a file: rows, row shape, dtype, size and problem."""
    rows = "", one.kind if one.kind != "unknown" else "", ""
    if one.kind == "npy" and one.details:
        shape = one.details["shape"]
        rows = f"{shape[0]:,}" if shape else "", str(tuple(shape[1:])), one.details["dtype"]
    # The size of a damaged checkpoint is unknown.
    size = human(one.nbytes) if one.nbytes or os.path.isfile(one.path) else ""
    return *rows, size, one.problem if one.damage else ""
