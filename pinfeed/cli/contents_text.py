"""Text for people about the contents of HDF5, Zarr and Parquet files."""

from __future__ import annotations

from collections.abc import Sequence

from pinfeed.cli.contents import Array, Contents
from pinfeed.cli.report import sections, table
from pinfeed.memory.units import human
from pinfeed.validation.wrapping import wrapped

_FORMATS = {
    "hdf5": ("HDF5", "dataset", "HDF5Store"),
    "zarr": ("Zarr", "array", "ZarrStore"),
    "parquet": ("Parquet", "column", "ParquetStore"),
}
"""Name of each format, of its parts, and of the store that reads one."""
# Parts of a file, and problems, that are listed.
_SHOWN = 40
_SHOWN_PROBLEMS = 8
# Columns of a matrix that are listed.
_SHOWN_COLUMNS = 8


def contents_text(path: str, kind: str, contents: Contents) -> str:
    """Describe what is in a file, and which calls read it."""
    name, part, _ = _FORMATS[kind]
    arrays = [one for one in contents.arrays if not one.problem]
    n_matrices = sum(not one.problem for one in contents.matrices)
    head = [f"{path}: {name}"]
    if contents.nbytes is not None:
        head.append(human(contents.nbytes))
    if kind == "parquet":
        head.append(_groups(contents))
    counts = {part: len(arrays), "sparse matrix": n_matrices}
    head += [_counted(n, word) for word, n in counts.items() if n]
    shown = [
        wrapped(", ".join(head), rest="  "),
        _arrays(arrays, part),
        _matrices(contents),
        _calls(kind, arrays, contents),
    ]
    problems = contents.problems
    lines = [wrapped(f"- {one}", rest="  ") for one in problems[:_SHOWN_PROBLEMS]]
    if contents.has_source and problems:
        text = "\n".join([*lines, *_more(len(problems), _SHOWN_PROBLEMS)])
        shown.append(sections({"Not sources": text}))
    return "\n\n".join(filter(None, shown))


def _arrays(arrays: Sequence[Array], part: str) -> str:
    columns = {
        part: [one.name for one in arrays],
        "shape": [str(one.shape) for one in arrays],
        "dtype": [one.dtype for one in arrays],
        "chunks": [str(one.chunks or "") for one in arrays],
        "shards": [str(one.shards or "") for one in arrays],
        "compression": [one.compression for one in arrays],
        "size": [human(one.nbytes or 0) for one in arrays],
    }
    return _table(columns)


def _matrices(contents: Contents) -> str:
    matrices = [one for one in contents.matrices if not one.problem]
    return _table(
        {
            "matrix": [one.name for one in matrices],
            "shape": [str(one.shape) for one in matrices],
            "dtype": [one.values.dtype for one in matrices],
            "elements": [f"{one.n_elements:,}" for one in matrices],
            "per row": [f"{one.mean_elements:,.1f}" for one in matrices],
            "size": [human(one.nbytes) for one in matrices],
        }
    )


def _table(columns: dict[str, list[str]]) -> str:
    """Format columns as a table, without the empty ones."""
    used = {title: cells for title, cells in columns.items() if any(cells)}
    rows = list(zip(*used.values(), strict=True))
    if not rows:
        return ""
    align = "".join("r" if one in ("elements", "per row", "size") else "l" for one in used)
    shown = table(rows[:_SHOWN], list(used), align)
    return "\n".join([shown, *_more(len(rows), _SHOWN)])


def _more(n: int, n_shown: int) -> list[str]:
    return [f"… and {n - n_shown:,} more (--json lists all)"] if n > n_shown else []


def _calls(kind: str, arrays: Sequence[Array], contents: Contents) -> str:
    """Name the calls that read what is listed."""
    _, part, store = _FORMATS[kind]
    lines = []
    if arrays:
        name = f', "{arrays[0].name}"' * bool(arrays[0].name)
        lines.append(f"{store}(path{name}) reads {_a(part)}.")
    for one in [one for one in contents.matrices if not one.problem][:1]:
        name = f', "{one.name}"' * (one.name not in ("", "X"))
        lines.append(f"SparseStore(path{name}) reads a sparse matrix.")
    if len(contents.matrix) > 1:
        names = ", ".join(f'"{name}"' for name in contents.matrix)
        if len(contents.matrix) > _SHOWN_COLUMNS:
            names = "..."
        n = len(contents.matrix)
        dtype = contents.matrix_dtype
        lines.append(f"{store}(path, columns=[{names}]) reads {n} columns as a matrix of {dtype}.")
    return "\n".join(wrapped(line, rest="  ") for line in lines)


def _groups(contents: Contents) -> str:
    n_rows = sum(n for n, _ in contents.groups)
    if not contents.groups:
        return "no rows"
    most, nbytes = max(contents.groups, key=lambda group: group[1])
    groups = _counted(len(contents.groups), "row group")
    return f"{n_rows:,} rows in {groups} (the largest: {most:,} rows, {human(nbytes)})"


def _counted(n: int, word: str) -> str:
    plural = "sparse matrices" if word == "sparse matrix" else f"{word}s"
    return f"{n:,} {word if n == 1 else plural}"


def _a(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"
