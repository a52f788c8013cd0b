"""Warnings about calls that a training loop may have forgotten."""

import pytest
import torch
from support.trainers import LOSS, loader, network, trainer_of

from pinfeed.compat.trainer import LoopWarning, Trainer


def test_a_forgotten_zero_grad() -> None:
    def loop(trainer: Trainer) -> None:
        for batch in trainer.batches():
            trainer.backward(*batch)
            trainer.step()

    with trainer_of() as trainer, pytest.warns(LoopWarning, match="call zero_grad") as caught:
        loop(trainer)
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize("clears", [False, True])
def test_a_forgotten_step(clears: bool) -> None:
    def loop(trainer: Trainer) -> None:
        for batch in trainer.batches():
            trainer.backward(*batch)
            if clears:
                trainer.zero_grad()

    with trainer_of() as trainer, pytest.warns(LoopWarning, match=r"call step\(\)") as caught:
        loop(trainer)
    assert len(caught) == 1


def test_loops_that_forget_nothing_are_not_warned_of() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    with Trainer(model, LOSS, optimizer, loader()) as trainer:
        for batch in trainer.batches():
            # Gradients are accumulated, and cleared before the batch instead of after the step.
            trainer.zero_grad()
            trainer.backward(*batch)
            trainer.backward(*batch)
            trainer.step()
        for set_to_none in (True, False):
            # Steps are taken through the optimizer itself.
            for batch in trainer.batches():
                trainer.backward(*batch)
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
        for batch in trainer.batches():
            trainer.backward(*batch)
            trainer.step()
            model.zero_grad()
        for i, batch in enumerate(trainer.batches()):
            # One batch has no step.
            trainer.backward(*batch)
            if i != 1:
                trainer.step()
            trainer.zero_grad()
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("case", ["intervals", "scaler"])
def test_loops_that_are_not_warned_of(case: str) -> None:
    """Optimizers may step at intervals of their own, and a scaler may skip steps."""
    model = network()
    both = [torch.optim.SGD(model[i].parameters(), lr=0.01) for i in (0, 2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38) if case == "scaler" else None
    with Trainer(model, LOSS, both, loader(), scaler=scaler) as trainer:
        for i, (x, y) in enumerate(trainer.batches()):
            # Warnings are errors in these tests.
            trainer.backward(x * 1e3, y)
            for k, optimizer in enumerate(both):
                if scaler is not None:
                    scaler.step(optimizer)
                elif k or i % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            if scaler is not None:
                scaler.update()
                trainer.zero_grad()
