"""ComputingStep: a fixed amount of computation, as a stand-in for a training step."""

from __future__ import annotations

import statistics
import time

import torch

_WIDTH = 256
_N_TIMED = 40


class ComputingStep:
    """Matrix products that do not use the data, so that the work is the same for every loader.

    On the CPU, they run on as many threads as torch has.

    Args:
        n_products: Number of products of a step.
        device: Name of the torch device that computes them.
    """

    def __init__(self, n_products: int, device: str = "cpu") -> None:
        self.n_products = n_products
        self._left = torch.ones((_WIDTH, _WIDTH), device=device)
        self._out = torch.empty((_WIDTH, _WIDTH), device=device)

    @classmethod
    def lasting(cls, seconds: float, device: str = "cpu") -> ComputingStep:
        """Return a step that takes about this many seconds on an idle machine."""
        n_products = round(seconds / cls(1, device).alone_s())
        return cls(max(1, n_products), device)

    def __call__(self) -> None:
        """Compute the products, and wait until they are complete."""
        for _ in range(self.n_products):
            torch.mm(self._left, self._left, out=self._out)
        if self._out.is_cuda:
            torch.cuda.synchronize(self._out.device)

    def alone_s(self) -> float:
        """Return the seconds of a step without a loader, the median of several."""
        self()
        return statistics.median(self._seconds() for _ in range(_N_TIMED))

    def _seconds(self) -> float:
        begin = time.perf_counter()
        self()
        return time.perf_counter() - begin
