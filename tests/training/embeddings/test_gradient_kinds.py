"""Optimizers with different rules for dense and for sparse gradients."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.row_optimizers import itself, loss_of, state_of, train_rows
from support.row_wise_adagrad import RowWiseAdagrad
from torch import nn
from torch.optim import SGD, Adagrad, Adam, SparseAdam

from pinfeed import HostEmbedding, HostEmbeddingBag, RowOptimizer, checkpoint, errors, read_rows

N, DIM = 60, 8


class Scaled(SGD):
    """SGD that scales sparse gradients, which the user may not notice."""

    def __init__(self, params: Any, lr: float, scale: float = 1.0) -> None:
        super().__init__(params, lr=lr)
        self.scale = scale

    def step(self, closure: Any = None) -> None:
        for weight in self.param_groups[0]["params"]:
            if weight.grad is not None and weight.grad.is_sparse:
                weight.grad = weight.grad * self.scale
        super().step()


class Noisy(SGD):
    """SGD that adds noise to the weights, and the sum of gradients in another dtype."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for weight in self.param_groups[0]["params"]:
            weight.add_(torch.randn(weight.shape, dtype=weight.dtype), alpha=0.01)
            state = self.state[weight]
            if not state:
                state["sum"] = torch.zeros(weight.shape, dtype=torch.bfloat16)
            state["sum"].add_(weight.grad.to_dense())


class Unrepeatable(SGD):
    """SGD that adds noise from an unseeded generator of its own, and keeps no loss yet."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        generator = torch.Generator()
        generator.seed()
        for weight in self.param_groups[0]["params"]:
            weight.add_(torch.rand(weight.shape, dtype=weight.dtype, generator=generator))
            self.state[weight]["best loss"] = float("nan")
        random.random()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_two_rules_need_a_choice(dtype: torch.dtype) -> None:
    """Any difference between the rules is found, and rounding is no difference."""
    for dim in (1, 2, 32):
        table = HostEmbedding(N, dim, dtype=dtype)
        for kind, options in (
            (RowWiseAdagrad, {"lr": 1e-7}),
            (Scaled, {"lr": 1e-3, "scale": 1.001}),
        ):
            with pytest.raises(
                errors.ArgumentError,
                match=rf"{kind.__name__} has different rules .*; give gradients='sparse' for",
            ):
                RowOptimizer(kind, [table], **options)
            RowOptimizer(kind, [table], gradients="dense", **options)
            RowOptimizer(kind, [table], gradients="sparse", **options)
        before = torch.get_rng_state()
        before_in_python = random.getstate()
        for kind, options in (
            (Scaled, {"lr": 1.0}),
            (Noisy, {"lr": 0.1}),
            (Unrepeatable, {"lr": 0.1}),
            (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
            (SGD, {"lr": 1e3, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
            (Adagrad, {"lr": 1e-5, "lr_decay": 0.1, "initial_accumulator_value": 1e-3}),
            (Adagrad, {"lr": 10.0, "eps": 0.1, "foreach": True}),
        ):
            RowOptimizer(kind, [table], **options)
        assert torch.equal(torch.get_rng_state(), before)
        assert random.getstate() == before_in_python


def test_choices_that_an_optimizer_does_not_take() -> None:
    table = HostEmbedding(N, DIM)
    wrong: Any
    for kind, wrong, options, match in [
        (SGD, "Sparse", {}, "gradients='Sparse': expected 'dense', 'sparse' or None"),
        (Adam, "sparse", {}, "Adam with gradients='sparse': a step .* does not support sparse"),
        (
            RowWiseAdagrad,
            "sparse",
            {"weight_decay": 0.1},
            "no weight decay of sparse .*; expected an optimizer and options that accept",
        ),
        (SGD, "sparse", {"momentum": 0.9}, "keeps 'momentum_buffer' as a sparse tensor"),
        (SparseAdam, "dense", {}, "SparseAdam cannot train rows: .* dense gradients"),
    ]:
        with pytest.raises(errors.ArgumentError, match=match):
            RowOptimizer(kind, [table], lr=0.1, gradients=wrong, **options)
    # Sparse gradients are no choice with weight decay.
    RowOptimizer(RowWiseAdagrad, [table], lr=0.1, weight_decay=0.1)


def loader(n: int = 12) -> list[torch.Tensor]:
    """Return batches with many repeated ids, which torch adds in an order of its own."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(N, (30, 6), generator=generator) for _ in range(n)]


def step(optimizer: Any, module: nn.Module, ids: torch.Tensor) -> float:
    # Two lookups; one of them leaves rows out.
    loss = loss_of(module, ids) + loss_of(module, ids[:3]).square()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("gradients", ["dense", "sparse"])
@pytest.mark.parametrize("kind", [HostEmbedding, HostEmbeddingBag])
def test_rows_equal_those_of_the_embedding(kind: Any, gradients: Any) -> None:
    """Losses, weights and state equal those of nn.Embedding(sparse=...), bit for bit."""
    sparse = gradients == "sparse"
    if kind is HostEmbedding:
        options: dict[str, Any] = {"padding_idx": 3}
        plain: Any = nn.Embedding(N, DIM, sparse=sparse, **options)
    else:
        options = {"mode": "sum"}
        plain = nn.EmbeddingBag(N, DIM, sparse=sparse, **options)
    begin = plain.weight.detach().clone()
    optimizer: Any = RowWiseAdagrad(plain.parameters(), lr=0.1)
    losses = [step(optimizer, plain, ids) for ids in loader()]
    (state,) = optimizer.state[plain.weight].values()
    for depth, cache, verify in itertools.product((0, 2, 5), (None, 0.3), (False, True)):
        table = kind(N, DIM, init=lambda rows: rows.copy_(begin), device_cache=cache, **options)
        rows = RowOptimizer(RowWiseAdagrad, [table], lr=0.1, gradients=gradients)
        batches = train_rows(loader(), {table: itself}, optimizer=rows, depth=depth, verify=verify)
        assert [step(rows, table, ids) for ids in batches] == losses
        assert torch.equal(table.read(range(N)), plain.weight)
        (kept,) = state_of(rows, table).values()
        assert torch.equal(torch.from_numpy(kept), state)
        assert kept.shape == ((N,) if sparse else (N, DIM))


@pytest.mark.parametrize("kind", [SGD, Adagrad, SparseAdam], ids=lambda kind: kind.__name__)
def test_optimizers_of_torch_get_the_gradients_of_torch(kind: Any) -> None:
    """SGD adds the gradients of repeated ids to the row one by one."""
    plain, table = nn.Embedding(N, DIM, sparse=True), HostEmbedding(N, DIM)
    plain.weight.data.copy_(table.read(range(N)))
    optimizer = kind(plain.parameters(), lr=0.1)
    rows = RowOptimizer(kind, [table], lr=0.1, gradients="sparse")
    batches = train_rows(loader(), {table: itself}, optimizer=rows, depth=2)
    assert [step(rows, table, ids) for ids in batches] == [
        step(optimizer, plain, ids) for ids in loader()
    ]
    assert torch.equal(table.read(range(N)), plain.weight)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [SGD, Adagrad, SparseAdam, RowWiseAdagrad])
def test_sparse_gradients_on_a_gpu(kind: Any) -> None:
    """Compare with the whole table on the same GPU; each number is computed in the same way."""
    plain = nn.Embedding(N, DIM, sparse=True, device="cuda")
    table = HostEmbedding(N, DIM, device_cache=0.3)
    plain.weight.data.copy_(table.read(range(N)))
    optimizer = kind(plain.parameters(), lr=0.1)
    rows = RowOptimizer(kind, [table], lr=0.1, gradients="sparse")
    # The GPU may add gradients of repeated ids in any order.
    ids = [torch.randperm(N)[:30] for _ in range(8)]
    batches = train_rows(ids, {table: itself}, optimizer=rows, depth=2, device="cuda")
    for found, number in zip(batches, ids, strict=True):
        for module, one, batch in ((table, rows, found), (plain, optimizer, number.cuda())):
            module(batch).sigmoid().square().sum().backward()
            one.step()
            one.zero_grad()
    assert torch.equal(table.read(range(N)), plain.weight.cpu())


def test_weights_that_are_used_directly() -> None:
    """Dense gradients of rows become sparse ones, and those of several lookups are added."""
    table = HostEmbedding(N, DIM)
    want = table.to_embedding()
    plain = Adagrad(want.parameters(), lr=0.1)
    rows = RowOptimizer(Adagrad, [table], lr=0.1, gradients="sparse")
    for ids in train_rows([torch.arange(N), torch.arange(N)], {table: itself}, optimizer=rows):
        for module, optimizer in ((table, rows), (want, plain)):
            (module(ids).sum() + module.weight.square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(table.read(range(N)), want.weight.detach())


def test_a_run_is_resumed(tmp_path: Path) -> None:
    """A checkpoint has the values that the optimizer keeps outside its state, too."""

    def run(*, n: int, resume: bool = False) -> tuple[list[float], torch.Tensor]:
        torch.manual_seed(0)
        path = tmp_path / ("resumed.npy" if n < 12 or resume else "whole.npy")
        table = HostEmbedding(N, DIM, store=path, overwrite=True)
        rows = RowOptimizer(RowWiseAdagrad, [table], lr=0.1, gradients="sparse")
        batches = train_rows(loader(), {table: itself}, optimizer=rows)
        parts = {"table": table, "rows": rows, "batches": batches}
        if resume:
            checkpoint.resume(tmp_path / "run", **parts)
        losses = []
        for ids in batches:
            losses.append(step(rows, table, ids))
            if len(losses) == n:
                checkpoint.save(tmp_path / "run", **parts)
                break
        result = table.read(range(N))
        batches.close()
        rows.close()
        table.close()
        return losses, result

    table = HostEmbedding(N, DIM)
    rows = RowOptimizer(RowWiseAdagrad, [table], lr=0.1, gradients="sparse")
    for ids in train_rows(loader(1), {table: itself}, optimizer=rows):
        step(rows, table, ids)
    older = {key: value for key, value in rows.state_dict().items() if key != "attributes"}
    with pytest.raises(errors.ArgumentError, match="not a state of a RowOptimizer"):
        rows.load_state_dict(older)
    whole, result = run(n=12)
    first, _ = run(n=5)
    rest, resumed = run(n=7, resume=True)
    assert first + rest == whole
    assert torch.equal(resumed, result)


@pytest.mark.parametrize(("optimizer", "kind"), [(SGD, "sparse"), (SparseAdam, None)])
def test_bags_of_maxima_refuse_sparse_gradients_at_once(optimizer: Any, kind: Any) -> None:
    bag = HostEmbeddingBag(N, DIM, mode="max", name="words")
    with pytest.raises(errors.ArgumentError, match=r"words has mode='max'.* or an optimizer"):
        RowOptimizer(optimizer, bag, lr=0.1, gradients=kind)
    RowOptimizer(SGD, bag, lr=0.1, gradients="dense")


def test_ids_in_a_column_of_a_batch_cause_no_warning() -> None:
    table = HostEmbedding(N, DIM)
    was = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        for batch in read_rows([torch.arange(8).reshape(4, 2)], {table: lambda batch: batch}):
            torch.testing.assert_close(table(batch[:, 0]), table(batch)[:, 0])
    finally:
        torch.set_warn_always(was)
