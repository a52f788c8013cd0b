"""ReplayFeeder: batches of transitions of a replay buffer, prefetched to a device."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pinfeed.feeders.base_feeder import BaseFeeder, LoopOptions
from pinfeed.memory.plan import Allocation, Place, Plan, Route
from pinfeed.pipeline.lent_batch import LentBatch
from pinfeed.pipeline.loop_memory import PartSize, loop_allocations
from pinfeed.pipeline.schedule import single_batches
from pinfeed.pipeline.sources.source import ArrayPart, BatchThunks, HostBatch, Source
from pinfeed.stores.host_rows import CheckStop, FunctionPart, UnreadPart
from pinfeed.stores.store import Array
from pinfeed.stores.transition_ring import Draw, TransitionRing

DrawNow = Callable[[], Draw]
"""Draws the transitions of a batch from those that are stored now."""


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

    def epoch(self, number: int, start: int, checksum: int, batches_per_slot: int) -> BatchThunks:
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
            read = functools.partial(self._read, draw, functools.partial(ring.gather, name))
            parts.append(FunctionPart((n, *shape), dtype, read))
        if ring.layout.window > 1:
            read = functools.partial(self._read, draw, ring.discounts)
            parts.append(FunctionPart((n,), np.dtype(np.float32), read))
        if draw.weights is not None and draw.numbers is not None:
            parts += [ArrayPart(draw.weights), ArrayPart(draw.numbers)]
        return HostBatch(parts, functools.partial(_named, self.names), [(n, 0)])

    def _read(
        self, draw: Draw, gather: Callable[[Draw, Array], None], out: Array, check_stop: CheckStop
    ) -> None:
        """Gather a part of drawn transitions, and release them after the last part."""
        try:
            check_stop()
            gather(draw, out)
        except BaseException:
            # The other parts are not read.
            self.ring.release(draw)
            raise
        self.ring.release(draw, 1)


def _named(names: list[str], tensors: Iterator[Any]) -> dict[str, Any]:
    return dict(zip(names, tensors, strict=True))


class ReplayFeeder(BaseFeeder[dict[str, Any]]):
    """Loop over random batches of a replay buffer; from ``ReplayBuffer.batches``.

    Examples:
        >>> buffer = pinfeed.ReplayBuffer(100, {"reward": ((), "float32")})
        >>> buffer.add(reward=1.0)
        >>> with buffer.batches(4, n=10) as batches:
        ...     rewards = [batch["reward"].mean() for batch in batches]
        >>> len(rewards)
        10

    Args:
        source: Source of the batches.
        batch_size: Transitions per batch.
        options: Options of the loop.
        nbytes: Bytes of the buffer.
        in_files: Whether the transitions are in files.
    """

    def __init__(
        self,
        source: ReplaySource,
        batch_size: int,
        options: LoopOptions,
        *,
        nbytes: int,
        in_files: bool,
    ) -> None:
        sizes = [
            math.prod(shape) * dtype.itemsize for shape, dtype in source.ring.layout.parts.values()
        ]
        # Importance weights and numbers of transitions, and discounts.
        sizes += [4] * (source.ring.layout.window > 1) + [4, 8] * source.has_weights
        # Each batch is drawn ``depth`` requests ahead, so that batches share no slot.
        schedule = single_batches(batch_size * sum(sizes), source.depth)
        device = self._open_device(options.device, n_spare=len(sizes) * (schedule.n_slots + 1))
        capacity = [batch_size * size for size in sizes]
        parts = [PartSize(size, size, is_staged=not device.unified) for size in capacity]
        items = loop_allocations(parts, batch_size, schedule, unified=device.unified)
        items = [item for item in items if item.what != "the order of the rows"]
        place: Place = "page cache" if in_files else "host"
        items.append(Allocation("transitions", place, 1, nbytes))
        route: Route = "direct" if device.unified else "staged"
        self._plan = Plan(batch_size, source.depth, route, tuple(items))
        self._transforms = options.transforms(device.name, is_limited=False)
        self._source = source
        self._loop = options.runner(source, device, schedule, self._transforms, capacity)

    def __len__(self) -> int:
        """Return the number of batches of a loop.

        Raises:
            TypeError: If the loop has no end.
        """
        return len(self._source)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Begin to draw.

        Returns:
            Iterator over batches: a dict of tensors on the device, each of shape (n, *shape).

        Raises:
            ClosedError: If the feeder is closed, or an older loop over it runs and cannot be ended.
        """
        return self._loop.run(LentBatch.take, through=self._source.draw_ahead)

    @property
    def plan(self) -> Plan:
        """Memory of the batches and of the transitions; ``print(feeder.plan)`` shows it."""
        return self._transforms.with_measured(self._plan, unified=self._device.unified)

    @property
    def _batches_in_words(self) -> str:
        return f"batches of {self._plan.batch_size:,}"
