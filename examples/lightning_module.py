"""Lightning: a LightningDataModule with feeders, stopped in the middle of an epoch and resumed.

The batches are on the device already, so Lightning copies nothing. Each loop over a feeder is its
next epoch, so no code sets epochs. Lightning begins a loop before it ends the previous one, which
the new loop then ends. The data module has a ``state_dict`` because Lightning itself restores the
position of a loader only in the middle of an epoch.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

import pinfeed


class Rows(lightning.LightningDataModule):
    """Feeders for training and validation, from ``.npy`` files."""

    def __init__(self, folder: Path, batch_size: int) -> None:
        super().__init__()
        self.folder = folder
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        source = (self.folder / "x.npy", self.folder / "y.npy")
        device = self.trainer.strategy.root_device
        self.train = pinfeed.Feeder(
            source, batch_size=self.batch_size, shuffle=True, seed=1, device=device
        )
        self.validation = pinfeed.Feeder(source, batch_size=self.batch_size, device=device)

    def train_dataloader(self) -> Any:
        return self.train

    def val_dataloader(self) -> Any:
        return self.validation

    def state_dict(self) -> dict[str, Any]:
        return {"train": self.train.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.train.load_state_dict(state["train"])

    def teardown(self, stage: str) -> None:
        self.train.close()
        self.validation.close()


class Regression(lightning.LightningModule):
    """A linear model that records the labels of every batch that it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(8, 1)
        self.seen: list[list[int]] = []
        self.numbers: list[int] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
        x, y = batch
        assert x.device == y.device == self.device
        self.seen.append(y.tolist())
        self.numbers.append(number)
        return nn.functional.mse_loss(self.model(x)[:, 0], y.float())

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> None:
        x, y = batch
        self.log("loss", nn.functional.mse_loss(self.model(x)[:, 0], y.float()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def fit(
    folder: Path,
    *,
    callback: ModelCheckpoint | None = None,
    resume: Path | None = None,
    **limits: Any,
) -> Regression:
    torch.manual_seed(0)
    module = Regression()
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=1,
        callbacks=callback,
        enable_checkpointing=callback is not None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **limits,
    )
    trainer.fit(module, datamodule=Rows(folder, batch_size=32), ckpt_path=resume)
    return module


def expected(folder: Path, n_epochs: int) -> list[list[int]]:
    """Return the labels of every batch of a plain loop."""
    with pinfeed.Feeder(
        folder / "y.npy", batch_size=32, shuffle=True, seed=1, device="cpu"
    ) as feeder:
        return [y.tolist() for _ in range(n_epochs) for y in feeder]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rng = np.random.default_rng(0)
        np.save(folder / "x.npy", rng.normal(size=(200, 8)).astype("float32"))
        np.save(folder / "y.npy", np.arange(200))
        want = expected(folder, 3)
        # The number of batches in an epoch.
        n = len(want) // 3

        whole = fit(folder, max_epochs=3)
        assert whole.seen == want

        # After a loop that ends early, the next loop is the next epoch.
        few = fit(folder, max_epochs=2, limit_train_batches=3, limit_val_batches=1)
        assert few.seen == want[:3] + want[n : n + 3]

        # Resume within an epoch, and at the end of one.
        for when, n_done in (
            ({"every_n_train_steps": n + 2}, n + 2),
            ({"every_n_epochs": 2}, 2 * n),
        ):
            callback = ModelCheckpoint(folder / f"{n_done}", "run", **when)
            fit(folder, callback=callback, max_epochs=2)
            resumed = fit(folder, resume=folder / f"{n_done}" / "run.ckpt", max_epochs=3)
            assert resumed.seen == want[n_done:]
            assert resumed.numbers == [i % n for i in range(n_done, 3 * n)]
            assert torch.equal(resumed.model.weight, whole.model.weight)
        print(
            f"{len(want)} batches over three epochs, "
            "resumed in the middle and at the end of one: the same as by hand"
        )


if __name__ == "__main__":
    main()
