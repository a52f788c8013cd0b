"""Samplers, and helpers that draw the rows of orders and batches."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from pinfeed.rows import block_shuffled, per_rank, sequential, shuffled
from pinfeed.rows import drawn as drawn_rows
from pinfeed.rows.order_batches import RowBatches, RowIndices
from pinfeed.rows.orders import Order, Rows


def drawn(draws: Iterator[RowIndices]) -> Iterator[tuple[Rows, int]]:
    """Yield the row indices and the checksum of each draw."""
    for draw in draws:
        rows = draw.rows()
        assert draw.n_rows == len(rows) == sum(n for n, _ in draw.batches)
        yield rows, draw.batches[-1][1]


ORDERS: list[Order] = [
    sequential(),
    shuffled(3),
    block_shuffled(3, block_rows=1),
    block_shuffled(3, block_rows=7, window_blocks=1),
    block_shuffled(3, block_rows=7, window_blocks=3),
    block_shuffled(3, block_rows=1 << 40, window_blocks=1 << 40),
    per_rank(sequential(), rank=1, world_size=3),
    per_rank(shuffled(3), rank=2, world_size=3, drop_last=True),
    per_rank(block_shuffled(3, block_rows=7, window_blocks=3), rank=2, world_size=3),
    per_rank(per_rank(shuffled(3), rank=1, world_size=2), rank=0, world_size=2),
    drawn_rows(50, 3),
    per_rank(drawn_rows(50, 3), rank=2, world_size=3),
]


def whole(order: Order, n: int, epoch: int = 0) -> Rows:
    return order.bind(n, epoch)(np.arange(order.length(n)))


def rows_of(
    batches: RowBatches, number: int = 0, start: int = 0, checksum: int = 0
) -> list[list[int]]:
    return [rows.tolist() for rows, _ in drawn(batches.epoch(number, start, checksum))]


class Sampler:
    """A sampler of the user's, with a length and with ``set_epoch``."""

    def __init__(self, elements: list[Any], length: int | None = None) -> None:
        self.elements = elements
        self.length = len(elements) if length is None else length
        self.epochs = list[int]()

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)

    def set_epoch(self, number: int) -> None:
        self.epochs.append(number)
        if hasattr(self, "epoch"):
            self.epoch = number


class Unsized:
    """An iterable without a length."""

    def __init__(self, elements: list[Any]) -> None:
        self.elements = elements

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)
