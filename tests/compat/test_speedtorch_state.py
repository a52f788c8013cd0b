"""The state of an optimizer moves with its rows."""

from typing import Any

import numpy as np
import pytest
import torch
from support.speedtorch_training import DIM, OTHERS, Model, N, batches, made, start, step_of, train
from torch import nn

import pinfeed.compat.speedtorch as SpeedTorch  # noqa: N812 - as its users write it
from pinfeed import errors

pytestmark = pytest.mark.usefixtures("in_a_folder", "one_thread")


def test_several_tables_in_one_optimizer() -> None:
    """One table of centres and one of contexts, as in word2vec."""
    rng = np.random.default_rng(5)
    ids = [(rng.integers(0, N, (6, 1)), rng.integers(0, 9, (6, 4))) for _ in range(5)]
    ours = nn.ModuleDict({"u": nn.Embedding(1, DIM), "v": nn.Embedding(1, DIM)})
    full = nn.ModuleDict({"u": nn.Embedding(N, DIM), "v": nn.Embedding(N, DIM)})
    by_ids, by_slots = (torch.optim.Adagrad(model.parameters(), lr=0.1) for model in (full, ours))
    switchers, slots = [], []
    for name, per_row in (("u", 1), ("v", 4)):
        initial = full[name].weight.detach().clone()
        switchers.append(
            (
                SpeedTorch.ModelFactory(ours[name], N, DIM),
                SpeedTorch.OptimizerFactory(by_slots, N, DIM, ours, name),
            )
        )
        switchers[-1][0].customInit(torch.Tensor.copy_, initial)
        switchers[-1][1].optInit()
        slots.append(torch.from_numpy(switchers[-1][0].variableTransformer(6, per_row)))
    for batch in ids:
        for rows, both in zip(batch, switchers, strict=True):
            for switcher in both:
                switcher.beforeForwardPass(rows)
        for model, optimizer, (u, v) in [
            (full, by_ids, map(torch.from_numpy, batch)),
            (ours, by_slots, slots),
        ]:
            optimizer.zero_grad()
            (model["u"](u) * model["v"](v)).sum().sigmoid().backward()
            optimizer.step()
        for rows, both in zip(batch, switchers, strict=True):
            for switcher in both:
                switcher.afterOptimizerStep(rows)
    for name, (weights, states) in zip("uv", switchers, strict=True):
        np.testing.assert_allclose(
            weights.getNumpyVersion(), full[name].weight.detach().numpy(), atol=1e-6
        )
        np.testing.assert_allclose(
            states.getNumpyVersion()["sum"],
            by_ids.state[full[name].weight]["sum"].numpy(),
            atol=1e-6,
        )


def test_rows_of_another_width_are_refused() -> None:
    weights, states, model, optimizer = made("ModelFactory", OTHERS["momentum"])
    for wrong in (DIM - 1, DIM + 1):
        with pytest.raises(
            errors.ArgumentError,
            match=rf"embed_dimension={wrong}: Embedding has a weight of shape \(5, 3\)",
        ):
            SpeedTorch.ModelFactory(model.inner.words, N, wrong)
        with pytest.raises(
            errors.ArgumentError, match=rf"embed_dimension={wrong}: inner.words has a weight"
        ):
            SpeedTorch.OptimizerFactory(optimizer, N, wrong, model, "inner.words")
    step_of([0, 1], weights, states, model=model, optimizer=optimizer)
    model.inner.words.weight.data = torch.ones(2, DIM + 1, dtype=torch.float64)
    optimizer.state[model.inner.words.weight]["momentum_buffer"] = torch.ones(2, DIM + 1)
    for table, name in [(weights, "weight"), (states, "momentum_buffer")]:
        with pytest.raises(
            errors.WriteBackError, match=rf"{name} has shape \(2, 4\); expected \(2, 3\)"
        ):
            table.afterOptimizerStep([0, 1])
    np.testing.assert_array_equal(weights.getNumpyVersion(), start().numpy())
    assert not states.getNumpyVersion()["momentum_buffer"].any()


def test_state_without_its_factory_is_refused() -> None:
    weights, _, model, optimizer = made("ModelFactory", OTHERS["momentum"])
    step_of([1, 2, 3], weights, model=model, optimizer=optimizer)
    weights.afterOptimizerStep([1, 2, 3])
    before = weights.getNumpyVersion()
    step_of([4, 4, 5], weights, model=model, optimizer=optimizer)
    with pytest.raises(errors.WriteBackError, match="slots of one row differ"):
        weights.afterOptimizerStep([4, 4, 5])
    np.testing.assert_array_equal(weights.getNumpyVersion(), before)


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "rprop"])
def test_a_first_batch_may_be_interrupted(optimizer: str) -> None:
    weights, states, model, inner = made("ModelFactory", OTHERS[optimizer])
    step_of([1, 2], weights, states, model=model, optimizer=inner)
    step_of([3, 4], weights, states, model=model, optimizer=inner)
    weights.afterOptimizerStep([3, 4])
    states.afterOptimizerStep([3, 4])
    changed = (weights.getNumpyVersion() != start().numpy()).any(1)
    assert np.flatnonzero(changed).tolist() == [3, 4]


def test_the_optimizer_may_be_loaded_after_its_tables_are_made() -> None:
    weights, states, model, optimizer = made("ModelFactory", OTHERS["adam"])
    step_of([1, 2], weights, states, model=model, optimizer=optimizer)
    saved = optimizer.state_dict()
    weights, states, model, optimizer = made("ModelFactory", OTHERS["adam"])
    optimizer.load_state_dict(saved)
    step_of([3, 4, 5], weights, states, model=model, optimizer=optimizer)
    states.afterOptimizerStep([3, 4, 5])
    assert np.flatnonzero(states.getNumpyVersion()["exp_avg"].any(1)).tolist() == [3, 4, 5]
    states.saveCupy("states")
    states.loadCupy("states")


def test_the_model_may_change_its_dtype_before_optinit() -> None:
    model = Model(2, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.inner.words.parameters())
    weights = SpeedTorch.ModelFactory(model.inner.words, N, DIM)
    states = SpeedTorch.OptimizerFactory(optimizer, N, DIM, model, "inner.words")
    model.double()
    weights.zerosInit()
    states.optInit()
    for _ in range(2):
        step_of([1, 2], weights, states, model=model, optimizer=optimizer)
        weights.afterOptimizerStep([1, 2])
        states.afterOptimizerStep([1, 2])
    assert optimizer.state[model.inner.words.weight]["exp_avg"].dtype is torch.float64


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows.exp_avg_sq": torch.zeros(N, 2)},
        {"rows.more": torch.zeros(N, DIM)},
        {"number.more": 1},
        {"begun.more": True},
    ],
    ids=str,
)
def test_state_is_taken_over_as_a_whole_or_not_at_all(wrong: dict[str, Any]) -> None:
    states = made("ModelFactory", OTHERS["adam"])[1]
    saved = states.snapshot()
    with pytest.raises(errors.StoreError, match=r"the saved state has .*; Adam expects"):
        states.restore(saved | {"rows.exp_avg": torch.ones(N, DIM)} | wrong)
    assert not states.getNumpyVersion()["exp_avg"].any()


@pytest.mark.parametrize("way", ["Cupy", "Torch"])
def test_state_of_another_class_is_refused(way: str) -> None:
    train(
        *(saving := made("ModelFactory", lambda p: torch.optim.SparseAdam(p), sparse=True)),
        batches(True, 1),
    )
    getattr(saving[1], f"save{way}")("states")
    with pytest.raises(
        errors.StoreError, match="the saved state belongs to SparseAdam; expected Adam"
    ):
        getattr(made("ModelFactory", OTHERS["adam"])[1], f"load{way}")("states")


def test_a_batch_without_a_step_changes_nothing() -> None:
    weights, states, _, _ = made("ModelFactory", OTHERS["momentum"])
    weights.beforeForwardPass([1, 1])
    states.beforeForwardPass([1, 1])
    weights.afterOptimizerStep([1, 1])
    states.afterOptimizerStep([1, 1])
    np.testing.assert_array_equal(weights.getNumpyVersion(), start().numpy())
    assert not states.getNumpyVersion()["momentum_buffer"].any()


def test_state_is_found_by_parameter() -> None:
    """The optimizer has some of the parameters, in another order, in groups with own options."""
    model = nn.Module()
    model.u, model.v, model.w = (nn.Embedding(2, DIM) for _ in range(3))
    optimizer = torch.optim.Adagrad(
        [
            {"params": [model.w.weight]},
            {"params": [model.v.weight], "initial_accumulator_value": 0.5, "initial_lr": 1},
        ]
    )
    states = SpeedTorch.OptimizerFactory(optimizer, N, DIM, model, "v")
    states.optInit()
    assert (states.getNumpyVersion()["sum"] == 0.5).all()
    states.beforeForwardPass(np.arange(6))
    assert (optimizer.state[model.v.weight]["sum"] == 0.5).all()
    assert optimizer.state[model.v.weight]["sum"].shape == (6, DIM)
    assert optimizer.state[model.w.weight]["sum"].shape == (2, DIM)
    with pytest.raises(errors.ArgumentError, match="does not have this parameter"):
        SpeedTorch.OptimizerFactory(optimizer, N, DIM, model, "u")
    with pytest.raises(
        errors.ArgumentError, match=r"no parameter x\.weight; expected one of \['u', 'v', 'w'\]"
    ):
        SpeedTorch.OptimizerFactory(optimizer, N, DIM, model, "x")
    with pytest.raises(errors.ArgumentError, match="cannot train rows"):
        SpeedTorch.OptimizerFactory(torch.optim.LBFGS([model.u.weight]), N, DIM, model, "u")


def test_only_rows_of_the_batch_are_written_back() -> None:
    weights, states, model, _ = made("ModelFactory", OTHERS["adam"])
    with pytest.raises(errors.WriteBackError, match="not in the model"):
        weights.afterOptimizerStep([0])
    weights.beforeForwardPass([0, 1])
    states.beforeForwardPass([0, 1])
    for table in (weights, states):
        with pytest.raises(errors.WriteBackError, match="not in the model"):
            table.afterOptimizerStep([1, 0])
    model.inner.words.weight.data = torch.zeros(3, DIM)
    with pytest.raises(errors.WriteBackError, match=r"shape \(3, 3\); expected \(2, 3\)"):
        weights.afterOptimizerStep([0, 1])


@pytest.mark.parametrize("pinned", [False, True])
def test_pytorchoptimizerfactory_takes_cpupinn(pinned: bool) -> None:
    model = Model(4)
    states = SpeedTorch.PytorchOptimizerFactory(
        torch.optim.Adagrad(model.inner.words.parameters()),
        N,
        DIM,
        model,
        "inner.words",
        dtype="float32",
        CPUPinn=pinned,
    )
    assert (states.deviceType, states.pinType) == (("cpu", True) if pinned else ("cuda", False))
    states.optInit()
    assert states.getNumpyVersion()["sum"].shape == (N, DIM)
