"""ChunkStream: copies the chunks of a batch to the device, one chunk ahead."""

from __future__ import annotations

from typing import Any

import torch

from pinfeed.feeders.loader_feeder import LoaderFeeder
from pinfeed.feeders.wrap_loader import wrap_loader
from pinfeed.training.large_batch.strategies.micro_batches import (
    Chunk,
    ChunkLoader,
    Chunks,
    n_samples,
    slice_samples,
)
from pinfeed.training.large_batch.strategies.step_spec import StepSpec


class ChunkStream:
    """Copies the chunks of one batch after another to the device, one chunk ahead.

    Args:
        spec: The model and the loss, used to count the loss terms of a chunk.
        device: Device of the model.
    """

    def __init__(self, spec: StepSpec, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self._loader = ChunkLoader()
        self._feeder: LoaderFeeder[Any] | None = None

    def chunks(self, inputs: Any, targets: Any, size: int) -> Chunks:
        """Yield the chunks of a batch, which may be on the host or on the device."""
        if self._feeder is None:
            self._feeder = wrap_loader(self._loader, device=self._device, depth=1)
        self._loader.batch = (inputs, targets)
        self._loader.size = size
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
            self._loader.batch = None

    def close(self) -> None:
        """End the reader thread and free page-locked memory. Further calls do nothing."""
        if self._feeder is not None:
            self._feeder.close()
