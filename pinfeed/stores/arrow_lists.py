"""Items and offsets of an Arrow column of lists, on Arrow's memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from pinfeed.errors import MissingDependency, StoreError
from pinfeed.rows.orders import Rows
from pinfeed.stores.formats.arrow_chunk import values_of


def items_and_offsets(column: Any) -> tuple[Any, Rows]:
    """Return the items of all lists as a column, and the offset of each list.

    Args:
        column: A pyarrow.ListArray, a LargeListArray, or a ChunkedArray of these.

    Returns:
        A pyarrow.ChunkedArray on the memory of ``column``, and offsets of shape (n_rows + 1,),
        int64.

    Raises:
        MissingDependency: If pyarrow is not installed.
        StoreError: If ``column`` is not a column of lists, has nulls, or has no rows.
    """
    try:
        import pyarrow
    except ImportError:
        raise MissingDependency("from_arrow: pyarrow is needed; pip install pyarrow") from None
    is_column = isinstance(column, (pyarrow.ChunkedArray, pyarrow.Array))
    kind = column.type if is_column else type(column).__name__
    if not is_column or not (pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)):
        raise StoreError(
            f"from_arrow: got {kind}; expected a column of lists, a pyarrow.ListArray or a "
            'ChunkedArray of them, such as table["tokens"] or dataset.data.column("tokens")'
        )
    if column.null_count:
        raise StoreError(
            f"from_arrow: {column.null_count} of {len(column)} lists are null; expected none; fill "
            "them with empty lists (pyarrow.compute.fill_null), or leave them out (drop_null)"
        )
    if not len(column):
        raise StoreError("from_arrow: the column has no rows; expected at least one")
    chunks = column.chunks if isinstance(column, pyarrow.ChunkedArray) else [column]
    offsets = np.zeros(len(column) + 1, np.int64)
    items = []
    begin = 0
    for chunk in chunks:
        found = values_of(chunk.offsets)
        first = int(found[0])
        items.append(chunk.values.slice(first, int(found[-1]) - first))
        end = begin + len(chunk)
        offsets[begin + 1 : end + 1] = found[1:]
        offsets[begin + 1 : end + 1] += offsets[begin] - first
        begin = end
    return pyarrow.chunked_array(items), offsets
