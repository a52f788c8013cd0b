"""Batches of sparse rows as torch tensors, sparse or dense."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pinfeed.native.library import address_of, library, packing
from pinfeed.tensors.numpy_torch import SIGNED, memory_of, to_torch


@functools.cache
def load_csr() -> None:
    """Make a sparse tensor before a loop needs one, without torch's warning of a beta state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        csr(torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.tensor([0, 1]), 1)


def csr(
    values: torch.Tensor, columns: torch.Tensor, bounds: torch.Tensor, n_columns: int
) -> torch.Tensor:
    """Return a sparse CSR tensor on the memory of its three tensors, whose columns are in range."""
    size = (len(bounds) - 1, n_columns)
    return torch.sparse_csr_tensor(bounds, columns, values, size=size, check_invariants=False)


def parts_of_csr(matrix: torch.Tensor) -> list[torch.Tensor]:
    """Return the values, the columns and the bounds of a sparse CSR tensor."""
    return [matrix.values(), matrix.col_indices(), matrix.crow_indices()]


def dense(
    values: torch.Tensor,
    columns: torch.Tensor,
    bounds: torch.Tensor,
    n_columns: int,
    take: Callable[[int], npt.NDArray[np.uint8]] | None = None,
) -> torch.Tensor:
    """Return the rows of a sparse matrix as a new dense tensor, on the device of its tensors.

    Values of equal columns of a row are added.

    Args:
        values: Values of the elements.
        columns: Columns of the elements, in range.
        bounds: First element of each row, and the end of the last one.
        n_columns: Number of columns.
        take: Returns memory on the host of a number of bytes, which compiled functions or numpy
            fill, in half of the time of torch or less. None uses torch, on any device.
    """
    n_rows = len(bounds) - 1
    if take is not None:
        array = memory_of(values)
        out = take(n_rows * n_columns * array.itemsize).view(array.dtype)
        out = out.reshape(n_rows, n_columns)
        parts = (array, memory_of(columns), memory_of(bounds))
        if not _put_compiled(*parts, out):
            out.fill(0)
            _put(*parts, out)
        return to_torch(out)
    made = torch.zeros(n_rows, n_columns, dtype=values.dtype, device=values.device)
    first = torch.arange(n_rows, device=values.device) * n_columns
    places = first.repeat_interleave(bounds.diff().long(), output_size=len(values))
    places += columns.to(bounds.dtype)
    # Sums of signed integers have the same bits as those of unsigned ones.
    kind = SIGNED.get(values.dtype, values.dtype)
    made.view(-1).view(kind).scatter_add_(0, places, values.view(kind))
    return made


def _put_compiled(values: Any, columns: Any, bounds: Any, out: Any) -> bool:
    """Write dense rows with the compiled functions; return whether that was possible.

    It is possible if the columns of each row ascend, as they usually do.
    """
    native = library()
    index = columns.dtype
    if (
        native is None
        or index not in (np.int32, np.int64)
        or bounds.dtype != index
        or values.itemsize > 8
        or not all(array.flags.c_contiguous for array in (values, columns, bounds))
    ):
        return False
    places = map(address_of, (values, columns, bounds, out))
    failed: int = native.dense(packing(8)(*places, *out.shape, values.itemsize, index.itemsize))
    return failed < 0


def _put(values: Any, columns: Any, bounds: Any, out: Any) -> None:
    """Add values to zeros with numpy."""
    n_rows, n_columns = out.shape
    places = np.repeat(np.arange(n_rows) * n_columns, np.diff(bounds)) + columns
    # Columns of a row usually ascend, and then no place occurs twice.
    if (places[1:] > places[:-1]).all():
        out.reshape(-1)[places] = values
    else:
        np.add.at(out.reshape(-1), places, values)
