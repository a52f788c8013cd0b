"""TextStore: a column of text, whose rows are strings next to the tensors of a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ReadError, StoreError
from pinfeed.rows.indices import check_rows
from pinfeed.rows.orders import Rows
from pinfeed.stores.arrow import ArrowStore, is_text_type
from pinfeed.stores.libraries import imported, is_of
from pinfeed.stores.store import ClosedOnExit
from pinfeed.tensors.argument_types import ArrowColumn

# Bytes of a str object in a list, besides its characters.
_STR_NBYTES = 57


class TextStore(ClosedOnExit):
    """Read-only rows of text: an Arrow column of strings, or a numpy array of them.

    A ``Feeder`` or a ``RowDataset`` accepts it as a source next to sources of numbers with as many
    rows. In a batch of n rows, it is a list of n ``str``, in the order of the rows; null is None.
    Reader threads make the list together with the tensors. It stays on the host, and transforms
    receive it as it is. The text columns of an Arrow table or a Hugging Face dataset become text
    stores by themselves.

    Args:
        column: A ``pyarrow.ChunkedArray`` or ``pyarrow.Array`` of strings, or of a dictionary of
            strings, or a 1-d numpy array of dtype ``str``. The store does not copy it.
        name: Name of the column in error messages.
        indices: A column of row indices: row i of the store is row ``indices[i]`` of ``column``. By
            default, it is row i.

    Raises:
        MissingDependency: If pyarrow is needed, but not installed.
        StoreError: If ``column`` is not text, or has no rows.

    Examples:
        >>> import pyarrow
        >>> titles = pinfeed.TextStore(pyarrow.array(["a", "bc", "d", "ef"]))
        >>> source = {"title": titles, "label": np.array([0, 1, 0, 1])}
        >>> with pinfeed.Feeder(source, batch_size=2, rows=[3, 0, 2, 1]) as feeder:
        ...     for batch in feeder:
        ...         print(batch["title"], batch["label"].tolist())
        ['ef', 'a'] [1, 0]
        ['d', 'bc'] [0, 1]
    """

    def __init__(
        self,
        column: ArrowColumn | npt.NDArray[np.str_],
        *,
        name: str = "column",
        indices: ArrowColumn | None = None,
    ) -> None:
        self._texts = _checked(column, name)
        self._name = name
        n_stored = len(self._texts)
        self._indices = None if indices is None else ArrowStore(indices, name=f"{name}: indices")
        self.n_rows: int = n_stored if self._indices is None else self._indices.n_rows
        """Number of rows."""
        if not self.n_rows:
            raise StoreError(f"{name}: the column has no rows; expected at least one")
        self.mean_row_nbytes: float = _STR_NBYTES + self._texts.nbytes / max(1, n_stored)
        """Mean bytes of a row in a batch, if its characters take as many as in the column."""
        self.resident_bytes: int = 0
        """Bytes of the column, if it was read for this store; 0 if the caller owns it."""

    def __repr__(self) -> str:
        return f"<TextStore {self._name}: {self.n_rows:,} rows of text>"

    def read(self, rows: Rows) -> list[str | None]:
        """Return rows as a list of ``str``, None for null.

        Args:
            rows: Row indices, shape (n,); they may repeat.

        Raises:
            RowIndexError: If a row is out of range or negative, or if the rows are not a 1-d array
                of integers.
            ReadError: If a row is not in UTF-8, which Arrow does not check.
        """
        rows = check_rows(rows, self.n_rows)
        if self._indices is not None:
            numbers = np.empty(len(rows), self._indices.dtype)
            self._indices.gather(rows, numbers)
            rows = check_rows(numbers, len(self._texts), f"{self._name}: indices")
        try:
            return _taken(self._texts, rows)
        except UnicodeDecodeError as error:
            raise ReadError(
                f"{self._name}: a row is not in UTF-8 ({error}); expected text; write it in UTF-8"
            ) from None

    def close(self) -> None:
        """Do nothing, because the store has opened nothing."""


def _taken(texts: Any, rows: Rows) -> list[str | None]:
    """Return rows of what ``_checked`` returned."""
    if not isinstance(texts, np.ndarray):
        if texts.num_chunks > 1 or str(texts.type) == "string_view":
            # Arrow would join all chunks to take rows of them, and cannot take string views.
            return [texts[row].as_py() for row in rows.tolist()]
        texts = texts.chunk(0)
    found: list[str | None] = texts.take(rows).tolist()
    return found


def is_text(column: Any) -> bool:
    """Return whether an object is a column of text of Arrow or numpy."""
    if isinstance(column, np.ndarray):
        return column.dtype.kind == "U" and column.ndim == 1
    return is_of(column, "pyarrow", "ChunkedArray", "Array") and is_text_type(column.type)


def _checked(column: Any, name: str) -> Any:
    """Return a numpy array of str, or a pyarrow.ChunkedArray of strings without empty chunks.

    Raises:
        StoreError: If ``column`` is neither.
    """
    if not is_text(column):
        kind = getattr(column, "type", getattr(column, "dtype", None))
        found = type(column).__name__ + (f" of {kind}" if kind is not None else "")
        raise StoreError(
            f"{name}: got {found}; expected text: an Arrow column of strings, or a 1-d numpy array "
            "of dtype str; give pyarrow.array(strings) for a list or a column of a pandas frame"
        )
    if isinstance(column, np.ndarray):
        return column
    chunks = column.chunks if hasattr(column, "chunks") else [column]
    full = [chunk for chunk in chunks if len(chunk)]
    return imported("pyarrow", name).chunked_array(full, column.type)
