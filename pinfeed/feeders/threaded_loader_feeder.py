"""ThreadedLoaderFeeder: the batches of a DataLoader, with samples that threads make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pinfeed.feeders.base_feeder import T_co
from pinfeed.feeders.loader_feeder import LoaderFeeder
from pinfeed.pipeline.lent_batch import LentBatch
from pinfeed.pipeline.sources.sample_source import SampleThreads
from pinfeed.pipeline.sources.threaded_loader_source import ThreadedLoaderSource


class ThreadedLoaderFeeder(LoaderFeeder[T_co]):
    """DataLoader with samples that threads make; ``wrap_loader(loader, threads=n)`` returns it.

    Examples:
        >>> loader = torch.utils.data.DataLoader(range(6), batch_size=2)
        >>> [batch.tolist() for batch in pinfeed.wrap_loader(loader, threads=2)]
        [[0, 1], [2, 3], [4, 5]]
    """

    _source: ThreadedLoaderSource

    def __init__(self, source: ThreadedLoaderSource, **options: Any) -> None:
        super().__init__(source, **options)
        source.threads = SampleThreads(self._device.worker, source.n_threads)

    def __iter__(self) -> Iterator[T_co]:
        """Begin the loader's next epoch, with its batches on the device.

        Raises:
            ClosedError: If the feeder is closed, or an older loop over it runs and cannot be ended.
        """
        source = self._source
        skipped = source.skipped
        return self._loop.run(
            LentBatch.take,
            begin=source.begin,
            through=(lambda batches: batches) if skipped is None else skipped.without_empty,
            keeps_errors=source.keeps_errors,
        )

    @property
    def skipped(self) -> list[tuple[int, Any, Exception]]:
        """Epoch, index and error of each sample that loops have left out, in order."""
        return [] if self._source.skipped is None else self._source.skipped.found
