"""LoaderBatches: the batches of a loader that is ahead of the training loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pinfeed.tensors.filled_memory import FilledMemory
    from pinfeed.tensors.rng_state import GeneratorStates


class LoaderBatches:
    """Iterator over the batches of an epoch, which reader threads request one at a time.

    Args:
        batches: The loader's own iterator.
        generators: Generators of the loader.
        memory: Memory of the last batches; None if it is not checked.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        generators: Sequence[GeneratorStates],
        memory: FilledMemory | None,
    ) -> None:
        self._batches = batches
        self._generators = generators
        self._memory = memory
        self._is_waiting = False

    def __iter__(self) -> LoaderBatches:
        return self

    def __next__(self) -> Any:
        for generator in self._generators:
            generator.begin_batch()
        self._is_waiting = True
        try:
            batch = next(self._batches)
        finally:
            self._is_waiting = False
            # The end of an epoch, and a batch that fails, may draw random numbers, too.
            for generator in self._generators:
                generator.end_batch()
        if self._memory is not None:
            self._memory.check(batch)
        return batch

    def close(self) -> None:
        """End the loop over the batches of a feeder."""
        close: Any = getattr(self._batches, "close", None)
        if close is not None:
            close()

    def wake(self) -> None:
        """Wake a reader thread that waits for a worker process which has died.

        Torch raises the error in the main thread. Its iterator would notice it after 5 s only.
        """
        running: Any = self._batches
        workers = () if getattr(running, "_shutdown", True) else running._workers
        if self._is_waiting and not all(worker.is_alive() for worker in workers):
            # The reader thread takes it for a batch, and fails.
            running._data_queue.put((None, None))
