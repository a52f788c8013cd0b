"""ReplaySource: batches of transitions that were drawn from a replay buffer."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pinfeed.pipeline.sources.source import ArrayPart, BatchThunk, HostBatch, Source
from pinfeed.stores.host_rows import CheckStop, UnreadPart, never
from pinfeed.stores.store import Array
from pinfeed.stores.transition_ring import Draw, TransitionRing

DrawNow = Callable[[], Draw]
"""Draws the transitions of a batch from those that are stored now."""


@dataclass(frozen=True)
class PartOfDraw:
    """A part of drawn transitions: an ``UnreadPart`` that is read from the ring.

    Args:
        ring: The ring.
        draw: The transitions.
        shape: Shape of the part of the batch.
        dtype: Dtype of the part.
        gather: Copies the part of a draw into an array.
    """

    ring: TransitionRing
    draw: Draw
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    gather: Callable[[Draw, Array], None]

    def read(self, out: Array, check_stop: CheckStop = never) -> None:
        """Gather the part, and release the transitions after the last part."""
        try:
            check_stop()
            self.gather(self.draw, out)
        except BaseException:
            # The other parts are not read.
            self.ring.release(self.draw)
            raise
        self.ring.release(self.draw, 1)


@dataclass(frozen=True)
class ReplaySource(Source):
    """Batches of transitions, which the thread of the loop draws, and reader threads gather.

    The thread of the loop draws a batch ``depth`` requests before it receives it, so the batches
    do not depend on the speed of the threads.

    Args:
        ring: The ring of transitions.
        draw: Draws a batch.
        depth: Number of batches to draw ahead.
        length: Number of batches of a loop; None for a loop without end.
        has_weights: Whether the draws have importance weights.
    """

    ring: TransitionRing
    draw: DrawNow
    depth: int
    length: int | None
    has_weights: bool
    _drawn: deque[Draw] = field(default_factory=deque)

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        return self.ring.layout.fingerprint

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("a loop over a replay buffer without n= has no len()")
        return self.length

    def draw_ahead(self, batches: Iterator[Any]) -> Generator[Any, None, None]:
        """Yield batches, and draw those that the loop prefetches just before each request.

        Every draw has a reader thread that gathers it without another request, so a step that is
        added never waits for the thread that adds it.
        """
        mine: deque[Draw] = deque()
        self._drawn.clear()
        try:
            n_drawn = n_lent = 0
            while self.length is None or n_lent < self.length:
                most = n_lent + self.depth + 1
                while n_drawn < (most if self.length is None else min(most, self.length)):
                    draw = self.draw()
                    mine.append(draw)
                    self._drawn.append(draw)
                    n_drawn += 1
                # The batch has no name here, because a name would keep it.
                yield next(batches)
                mine.popleft()
                n_lent += 1
            # The loop ends its epoch only on a request.
            yield from batches
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()
            for draw in mine:
                self.ring.release(draw)

    def epoch(
        self, number: int, start: int, checksum: int, batches_per_slot: int
    ) -> Generator[BatchThunk, None, None]:
        """Yield the batches that ``draw_ahead`` has drawn, one per thunk."""
        n_made = start
        while self.length is None or n_made < self.length:
            draw = self._drawn.popleft()
            yield functools.partial(self._host_batch, draw)
            n_made += 1

    @property
    def names(self) -> list[str]:
        """Names of the parts of a batch."""
        layout = self.ring.layout
        added = ["discount"] * (layout.window > 1) + ["weight", "row"] * self.has_weights
        return [*layout.parts, *added]

    def _host_batch(self, draw: Draw) -> HostBatch:
        ring = self.ring
        n = len(draw.rows)
        parts: list[UnreadPart] = []
        for name, (shape, dtype) in ring.layout.parts.items():
            gather = functools.partial(ring.gather, name)
            parts.append(PartOfDraw(ring, draw, (n, *shape), dtype, gather))
        if ring.layout.window > 1:
            float32 = np.dtype(np.float32)
            parts.append(PartOfDraw(ring, draw, (n,), float32, ring.discounts))
        if draw.weights is not None and draw.numbers is not None:
            parts += [ArrayPart(draw.weights), ArrayPart(draw.numbers)]
        return HostBatch(parts, functools.partial(_named, self.names), [(n, 0)])


def _named(names: list[str], tensors: Iterator[Any]) -> dict[str, Any]:
    return dict(zip(names, tensors, strict=True))
