"""Stores of the columns of Arrow tables and of Hugging Face datasets."""

from __future__ import annotations

import sys
from typing import Any

from pinfeed.errors import StoreError
from pinfeed.stores.arrow import ArrowStore


def columns_of(source: Any, name: str) -> dict[str, ArrowStore] | None:
    """Return a store for each column of a pyarrow.Table or of a Hugging Face dataset.

    The columns and rows of a dataset are those that ``dataset[i]`` shows.

    Args:
        source: A table, a dataset, or anything else.
        name: Name of the source in errors.

    Returns:
        The stores by column name, or None if ``source`` is neither.

    Raises:
        StoreError: If pinfeed cannot read a column, or if the rows of a dataset are not those of
            its table.
    """
    # If pyarrow is not loaded, the source cannot be a table.
    pyarrow = sys.modules.get("pyarrow")
    if pyarrow is None:
        return None
    if isinstance(source, pyarrow.Table):
        return {
            column: ArrowStore(source[column], name=f"{name}[{column!r}]")
            for column in _unique(source.column_names, name)
        }
    if not _is_dataset(source):
        return None
    view = source.format
    if view["type"] == "custom":
        raise StoreError(
            f"{name}: the dataset has a transform that runs sample by sample; remove it with "
            "dataset.reset_format(), or give pinfeed.wrap_loader(DataLoader(dataset))"
        )
    names = [
        column
        for column in source.column_names
        if view["output_all_columns"] or column in view["columns"]
    ]
    # Row indices that select, shuffle, sort and other methods store in the dataset.
    indices = source._indices.column(0) if source._indices is not None else None
    stores = {
        column: ArrowStore(source.data.column(column), name=f"{name}[{column!r}]", indices=indices)
        for column in names
    }
    if view["type"] in ("numpy", "torch"):
        _check_format(view["type"], source[0], stores, name)
    return stores


def is_column(source: Any) -> bool:
    """Return whether an object is an Arrow column."""
    pyarrow = sys.modules.get("pyarrow")
    return pyarrow is not None and isinstance(source, (pyarrow.ChunkedArray, pyarrow.Array))


def _is_dataset(source: Any) -> bool:
    """Return whether an object is a Hugging Face dataset, without importing the library."""
    dataset = ("datasets.arrow_dataset", "Dataset")
    return any((base.__module__, base.__name__) == dataset for base in type(source).__mro__)


def _check_format(
    kind: str, first: dict[str, Any], stores: dict[str, ArrowStore], name: str
) -> None:
    """Check with the first row that the format of a dataset does not convert dtypes.

    Raises:
        StoreError: If it does.
    """
    for column, store in stores.items():
        given = str(getattr(first[column], "dtype", store.dtype)).removeprefix("torch.")
        if given != store.dtype.name:
            raise StoreError(
                f"{name}[{column!r}]: with_format({kind!r}) converts {store.dtype} to {given}; "
                "remove the format with dataset.with_format(None), or convert the stored column "
                "with dataset.cast_column"
            )


def _unique(names: list[str], name: str) -> list[str]:
    if len(set(names)) < len(names):
        raise StoreError(
            f"{name}: several columns have the same name: {', '.join(names)}; rename them with "
            "table.rename_columns"
        )
    return names
