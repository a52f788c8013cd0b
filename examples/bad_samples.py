"""Loops that skip bad samples, and loops with a fixed number of steps.

After an error of its dataset, a DataLoader can return the next batch. A wrapped one can, too, with
``on_error="next"``. ``iter(loader)`` begins the next epoch at any time, and ends the previous loop.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import pinfeed


class Samples(Dataset[torch.Tensor]):
    """Numbers, some of which cannot be read."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 17 == 3:
            raise OSError(f"sample {index} is truncated")
        return torch.tensor([index])


def good_batches(loader: Any) -> tuple[list[list[int]], int]:
    """Return the batches of an epoch without bad samples, and the number of bad ones."""
    batches = iter(loader)
    found = []
    n_bad = 0
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return found, n_bad
        except OSError:
            n_bad += 1
        else:
            found.append(batch.flatten().tolist())


def fixed_steps(loader: Any, n_epochs: int, n_steps: int) -> list[list[int]]:
    """Return the batches of epochs that end after some steps."""
    found = []
    for _ in range(n_epochs):
        # The iterator of the previous epoch still exists.
        batches = iter(loader)
        found += [next(batches).flatten().tolist() for _ in range(n_steps)]
    return found


def main() -> None:
    loader = DataLoader(Samples(), batch_size=5, shuffle=True)
    torch.manual_seed(0)
    expected, n_bad = good_batches(loader)
    for depth in (0, 1, 3):
        torch.manual_seed(0)
        wrapped = pinfeed.wrap_loader(loader, depth=depth, on_error="next")
        assert good_batches(wrapped) == (expected, n_bad)

    numbers = DataLoader(torch.arange(100), batch_size=5, shuffle=True)
    torch.manual_seed(0)
    steps = fixed_steps(numbers, n_epochs=3, n_steps=4)
    torch.manual_seed(0)
    assert fixed_steps(pinfeed.wrap_loader(numbers), n_epochs=3, n_steps=4) == steps
    print(f"{len(expected)} batches, {n_bad} skipped; {len(steps)} steps in epochs of 4")


if __name__ == "__main__":
    main()
