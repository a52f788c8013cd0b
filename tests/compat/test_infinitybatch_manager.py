"""Plans of the authors of infinitybatch: evaluation, callbacks, history, missing calls."""

import copy
import csv
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pinfeed
from pinfeed import ArgumentError
from pinfeed.compat.infinitybatch import (
    History,
    InfinityBatch,
    InfinityBatchError,
    InfinityBatchWarning,
    Record,
)
from pinfeed.compat.infinitybatch.missing_calls import MissingCalls

pytestmark = [
    pytest.mark.filterwarnings("ignore:there is no CUDA device"),
    pytest.mark.filterwarnings("ignore:forward and backward device"),
    pytest.mark.usefixtures("one_thread"),
]

N = 44
IN = 6
OUT = 3
BATCH = 12
LOSS = nn.CrossEntropyLoss()


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(N, IN, generator=generator), torch.randint(OUT, (N,), generator=generator)
    )


def loader() -> "DataLoader[Any]":
    return DataLoader(dataset(), batch_size=BATCH)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(IN, 8), nn.ReLU(), nn.Linear(8, OUT))


def manager(model: nn.Module | None = None, **options: Any) -> InfinityBatch:
    model = model or network()
    return InfinityBatch(
        model,
        options.pop("optimizer", None) or torch.optim.Adam(model.parameters(), lr=0.01),
        options.pop("criterion", LOSS),
        options.pop("dataloader", None) or loader(),
        verbose=False,
        **options,
    )


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == targets).double().mean()


class TestEvaluation:
    def test_leaves_everything_as_it_was(self) -> None:
        model = nn.Sequential(
            nn.Linear(IN, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, OUT)
        )
        model[1].eval()
        ib = manager(model, chunk_size=5)
        state = copy.deepcopy(model.state_dict())
        modes = [m.training for m in model.modules()]
        rng = torch.get_rng_state()
        metrics = {
            "n": lambda out, y: len(out),
            "grad": lambda out, y: float(out.requires_grad),
            "right": accuracy,
        }
        found = ib.evaluate([tuple(dataset().tensors)], metrics)
        assert torch.equal(torch.get_rng_state(), rng)
        assert [m.training for m in model.modules()] == modes
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())
        assert ib.inputs == ib.outputs == ib.targets == ib.losses == []
        model.eval()
        x, y = dataset().tensors
        outputs = model(x)
        wanted = {"loss": LOSS(outputs, y).item(), "n": N, "grad": 0.0}
        assert found == pytest.approx(wanted | {"right": accuracy(outputs, y).item()})

    @pytest.mark.parametrize("chunk_size", [None, 5])
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_weighs_losses_by_terms(self, chunk_size: int | None, reduction: str) -> None:
        x, y = dataset().tensors
        y = y.clone()
        # The mean loss of the first batch is NaN.
        y[:BATCH] = -100
        y[-5:] = -100
        loss, model = nn.CrossEntropyLoss(reduction=reduction), network()
        ib = manager(model, criterion=loss, chunk_size=chunk_size)
        found = ib.evaluate(DataLoader(TensorDataset(x, y), batch_size=BATCH))
        assert found["loss"] == pytest.approx(loss(model(x), y).item())

    def test_weighs_metrics_by_samples(self) -> None:
        batches = [(torch.ones(2, n, 1), torch.zeros(2, n, 1)) for n in (5, 50)]
        model = nn.Linear(1, 1)
        ib = manager(model, criterion=nn.MSELoss())
        batches.append((batches[1][0], batches[1][1] + 100))
        found = ib.evaluate(batches, {"length": lambda outputs, _: outputs.shape[1]})
        each = [nn.functional.mse_loss(model(x), y).item() for x, y in batches]
        assert found["length"] == pytest.approx((5 + 50 + 50) / 3)
        assert found["loss"] == pytest.approx((5 * each[0] + 50 * each[1] + 50 * each[2]) / 105)

    def test_of_a_feeder_and_of_inputs_alone(self) -> None:
        x, y = (tensor.numpy() for tensor in dataset().tensors)
        model, other = network(), network()
        with pinfeed.Feeder((x, y), batch_size=BATCH, device="cpu") as feeder:
            ib = manager(model, dataloader=feeder)
            ib.train(2)
            found = ib.evaluate(feeder)
        assert found["loss"] == pytest.approx(
            LOSS(model(dataset().tensors[0]), dataset().tensors[1]).item()
        )
        by_hand = manager(other)
        by_hand.train(2)
        assert by_hand.losses == ib.losses
        batches = [{"input": torch.ones(4, IN)}] * 2
        ib = manager(
            nn.Linear(IN, 1), dataloader=batches, criterion=lambda out, _: out.square().mean()
        )
        ib.train(1)
        assert ib.evaluate(batches)["loss"] < ib.history.epochs[0].loss

    def test_invalid_uses_are_refused(self) -> None:
        ib = manager()
        wrong: Any
        for wrong, words in [
            (len, "metrics=<built-in function len>: expected a dict of functions"),
            ({"a": 3}, "metrics= has 'a': 3; expected a dict of functions"),
            ({1: len}, "metrics= has 1: "),
            ({"loss": accuracy}, "metrics= has 'loss', which is the name of a column"),
        ]:
            with pytest.raises(ArgumentError, match=words):
                ib.evaluate(loader(), wrong)
        for wrong, words in [
            ([], "yielded no samples"),
            (None, "loader is None, and it cannot be iterated"),
            (dataset(), "it yields single samples"),
            ([(1, 2, 3)], "3 parts; expected a pair"),
        ]:
            with pytest.raises(ArgumentError, match=words):
                ib.evaluate(wrong)
        with pytest.raises(InfinityBatchError, match="criterion is not set"):
            manager(criterion=None).evaluate(loader())
        assert ib.history.rows == []


class Diary:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def on_train_begin(self, ib: InfinityBatch) -> None:
        self.calls.append(("train",))

    def on_epoch_begin(self, ib: InfinityBatch, epoch: int) -> None:
        self.calls.append(("epoch", epoch))

    def on_batch_end(self, ib: InfinityBatch, batch: int, loss: torch.Tensor | None) -> None:
        self.calls.append(("batch", batch, None if loss is None else loss.item()))

    def on_epoch_end(self, ib: InfinityBatch, record: Record) -> None:
        assert ib.history.epochs[-1] is record
        self.calls.append(("epoch ends", record.epoch))

    def on_train_end(self, ib: InfinityBatch) -> None:
        self.calls.append(("end",))


class TestCallbacks:
    def test_are_called_in_order(self) -> None:
        diary = Diary()
        ib = manager(callbacks=[diary])
        ib.train(2)
        batches = [("batch", i % 4, row.loss) for i, row in enumerate(ib.history.batches)]
        assert diary.calls == [
            *[("train",), ("epoch", 0), *batches[:4], ("epoch ends", 0)],
            *[("epoch", 1), *batches[4:], ("epoch ends", 1), ("end",)],
        ]

    def test_are_called_in_a_loop_of_the_user(self) -> None:
        diary = Diary()
        ib = manager(callbacks=[diary])
        for inputs, targets in ib.dataloader:
            LOSS(ib.batch_(inputs), targets).backward()
            ib.step()
            ib.zero_grad()
        assert diary.calls == [
            ("epoch", 0),
            *(("batch", i, None) for i in range(4)),
            ("epoch ends", 0),
        ]

    def test_may_stop_the_training(self) -> None:
        class StopsAt:
            n = 6

            def on_batch_end(self, ib: InfinityBatch, batch: int, loss: Any) -> None:
                self.n -= 1
                if not self.n:
                    ib.stop()

        diary = Diary()
        ib = manager(callbacks=[StopsAt(), diary])
        ib.train(5)
        assert [len(epoch) for epoch in ib.losses] == [4, 2]
        assert diary.calls[-2:] == [("epoch ends", 1), ("end",)]
        # Another call trains again.
        ib.train(1)
        assert len(ib.history.epochs) == 3

    def test_step_schedulers(self) -> None:
        model = network()
        sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)

        class Steps:
            def on_epoch_end(self, ib: InfinityBatch, record: Record) -> None:
                scheduler.step()

        manager(model, optimizer=sgd, callbacks=[Steps()]).train(3)
        assert sgd.param_groups[0]["lr"] == 0.0625

    def test_errors_surface_and_training_continues(self) -> None:
        class Fails:
            n = 0

            def on_batch_end(self, ib: InfinityBatch, batch: int, loss: Any) -> None:
                self.n += 1
                if self.n == 2:
                    raise KeyError("mine")

        ib = manager(callbacks=[Fails()])
        with pytest.raises(KeyError, match="mine"):
            ib.train(1)
        assert len(ib.history.batches) == 2
        ib.epoch()
        assert [row.epoch for row in ib.history.epochs] == [1]

    def test_a_loop_that_is_left_has_no_end(self) -> None:
        diary = Diary()
        ib = manager(callbacks=[diary])
        for inputs, _ in itertools.islice(ib.dataloader, 2):
            ib.batch_(inputs)
            ib.loss()
            ib.backward()
            ib.step()
            ib.zero_grad()
        assert len(ib.history.batches) == 2
        assert not ib.history.epochs
        assert ("epoch ends", 0) not in diary.calls

    @pytest.mark.parametrize("callbacks", [[object()], [Diary], print])
    def test_other_objects_are_refused(self, callbacks: Any) -> None:
        with pytest.raises(
            ArgumentError, match=r"callbacks=.*expected a list of objects with some"
        ):
            manager(callbacks=callbacks)


class TestHistory:
    def test_is_numbers(self, tmp_path: Path) -> None:
        ib = manager()
        ib.train(1)
        # train() clears the containers, but not the history.
        ib.train(1)
        ib.evaluate(loader(), {"accuracy": accuracy})
        history = ib.history
        assert repr(history) == "<History: 2 epochs, 8 batches, 1 evaluations>"
        assert [(row.epoch, row.batch, row.samples) for row in history.batches] == [
            (e, b, s) for e in range(2) for b, s in enumerate([12, 12, 12, 8])
        ]
        assert [(row.loss, row.samples) for row in history.batches[4:]] == ib.losses[0]
        for epoch in history.epochs:
            rows = [row for row in history.batches if row.epoch == epoch.epoch]
            assert epoch.loss == pytest.approx(sum(row.loss * row.samples for row in rows) / N)
            assert epoch.seconds >= sum(row.seconds for row in rows) > 0
        assert history.evaluations[0].epoch == 2
        history.save(tmp_path / "h.json")
        rows = json.loads((tmp_path / "h.json").read_text())
        assert [row["kind"] for row in rows] == [row.kind for row in history.rows]
        assert rows[-1]["accuracy"] == history.evaluations[0].metrics["accuracy"]
        history.save(tmp_path / "h.csv")
        with open(tmp_path / "h.csv") as file:
            lines = list(csv.DictReader(file))
        assert [float(row["loss"]) for row in lines] == [row.loss for row in history.rows]
        assert lines[0]["accuracy"] == ""

    @pytest.mark.parametrize("path", [3, None, "h.txt"])
    def test_other_paths_are_refused(self, path: Any) -> None:
        with pytest.raises(ArgumentError, match=f"path={path!r}: expected the path of a"):
            History().save(path)

    def test_losses_are_read_in_groups(self) -> None:
        model = nn.Linear(1, 1)
        batches = [(torch.ones(1, 1), torch.zeros(1, 1))] * 600
        ib = manager(model, criterion=nn.MSELoss(), dataloader=batches)
        n_read = []
        for inputs, _ in ib.dataloader:
            ib.batch_(inputs)
            ib.loss()
            n_read.append(len(ib._recorder.history.rows))
        assert sorted(set(n_read)) == [0, 256, 512]
        assert [row.batch for row in ib.history.batches] == list(range(600))

    def test_a_loss_of_one_element_and_a_loop_without_losses(self) -> None:
        ib = manager(criterion=lambda outputs, targets: LOSS(outputs, targets).view(1))
        ib.train(1)
        assert isinstance(ib.history.epochs[0].loss, float)
        for _ in ib.dataloader:
            pass
        assert math.isnan(ib.history.epochs[1].loss)
        assert ib.history.epochs[1].samples == 0


class TestMissingCalls:
    @pytest.mark.parametrize("own_backward", [False, True])
    def test_a_forgotten_zero_grad(self, own_backward: bool) -> None:
        def loop(ib: InfinityBatch) -> None:
            for inputs, targets in ib.dataloader:
                outputs = ib.batch_(inputs)
                if own_backward:
                    LOSS(outputs, targets).backward()
                else:
                    ib.loss()
                    ib.backward()
                ib.step()

        ib = manager()
        with pytest.warns(InfinityBatchWarning, match="call zero_grad") as caught:
            loop(ib)
        assert len(caught) == 1
        assert caught[0].filename == __file__

    @pytest.mark.parametrize("clears", [False, True])
    def test_a_forgotten_step(self, clears: bool) -> None:
        def loop(ib: InfinityBatch) -> None:
            for inputs, targets in ib.dataloader:
                LOSS(ib.batch_(inputs), targets).backward()
                if clears:
                    ib.zero_grad()

        ib = manager()
        with pytest.warns(InfinityBatchWarning, match=r"call step\(\)") as caught:
            loop(ib)
        assert len(caught) == 1
        assert caught[0].filename == __file__

    def test_a_step_that_is_missed_in_a_long_epoch(self) -> None:
        weight = torch.ones(1, requires_grad=True)
        calls = MissingCalls(torch.optim.SGD([weight], lr=0.1))
        for i in range(1000):
            calls.report()
            outputs = weight * i
            calls.watch(outputs)
            outputs.backward()
        with pytest.warns(InfinityBatchWarning, match="1000 backward passes"):
            calls.report()

    def test_loops_that_forget_nothing_are_not_warned_of(self) -> None:
        # Warnings are errors in these tests.
        model = network()
        optimizer = torch.optim.Adam(model.parameters())
        ib = manager(model, optimizer=optimizer, chunk_size=5)
        for inputs, targets in ib.dataloader:
            # Gradients are accumulated, and cleared before the batch instead of after the step.
            ib.zero_grad()
            for _ in range(2):
                LOSS(ib.batch_(inputs), targets).backward()
            ib.step()
        for set_to_none in (True, False):
            # Steps are taken through the optimizer itself.
            for inputs, targets in ib.dataloader:
                LOSS(ib.batch_(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
        for i, (inputs, targets) in enumerate(ib.dataloader):
            # One batch has no step; the model clears its gradients.
            LOSS(ib.batch_(inputs), targets).backward()
            if i != 1:
                ib.step()
            model.zero_grad()
        scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
        for inputs, targets in ib.dataloader:
            # A scaler skips the first steps.
            scaler.scale(LOSS(ib.batch_(inputs * 1e-3), targets)).backward()
            scaler.step(optimizer)
            scaler.update()
            ib.zero_grad()
        for inputs, _ in ib.dataloader:
            # An evaluation has no backward pass.
            with torch.no_grad():
                ib.batch_(inputs)

    def test_an_optimizer_without_hooks_is_not_watched(self) -> None:
        class Steps:
            def step(self) -> None: ...
            def zero_grad(self) -> None: ...

        manager(optimizer=Steps(), strategy="plain").train(1)


def test_rows_of_numpy_arrays() -> None:
    x, y = (tensor.numpy() for tensor in dataset().tensors)
    batches = [(np.array(x[i : i + BATCH]), y[i : i + BATCH]) for i in range(0, N, BATCH)]
    ib, other = manager(dataloader=batches), manager()
    ib.train(1)
    other.train(1)
    assert ib.losses == other.losses
    ib = manager(dataloader=batches)
    for inputs, _ in ib.dataloader:
        ib.batch_(inputs)
        ib.loss()
    assert len(ib.losses[0]) == 4
