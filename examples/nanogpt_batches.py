"""Language models: random windows of a flat file of tokens, as nanoGPT's ``get_batch`` draws them.

The rows of the store are all windows of the file. A window is copied only for its batch. Given the
same starts as row indices, a feeder yields the batches of ``get_batch``. An order of
``pinfeed.rows`` draws windows as well, and a loop over it can be stopped and resumed at any batch.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch

import pinfeed


def get_batch(path: Path, length: int, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets: the original loader."""
    data = np.memmap(path, dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - length, (batch_size,))
    inputs = [torch.from_numpy(data[i : i + length].astype(np.int64)) for i in starts]
    targets = [torch.from_numpy(data[i + 1 : i + 1 + length].astype(np.int64)) for i in starts]
    return torch.stack(inputs), torch.stack(targets)


def split(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets. They are the same tokens, shifted by one."""
    return tokens[:, :-1].long(), tokens[:, 1:].long()


def main(n_tokens: int = 10_000_000, length: int = 256, n_batches: int = 200) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.bin"
        np.random.default_rng(0).integers(50257, size=n_tokens, dtype=np.uint16).tofile(path)
        torch.manual_seed(1337)
        expected = [get_batch(path, length, 12) for _ in range(n_batches)]

        with pinfeed.NpyStore.windows(path, length=length + 1, dtype="uint16") as windows:
            torch.manual_seed(1337)
            starts = [torch.randint(windows.n_rows, (12,)) for _ in range(n_batches)]
            # The device splits and casts a batch ahead of the training step.
            with pinfeed.Feeder(windows, rows=starts, device_transform=split) as feeder:
                for (x, y), (want_x, want_y) in zip(feeder, expected, strict=True):
                    assert torch.equal(x.cpu(), want_x)
                    assert torch.equal(y.cpu(), want_y)

            # An order needs no list of starts. Any position of it is computed at once.
            order = pinfeed.rows.drawn(12 * n_batches, seed=1)
            with pinfeed.Feeder(windows, batch_size=12, rows=order) as feeder:
                whole = [tokens.cpu() for tokens in feeder]
                feeder.set_epoch(0)
                for number, _ in enumerate(feeder, 1):
                    if number == n_batches // 2:
                        state = feeder.state_dict()
                        break
            with pinfeed.Feeder(windows, batch_size=12, rows=order) as feeder:
                feeder.load_state_dict(state)
                rest = [tokens.cpu() for tokens in feeder]
            assert all(map(torch.equal, rest, whole[-len(rest) :]))
        print(f"{n_batches} batches, equal to get_batch's; the last {len(rest)} after a restart")


if __name__ == "__main__":
    main()
