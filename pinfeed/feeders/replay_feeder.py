"""ReplayFeeder: batches of transitions of a replay buffer, prefetched to a device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from pinfeed.feeders.base_feeder import BaseFeeder, LoopOptions
from pinfeed.memory.plan import Allocation, Place, Plan, Route
from pinfeed.pipeline.lent_batch import LentBatch
from pinfeed.pipeline.loop_memory import PartSize, loop_allocations
from pinfeed.pipeline.schedule import choose_schedule
from pinfeed.pipeline.sources.replay_source import ReplaySource
from pinfeed.validation.safe_repr import safe_repr


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
        device: Target device, as the user named it.
        options: Options of the loop.
        nbytes: Bytes of the buffer.
        in_files: Whether the transitions are in files.
    """

    def __init__(
        self,
        source: ReplaySource,
        batch_size: int,
        device: Any,
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
        schedule = choose_schedule(sum(sizes), batch_size, None, source.depth, is_ragged=False)
        device = self._open_device(device, n_spare=len(sizes) * (schedule.n_slots + 1))
        capacity = [batch_size * size for size in sizes]
        parts = [PartSize(size, size, is_staged=not device.unified) for size in capacity]
        items = loop_allocations(parts, batch_size, schedule, unified=device.unified)
        items = [item for item in items if item.what != "the order of the rows"]
        place: Place = "page cache" if in_files else "host"
        items.append(Allocation("transitions", place, 1, nbytes))
        self._batch_size = batch_size
        route: Route = "direct" if device.unified else "staged"
        self._plan = Plan(batch_size, source.depth, route, tuple(items))
        self._transforms = options.transforms(device.name, is_limited=False)
        self._source = source
        self._loop = options.runner(source, device, schedule, self._transforms, capacity)

    @safe_repr
    def __repr__(self) -> str:
        return f"<ReplayFeeder: batches of {self._batch_size:,} on {self.device}, {self._loop}>"

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
