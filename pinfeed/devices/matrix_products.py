"""MatrixProducts: work that keeps a GPU busy while the routes of rows are timed."""

from __future__ import annotations

import torch

# The product has a thousand tiles of 128 x 128, so it occupies every multiprocessor several times,
# and takes a few tens of microseconds on a fast GPU.
_N = 4096
_K = 1024


class MatrixProducts:
    """Matrix products of half precision on one GPU, like most work of a model.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        # GPUs before this one have no tensor cores for bfloat16.
        is_recent = torch.cuda.get_device_capability(device) >= (8, 0)
        dtype = torch.bfloat16 if is_recent else torch.float16
        self._left = torch.ones((_N, _K), dtype=dtype, device=device)
        self._right = torch.ones((_K, _N), dtype=dtype, device=device)
        self._out = torch.empty((_N, _N), dtype=dtype, device=device)

    def __call__(self, n: int) -> None:
        """Queue ``n`` products in the current stream."""
        for _ in range(n):
            torch.mm(self._left, self._right, out=self._out)
