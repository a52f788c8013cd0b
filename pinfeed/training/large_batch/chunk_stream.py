"""ChunkStream: chunks of a batch, copied to the device ahead of their step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pinfeed.feeders.loader_feeder import LoaderFeeder
from pinfeed.feeders.wrap_loader import wrap_loader
from pinfeed.training.large_batch.batches import Chunk, Chunks, n_samples, slice_samples
from pinfeed.training.large_batch.step_spec import StepSpec


class ChunkStream:
    """Copies the chunks of one batch after another to the device, one chunk ahead.

    It is the loader of its own feeder.

    Args:
        spec: The model and the loss, used to count the loss terms of a chunk.
    """

    def __init__(self, spec: StepSpec) -> None:
        self._spec = spec
        self._batch: Any = None
        self._size = 1
        self._feeder: LoaderFeeder[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        batch = self._batch
        size = self._size
        for start in range(0, n_samples(batch), size):
            yield slice_samples(batch, start, start + size)

    def chunks(self, inputs: Any, targets: Any, size: int) -> Chunks:
        """Yield the chunks of a batch, which may be on the host or on the device."""
        if self._feeder is None:
            self._feeder = wrap_loader(self, device=self._spec.device, depth=1)
        self._batch = (inputs, targets)
        self._size = size
        batches: Any = iter(self._feeder)
        try:
            starts = range(0, n_samples(inputs), size)
            for start, (x, y) in zip(starts, batches, strict=True):
                # Terms are counted in the caller's targets, because reading a count from the
                # device would wait for it.
                own_targets = slice_samples(targets, start, start + size)
                yield Chunk(x, y, self._spec.count_terms(x, own_targets))
        finally:
            batches.close()
            self._batch = None

    def close(self) -> None:
        """End the reader thread and free page-locked memory. Further calls do nothing."""
        if self._feeder is not None:
            self._feeder.close()
