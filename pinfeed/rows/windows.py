"""Windows: the groups of blocks that a block-shuffled epoch visits one after the other."""

from __future__ import annotations

from dataclasses import dataclass

from pinfeed.rows.orders import BlockShuffled, Order, PerRank
from pinfeed.rows.ranks import StridedSlice


@dataclass(frozen=True)
class Windows:
    """The windows of an epoch of a block-shuffled order, or of one rank's share of it."""

    order: BlockShuffled
    n_rows: int
    epoch: int
    pieces: tuple[StridedSlice, ...]
    """Positions of the order that are read."""

    @property
    def window_rows(self) -> int:
        """Most rows of a window."""
        return self.order.window_rows(self.n_rows)

    def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Divide the positions [start, stop) by window.

        Returns:
            The number of each window and the count of its positions, in their order.
        """
        spans: list[tuple[int, int]] = []
        for piece in self.pieces:
            i = max(0, start)
            end = min(piece.n, stop)
            while i < end:
                number = piece.at(i) // self.window_rows
                n = min(end, piece.below((number + 1) * self.window_rows)) - i
                i += n
                if spans and spans[-1][0] == number:
                    # The previous piece ended in the same window.
                    n += spans.pop()[1]
                spans.append((number, n))
            start -= piece.n
            stop -= piece.n
        return spans

    def runs(self, number: int) -> list[tuple[int, int]]:
        """Return the rows of a window, as runs [start, stop) in ascending order."""
        return self.order.runs(self.n_rows, self.epoch, number)


def windows(order: Order, n_rows: int, epoch: int) -> Windows | None:
    """Return the windows of an epoch; None if the order has no windows."""
    share = order if isinstance(order, PerRank) else PerRank(order, 0, 1, "join", hand=None)
    if not isinstance(share.order, BlockShuffled):
        return None
    return Windows(share.order, n_rows, epoch, share.pieces(n_rows))
