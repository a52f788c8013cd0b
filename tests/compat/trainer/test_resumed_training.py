"""A run that was interrupted after any batch equals the uninterrupted one, with its schedulers."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import pinfeed
from pinfeed import Feeder
from pinfeed.compat.trainer import Trainer
from pinfeed.errors import ArgumentError

pytestmark = [
    # StatefulDataLoader calls the deprecated function.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    # A scheduler that is stepped at once after it was resumed does not know the earlier steps.
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]

N_EPOCHS = 3
N_BATCHES = 4
X = np.random.default_rng(0).standard_normal((4 * N_BATCHES - 1, 3)).astype(np.float32)
Y = X.sum(1, keepdims=True)


class Interrupted(Exception):
    """Ends a run, as a signal would."""


def feeder() -> Any:
    return Feeder((X, Y), batch_size=4, shuffle=True, seed=1, device="cpu")


def stateful_loader() -> Any:
    pairs = list(zip(torch.from_numpy(X), torch.from_numpy(Y), strict=True))
    return StatefulDataLoader(pairs, batch_size=4)


SCHEDULERS: dict[str, Any] = {
    "steps": lambda sgd: torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5),
    "cosine": lambda sgd: torch.optim.lr_scheduler.CosineAnnealingLR(sgd, N_EPOCHS),
    "plateau": lambda sgd: torch.optim.lr_scheduler.ReduceLROnPlateau(
        sgd, factor=0.5, patience=0, threshold=0.9
    ),
}


class Run:
    """A training run, and its states.

    Args:
        make_loader: Makes the loader.
        scheduler: Name of the scheduler.
        last: Number of the batch, over all epochs, after which the run is interrupted.
        method: Callback that saves the state and interrupts the run.
    """

    def __init__(
        self, make_loader: Any, scheduler: str, last: int = -1, method: str = "on_batch_end"
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = SCHEDULERS[scheduler](self.sgd)
        self.ended: list[tuple[int, float]] = []
        self.states: dict[str, Any] = {}
        self._left = last
        self._method = method
        self.trainer = Trainer(
            self.model,
            nn.MSELoss(),
            self.sgd,
            make_loader(),
            scheduler=self.scheduler,
            callbacks=[self],
        )

    def on_batch_end(self, trainer: Trainer, batch: int, loss: Any) -> None:
        self._save("on_batch_end")

    def on_epoch_end(self, trainer: Trainer, row: Any) -> None:
        self.ended.append((row.epoch, row.loss))
        self._save("on_epoch_end")

    def _save(self, method: str) -> None:
        if method != self._method:
            return
        if self._left == 0:
            self.states = {name: copy.deepcopy(one.state_dict()) for name, one in self.parts()}
            raise Interrupted
        self._left -= 1

    def parts(self) -> list[tuple[str, Any]]:
        return [
            ("model", self.model),
            ("sgd", self.sgd),
            ("scheduler", self.scheduler),
            ("trainer", self.trainer),
        ]

    def load(self, states: dict[str, Any]) -> None:
        for name, one in self.parts():
            one.load_state_dict(states[name])

    def result(self) -> list[Any]:
        return [*self.model.parameters(), self.sgd.param_groups[0]["lr"]]


def assert_resumed_equals_whole(make_loader: Any, scheduler: str, last: int, method: str) -> None:
    whole = Run(make_loader, scheduler)
    whole.trainer.train(N_EPOCHS)
    first = Run(make_loader, scheduler, last, method)
    with pytest.raises(Interrupted):
        first.trainer.train(N_EPOCHS)
    rest = Run(make_loader, scheduler)
    rest.load(first.states)
    if rest.trainer.n_epochs < N_EPOCHS:
        rest.trainer.train(N_EPOCHS - rest.trainer.n_epochs)
    for got, wanted in zip(rest.result(), whole.result(), strict=True):
        assert torch.equal(torch.as_tensor(got), torch.as_tensor(wanted))
    assert [*first.ended, *rest.ended] == whole.ended


@pytest.mark.sweep(5)
@pytest.mark.parametrize("last", range(N_EPOCHS * N_BATCHES))
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("make_loader", [feeder, stateful_loader])
def test_a_run_interrupted_after_a_batch(make_loader: Any, scheduler: str, last: int) -> None:
    assert_resumed_equals_whole(make_loader, scheduler, last, "on_batch_end")


@pytest.mark.parametrize("last", range(N_EPOCHS))
@pytest.mark.parametrize("make_loader", [feeder, stateful_loader, lambda: [*feeder()]])
def test_a_run_interrupted_after_an_epoch(make_loader: Any, last: int) -> None:
    assert_resumed_equals_whole(make_loader, "plateau", last, "on_epoch_end")


@pytest.mark.parametrize("make_loader", [feeder, stateful_loader])
def test_the_last_batch_of_an_epoch_is_saved_with_its_scheduler(make_loader: Any) -> None:
    """The step of the scheduler follows the last callback of a batch."""
    assert_resumed_equals_whole(make_loader, "cosine", N_BATCHES - 1, "on_batch_end")


def test_a_trainer_is_a_part_of_a_checkpoint(tmp_path: Path) -> None:
    whole = Run(feeder, "steps")
    whole.trainer.train(N_EPOCHS)
    first = Run(feeder, "steps")
    first.trainer.train(1)
    pinfeed.checkpoint.save(tmp_path / "saved", **dict(first.parts()))
    rest = Run(feeder, "steps")
    pinfeed.checkpoint.resume(tmp_path / "saved", **dict(rest.parts()))
    assert rest.trainer.n_epochs == 1
    rest.trainer.train(N_EPOCHS - 1)
    assert torch.equal(rest.model.weight, whole.model.weight)


def test_states_that_do_not_fit_are_refused() -> None:
    run = Run(feeder, "steps")
    state = run.trainer.state_dict()
    with pytest.raises(ArgumentError, match="not a state of a Trainer"):
        run.trainer.load_state_dict({"epoch": 1})
    with pytest.raises(ArgumentError, match="has no state_dict"):
        Run(lambda: [*feeder()], "steps").trainer.load_state_dict(state)
    listed = Run(lambda: [*feeder()], "steps", last=1)
    with pytest.raises(ArgumentError, match="in the middle of an epoch, after batch 1"):
        listed.trainer.train(1)
