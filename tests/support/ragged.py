"""Ragged rows for tests, and what a loop in Python makes of them."""

from typing import Any

import numpy as np


class Ragged:
    """Rows of unequal length, some of them empty, as lists of their items.

    Args:
        n_rows: Number of rows.
        longest: Length of the longest rows.
        item_shape: Shape of an item.
        dtype: Dtype of the items.
        gap: Items before the first row and behind the last one.
    """

    def __init__(
        self,
        n_rows: int = 60,
        longest: int = 9,
        item_shape: tuple[int, ...] = (),
        dtype: Any = np.uint16,
        gap: int = 0,
    ) -> None:
        rng = np.random.default_rng(n_rows)
        lengths = rng.integers(0, longest + 1, n_rows)
        self.offsets = gap + np.concatenate(([0], np.cumsum(lengths)))
        shape = (int(self.offsets[-1]) + gap, *item_shape)
        self.values = rng.integers(0, 200, shape).astype(dtype)
        self.rows = [
            self.values[begin:end]
            for begin, end in zip(self.offsets[:-1], self.offsets[1:], strict=True)
        ]

    def batch(self, rows: Any, layout: str, padding: Any = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return the two arrays of a batch, as a plain loop makes them."""
        found = [self.rows[i] for i in rows]
        lengths = np.array([len(row) for row in found], np.int64)
        tail = self.values.shape[1:]
        if layout == "padded":
            out = np.full((len(found), lengths.max(initial=0), *tail), padding, self.values.dtype)
            for target, row in zip(out, found, strict=True):
                target[: len(row)] = row
            return out, lengths
        joined = np.concatenate([np.empty((0, *tail), self.values.dtype), *found])
        return joined, np.concatenate(([0], np.cumsum(lengths)))


def plain_batches(
    lengths: Any, order: Any, most: int, *, batch_size: int | None, padded: bool, drop_last: bool
) -> list[list[int]]:
    """Return batches bounded by elements, as a plain loop cuts them."""

    def fits(rows: list[int], more: int = 0) -> bool:
        found = [int(lengths[row]) for row in rows] + [1] * more
        elements = len(found) * max(found) if padded else sum(found)
        return elements <= most and (batch_size is None or len(found) <= batch_size)

    batches: list[list[int]] = [[]]
    for row in order:
        if batches[-1] and not fits([*batches[-1], row]):
            batches.append([])
        batches[-1].append(row)
    if not batches[-1] or (drop_last and fits(batches[-1], 1)):
        batches.pop()
    return batches
