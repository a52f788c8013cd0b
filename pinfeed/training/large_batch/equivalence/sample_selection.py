"""Choice of a few samples of a batch that differ from each other as much as possible."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from pinfeed.tensors.pytree import flatten
from pinfeed.training.large_batch.strategies.micro_batches import n_samples

_MOST_NUMBERS = 4096
"""Largest number of elements of a row from which a score is computed."""


def representative_samples(inputs: Any, targets: Any, n: int) -> torch.Tensor:
    """Choose ``n`` samples with rare, negative and extreme targets, and of different lengths.

    Args:
        inputs: A batch of at least ``n`` samples.
        targets: Its targets, or None.
        n: Number of samples to choose.

    Returns:
        Distinct row indices, shape (n,), int64, on the CPU.
    """
    chosen: dict[int, None] = {}
    for score in _scores(inputs, targets):
        chosen.setdefault(int(score.argmax()))
        chosen.setdefault(int(score.argmin()))
    spread = torch.linspace(0, n_samples(inputs) - 1, n).round().long().tolist()
    candidates = dict.fromkeys([*list(chosen)[:n], *spread, *range(n)])
    # The samples keep their order, because a model may need them sorted by length.
    return torch.tensor(sorted(list(candidates)[:n]))


def _scores(inputs: Any, targets: Any) -> Iterator[torch.Tensor]:
    """Yield scores of shape (samples,) that distinguish samples, the most distinctive first."""
    for rows in _dense_rows(targets):
        if not rows.is_floating_point():
            # Losses leave out negative targets, such as -100.
            yield (rows < 0).sum(1)
            _, inverse, counts = rows.unique(return_inverse=True, return_counts=True)
            yield -counts[inverse].reshape(rows.shape).amin(1)
        yield rows.double().mean(1)
    for rows in _dense_rows(inputs):
        if not rows.is_floating_point():
            # Zeros pad token ids and masks, so the number of other values follows the length.
            yield (rows != 0).sum(1)


def _dense_rows(batch: Any) -> Iterator[torch.Tensor]:
    """Yield each real tensor of a batch with shape (samples, numbers)."""
    for _, leaf in flatten(batch)[0]:
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            continue
        if leaf.ndim and leaf.numel() and not leaf.is_complex():
            rows = leaf.detach().reshape(len(leaf), -1)
            # Long rows are sampled at intervals, which bounds time and memory.
            yield rows[:, :: -(-rows.shape[1] // _MOST_NUMBERS)]
