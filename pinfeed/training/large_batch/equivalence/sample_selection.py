"""Choice of a few samples of a batch that differ from each other as much as possible."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from pinfeed.tensors.pytree import flatten
from pinfeed.training.large_batch.strategies.micro_batches import n_samples

_MOST_NUMBERS = 4096


def representative_samples(inputs: Any, targets: Any, n: int) -> torch.Tensor:
    """Choose ``n`` samples of a batch: with rare, negative and extreme targets, short and long ones.

    Args:
        inputs: A batch of at least ``n`` samples.
        targets: Its targets, or None.
        n: How many samples.

    Returns:
        Distinct row indices, shape (n,), int64, on the CPU.
    """
    chosen: dict[int, None] = {}
    for score in _scores(inputs, targets):
        chosen.setdefault(int(score.argmax()))
        chosen.setdefault(int(score.argmin()))
    spread = torch.linspace(0, n_samples(inputs) - 1, n).round().long().tolist()
    rows = list(dict.fromkeys([*list(chosen)[:n], *spread, *range(n)]))[:n]
    # The order of the batch stays: a model may need samples sorted by their length.
    return torch.tensor(sorted(rows))


def _scores(inputs: Any, targets: Any) -> Iterator[torch.Tensor]:
    """Numbers that tell samples from each other, each of shape (samples,); the most telling first."""
    for rows in _rows(targets):
        if not rows.is_floating_point():
            # Losses leave out targets that are negative, such as -100.
            yield (rows < 0).sum(1)
            _, inverse, counts = rows.unique(return_inverse=True, return_counts=True)
            yield -counts[inverse].reshape(rows.shape).amin(1)
        yield rows.double().mean(1)
    for rows in _rows(inputs):
        if not rows.is_floating_point():
            # Zeros pad token ids and masks, so their number follows the length.
            yield (rows != 0).sum(1)


def _rows(batch: Any) -> Iterator[torch.Tensor]:
    for _, leaf in flatten(batch)[0]:
        if (
            not isinstance(leaf, torch.Tensor)
            or leaf.layout is not torch.strided
            or leaf.is_complex()
        ):
            continue
        if leaf.ndim and leaf.numel():
            rows = leaf.detach().reshape(len(leaf), -1)
            # Large rows are looked at here and there, so that this takes neither long nor much
            # memory.
            yield rows[:, :: -(-rows.shape[1] // _MOST_NUMBERS)]
