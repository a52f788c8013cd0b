"""CombinedOptimizer: one optimizer for tables and dense parameters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.row_optimizers import DIM, N, batches, itself, train_rows
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, lr_scheduler

from pinfeed import CombinedOptimizer, HostEmbedding, RowOptimizer, checkpoint, errors

Scheduler = Callable[[torch.optim.Optimizer], Any]
SCHEDULERS: dict[str, Scheduler] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.5, 0.3, 0.1], total_steps=16),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
}


class Program:
    """A loop over one table of each group and a dense model, with one optimizer for all."""

    def __init__(self, scheduler: str, path: Path | None = None, plain: bool = False) -> None:
        torch.manual_seed(0)
        self.tables = [
            HostEmbedding(N, DIM, store=None if path is None else path / f"{i}.npy")
            for i in range(2)
        ]
        self.model = nn.Linear(DIM, 1)
        modules: list[nn.Module] = [*self.tables]
        groups: Any = [{"params": [self.tables[0]], "lr": 0.2}, {"params": [self.tables[1]]}]
        dense = AdamW(self.model.parameters(), lr=0.1)
        self.optimizer: torch.optim.Optimizer
        if plain:
            # Every batch has every row, so the lazy rule and the dense one agree.
            modules = [table.to_embedding() for table in self.tables]
            both = zip(groups, modules, strict=True)
            made = [{**group, "params": [*module.parameters()]} for group, module in both]
            self.optimizer = AdamW(
                [*made, {"params": [*self.model.parameters()], "lr": 0.1}], lr=0.05
            )
        else:
            self.optimizer = CombinedOptimizer(RowOptimizer(AdamW, groups, lr=0.05), dense)
        self.modules = modules
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.losses: list[float] = []
        self.batches: Any = [torch.cat([torch.arange(N), ids]) for ids in batches(8)]
        if not plain:
            self.batches = train_rows(
                self.batches, dict.fromkeys(self.tables, itself), optimizer=self.optimizer
            )

    @property
    def parts(self) -> dict[str, Any]:
        names = "batches", "optimizer", "scheduler", "scaler", "model"
        tables = {f"table_{i}": table for i, table in enumerate(self.tables)}
        return {**{name: getattr(self, name) for name in names}, **tables}

    def run(self, begin: int = 0, until: int = 8) -> "Program":
        for number, ids in enumerate(self.batches, begin):
            rows = self.modules[0](ids) * self.modules[1](ids)
            loss = (self.model(rows).squeeze() - 1).square().mean()
            # The scaler skips this batch.
            factor = torch.inf if number == 2 else 1.0
            self.scaler.scale(loss * factor).backward()
            self.scaler.unscale_(self.optimizer)
            groups = self.optimizer.param_groups
            nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], 0.1)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            is_plateau = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)
            self.scheduler.step(*[loss.item()] * is_plateau)
            self.losses.append(loss.item())
            if number + 1 == until:
                break
        return self

    def close(self) -> None:
        self.batches.close()
        for part in (self.optimizer, *self.tables):
            part.close()


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_combined_optimizer_equals_one_optimizer_for_all(scheduler: str) -> None:
    """Losses and rows equal those of one optimizer of torch with three groups."""
    plain, combined = Program(scheduler, plain=True).run(), Program(scheduler).run()
    assert combined.losses == plain.losses
    for table, module in zip(combined.tables, plain.modules, strict=True):
        assert torch.equal(table.read(range(N)), module.weight)
    rates = [group["lr"] for group in combined.optimizer.param_groups]
    assert rates == [group["lr"] for group in plain.optimizer.param_groups]


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
def test_a_checkpoint_has_all_of_it(tmp_path: Path) -> None:
    whole = Program("OneCycleLR").run()
    first = Program("OneCycleLR", tmp_path).run(until=4)
    checkpoint.save(tmp_path / "run", **first.parts)
    first.close()
    second = Program("OneCycleLR", tmp_path)
    with pytest.raises(errors.StoreError, match="existed before the optimizer was made"):
        checkpoint.save(tmp_path / "other", optimizer=second.optimizer)
    checkpoint.resume(tmp_path / "run", **second.parts)
    second.run(4)
    assert first.losses + second.losses == whole.losses
    for one, other in zip(whole.tables, second.tables, strict=True):
        assert torch.equal(one.read(range(N)), other.read(range(N)))
    second.close()
    changed = CombinedOptimizer(
        RowOptimizer(Adagrad, whole.tables), AdamW(whole.model.parameters())
    )
    with pytest.raises(errors.CheckpointError, match=r"optimizer is .*; create it in the same way"):
        checkpoint.resume(tmp_path / "run", **{**whole.parts, "optimizer": changed})


def test_groups_are_shared_and_stay_so() -> None:
    table = HostEmbedding(N, DIM, name="users")
    weight = nn.Parameter(torch.ones(3))
    rows, dense = RowOptimizer(Adam, [table]), SGD([weight], lr=0.1)
    combined = CombinedOptimizer(dense, rows)
    # torch replaces the groups here.
    dense.load_state_dict(dense.state_dict())
    dense.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.5})
    groups = combined.param_groups
    assert [*map(id, groups)] == [*map(id, [*dense.param_groups, *rows.param_groups])]
    assert [group["lr"] for group in groups] == [0.1, 0.5, 1e-3]
    assert combined.parameters()[0] is weight
    stepped = []
    combined.register_step_post_hook(lambda *_: stepped.append(1))

    def closure() -> torch.Tensor:
        combined.zero_grad()
        loss = weight.sum() + table.weight.sum()
        loss.backward()
        return loss

    before = table.read(range(N))
    for _ in train_rows([torch.arange(N)], {table: itself}, optimizer=[combined]):
        with torch.no_grad():
            assert combined.step(closure).item() == pytest.approx(3 + before.sum().item())
        assert combined.state[table.weight]["step"] == 1
    assert stepped == [1]
    assert torch.equal(weight, torch.full((3,), 0.9))
    assert (table.read(range(N)) != before).all()


def test_mistakes_are_refused() -> None:
    table = HostEmbedding(N, DIM, name="users")
    rows, weight = RowOptimizer(SGD, [table]), nn.Parameter(torch.ones(3))
    dense = SGD([weight])
    wrong: Any
    for wrong, match in [
        ([], r"without optimizers; expected CombinedOptimizer\(row_optimizer, optimizer\)"),
        ([[rows, dense]], "expected torch optimizers and RowOptimizers as separate arguments"),
        ([SGD], "got a type; expected torch optimizers"),
        ([rows, CombinedOptimizer(dense)], "got a CombinedOptimizer"),
        ([rows, RowOptimizer(Adam, [table])], "users is trained by two optimizers; expected one"),
        ([dense, SGD([weight])], r"a parameter of shape \(3,\) is trained by two optimizers"),
    ]:
        with pytest.raises(errors.ArgumentError, match=match):
            CombinedOptimizer(*wrong)
    combined = CombinedOptimizer(rows, dense)
    with pytest.raises(errors.ArgumentError, match="of the one of its optimizers"):
        combined.add_param_group({"params": []})
    for wrong in ({}, dense.state_dict(), CombinedOptimizer(dense).state_dict()):
        with pytest.raises(errors.ArgumentError, match=r"a state of . optimizers; expected"):
            combined.load_state_dict(wrong)
    # If one optimizer refuses its state, those that were loaded before are unchanged.
    loaded_first = SGD([nn.Parameter(torch.ones(3))], lr=7.0).state_dict()
    with pytest.raises(errors.ArgumentError, match="not a state of a RowOptimizer"):
        CombinedOptimizer(dense, rows).load_state_dict({"optimizers": [loaded_first, {}]})
    assert dense.param_groups[0]["lr"] == 1e-3
    with pytest.raises(errors.ArgumentError, match="users is trained by two optimizers"):
        train_rows([], {table: itself}, optimizer=[combined, rows])
    with pytest.raises(errors.ArgumentError, match="got CombinedOptimizer; expected RowOptimizers"):
        train_rows([], {table: itself}, optimizer=CombinedOptimizer(dense))
    # Gradients of an earlier batch are refused before a dense parameter changes.
    losses = []
    with pytest.raises(errors.ArgumentError, match="gradients of an earlier batch of users"):
        for ids in train_rows(batches(), {table: itself}, optimizer=combined):
            losses.append((table(ids).sum() * weight).sum())
            if len(losses) == 2:
                losses[0].backward()
                CombinedOptimizer(dense, rows).step()
    assert torch.equal(weight, torch.ones(3))
