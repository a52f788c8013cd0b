"""Evaluation of a model on other batches."""

import copy

import pytest
import torch
from support.trainers import BATCH, IN, LOSS, OUT, N, dataset, loader, network, trainer_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pinfeed.compat.trainer import Trainer


def test_evaluate_leaves_everything_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(IN, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, OUT))
    model[1].eval()
    with trainer_of(model, chunk_size=5, strategy="accumulate") as trainer:
        state = copy.deepcopy(model.state_dict())
        modes = [m.training for m in model.modules()]
        rng = torch.get_rng_state()
        found = trainer.evaluate(
            [tuple(dataset().tensors)],
            {
                "n": lambda out, y: len(out),
                "grad": lambda out, y: float(out.requires_grad),
                "right": lambda out, y: (out.argmax(1) == y).double().mean(),
            },
        )
        assert torch.equal(torch.get_rng_state(), rng)
        assert [m.training for m in model.modules()] == modes
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())
        model.eval()
        x, y = dataset().tensors
        outputs = model(x)
        assert found == pytest.approx(
            {
                "loss": LOSS(outputs, y).item(),
                "n": N,
                "grad": 0.0,
                "right": (outputs.argmax(1) == y).double().mean().item(),
            }
        )


@pytest.mark.parametrize("chunk_size", [None, 5])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_evaluate_weighs_by_terms(chunk_size: int | None, reduction: str) -> None:
    x, y = dataset().tensors
    y = y.clone()
    # The mean loss of the first batch is NaN.
    y[:BATCH] = -100
    y[-5:] = -100
    loss, model = nn.CrossEntropyLoss(reduction=reduction), network()
    with Trainer(
        model, loss, torch.optim.SGD(model.parameters(), lr=0.1), loader(), chunk_size=chunk_size
    ) as trainer:
        found = trainer.evaluate(DataLoader(TensorDataset(x, y), batch_size=BATCH))
    assert found["loss"] == pytest.approx(loss(model(x), y).item())


def test_evaluate_halves_what_does_not_fit() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(IN, OUT)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return self.inner(x)  # type: ignore[no-any-return]

    model = Small()
    with trainer_of(model) as trainer:
        x, y = dataset().tensors
        assert trainer.evaluate(loader())["loss"] == pytest.approx(LOSS(model.inner(x), y).item())


def test_an_evaluation_after_a_small_last_batch() -> None:
    sizes: list[int] = []
    model = network()
    model[0].register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    with Trainer(model, LOSS, torch.optim.SGD(model.parameters(), lr=0.1), loader()) as trainer:
        trainer.train(1)
        sizes.clear()
        trainer.evaluate(DataLoader(dataset(), batch_size=N))
    assert sizes == [N]


def test_metrics_are_weighed_by_samples_and_losses_by_terms() -> None:
    batches = [(torch.ones(2, n, 1), torch.zeros(2, n, 1)) for n in (5, 50)]
    model = nn.Linear(1, 1)
    with Trainer(
        model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), batches
    ) as trainer:
        found = trainer.evaluate(
            [*batches, (batches[1][0], batches[1][1] + 100)],
            {"length": lambda outputs, _: outputs.shape[1]},
        )
    each = [
        nn.functional.mse_loss(model(x), y).item()
        for x, y in [*batches, (batches[1][0], batches[1][1] + 100)]
    ]
    assert found["length"] == pytest.approx((5 + 50 + 50) / 3)
    assert found["loss"] == pytest.approx((5 * each[0] + 50 * each[1] + 50 * each[2]) / 105)
