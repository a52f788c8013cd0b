"""HelperThreads: threads that share the calls of another thread of a loop."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

from pinfeed.devices.device import Device
from pinfeed.pipeline.sources.guarded import guarded
from pinfeed.threads.call import Call, Pending, Workers


class HelperThreads:
    """Threads that share the calls of another thread; they start with the first calls.

    Args:
        device: Device that makes the threads.
        name: Prefix of the threads' names.
        n_threads: Number of threads; with 0, the other thread makes all calls itself.
    """

    def __init__(self, device: Device, name: str, n_threads: int) -> None:
        self._device = device
        self._name = name
        self._n_threads = n_threads
        # Several reader threads may make the first calls at the same time.
        self._starting = threading.Lock()
        self._workers: Workers | None = None

    def run_all(self, calls: Sequence[Callable[[], object]]) -> None:
        """Make several calls, in this thread and in the helpers.

        Return, or raise the first error, when all calls have ended.
        """
        error = self._run_all(calls)
        if error is not None:
            try:
                raise error
            finally:
                # The error's traceback keeps this frame, which must not keep the error.
                del error

    def shutdown(self) -> None:
        """Wait until the helpers have made all submitted calls, and end them."""
        if self._workers is not None:
            self._workers.shutdown(wait=True)

    def _run_all(self, calls: Sequence[Callable[[], object]]) -> BaseException | None:
        own: list[Call[object]] = []
        pending: list[Pending[object]] = []
        for i, call in enumerate(calls):
            submitted = None
            if i % (1 + self._n_threads):
                # If the program is ending, or no thread starts, this thread makes the call.
                with contextlib.suppress(Exception):
                    submitted = self._started().submit(guarded, call)
            if submitted is None:
                own.append(Call(call))
            else:
                pending.append(submitted)
        for made in own:
            made.run()
        pending += own
        errors = [made.exception() for made in pending]
        return next(filter(None, errors), None)

    def _started(self) -> Workers:
        with self._starting:
            if self._workers is None:
                self._workers = self._device.worker(self._name, self._n_threads)
            return self._workers
