"""SkippedSamples: the samples that loops have left out, because they failed."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pinfeed.errors import ReadError
from pinfeed.pipeline.sources.sample_batch import Failures, NoSamples
from pinfeed.validation.arguments import check_choice, whole_number

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

    @staticmethod
    def for_option(on_error: Any, max_skipped: Any) -> SkippedSamples | None:
        """Return the samples that loops have left out; None if ``on_error`` is not ``"skip"``.

        Raises:
            ArgumentError: If an option is invalid.
        """
        check_choice(on_error, "on_error", ("raise", "next", "skip"))
        most = whole_number(max_skipped, "max_skipped", least=0)
        return SkippedSamples(most) if on_error == "skip" else None

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
        given = []
        for batch in batches:
            if type(batch) is not NoSamples:
                given.append(batch)
            del batch
            if given:
                # From now on, the loop alone keeps the batch.
                yield given.pop()

    @staticmethod
    def passing(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """Return ``device_transform`` as a function that passes batches without samples."""
        if not callable(function):
            return function

        @functools.wraps(getattr(function, "forward", function))
        def transform(batch: Any, **given: Any) -> Any:
            return batch if type(batch) is NoSamples else function(batch, **given)

        return transform

    def _add(self, epoch: int, indices: Sequence[Any], failures: Failures) -> None:
        """Note failures.

        Raises:
            ReadError: If the loop has left out too many samples.
        """
        if not failures:
            return
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
