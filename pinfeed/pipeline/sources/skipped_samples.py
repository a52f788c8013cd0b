"""SkippedSamples: the samples that loops have left out, because they failed."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pinfeed.errors import ReadError
from pinfeed.pipeline.sources.sample_batch import Failures, NoSamples

logger = logging.getLogger("pinfeed")


class SkippedSamples:
    """The samples that the loops of a feeder have left out.

    Args:
        most: Number of samples that a loop may leave out.

    Attributes:
        found: Epoch, index and error of each sample, in the order of the loop's batches.
    """

    def __init__(self, most: int) -> None:
        self.found: list[tuple[int, Any, Exception]] = []
        self._most = most
        self._n_in_loop = 0

    def begin(self) -> None:
        """Note that a loop begins."""
        self._n_in_loop = 0

    def of(self, epoch: int, indices: Sequence[Any]) -> Callable[[Failures], object]:
        """Return the function that notes the failures of a batch, when the loop receives it.

        Args:
            epoch: Number of the epoch.
            indices: Index in the dataset of each sample of the batch.
        """
        return functools.partial(self._add, epoch, indices)

    def without_empty(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches that have samples."""
        for batch in batches:
            if type(batch) is not NoSamples:
                yield batch
            # The loop alone keeps the batch.
            del batch

    def _add(self, epoch: int, indices: Sequence[Any], failures: Failures) -> None:
        """Note failures.

        Raises:
            ReadError: If the loop has left out too many samples.
        """
        for position, error in failures:
            index = indices[position]
            self.found.append((epoch, index, error))
            logger.warning("skipped dataset[%r] in epoch %d: %r", index, epoch, error)
        self._n_in_loop += len(failures)
        if self._n_in_loop > self._most:
            _, index, error = self.found[-1]
            raise ReadError(
                f"{self._n_in_loop} samples failed in epoch {epoch}; expected at most "
                f"max_skipped={self._most}; the last one is dataset[{index!r}]: {error!r}"
            ) from error
