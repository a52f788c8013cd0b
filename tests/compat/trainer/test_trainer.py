"""Trainer: equal to the loop by hand, callbacks, errors and refused arguments."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.trainers import (
    BATCH,
    IN,
    LOSS,
    OUT,
    N,
    dataset,
    loader,
    network,
    trainer_of,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pinfeed
from pinfeed import Config, Feeder
from pinfeed.compat.trainer import MemoryMonitor, Record, Trainer
from pinfeed.errors import ArgumentError, ClosedError, DeviceError


def by_hand(
    model: nn.Module, optimizer: Any, batches: Any, n_epochs: int, loss: Any = LOSS
) -> list[float]:
    losses = []
    for _ in range(n_epochs):
        for x, y in batches:
            found = loss(model(x), y)
            found.backward()
            losses.append(found.item())
            optimizer.step()
            optimizer.zero_grad()
    return losses


def parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


LOOPS: dict[str, Callable[[Trainer], Any]] = {}


def loop(function: Callable[[Trainer], Any]) -> Callable[[Trainer], Any]:
    LOOPS[function.__name__] = function
    return function


@loop
def whole(trainer: Trainer) -> None:
    trainer.train(3)


@loop
def epochs(trainer: Trainer) -> None:
    for _ in range(3):
        trainer.epoch()


@loop
def custom(trainer: Trainer) -> None:
    for _ in range(3):
        for batch in trainer.batches():
            trainer.backward(*batch)
            trainer.step()
            trainer.zero_grad()


@pytest.mark.parametrize("run", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize(
    "options", [{}, {"chunk_size": 5}, {"chunk_size": 5, "strategy": "two_pass"}], ids=str
)
def test_equals_the_loop_by_hand(run: Callable[[Trainer], Any], options: dict[str, Any]) -> None:
    model, other = network(), network()
    losses = by_hand(other, torch.optim.Adam(other.parameters(), lr=0.01), loader(shuffle=True), 3)
    with trainer_of(model, loader=loader(shuffle=True), **options) as trainer:
        run(trainer)
        seen = [row.loss for row in trainer.history.batches]
        assert trainer.chosen is not None
        assert trainer.chosen.strategy == options.get(
            "strategy", "accumulate" if options else "plain"
        )
        assert ("neither config nor chunk_size" in str(trainer.chosen)) == (not options)
    if options:
        torch.testing.assert_close(parameters(model), parameters(other))
        assert seen == pytest.approx(losses, rel=1e-5)
    else:
        assert torch.equal(parameters(model), parameters(other))
        assert seen == losses


def test_accumulated_chunks_equal_those_by_hand_bit_for_bit() -> None:
    model, other = network(), network()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(3):
        for x, y in loader():
            for a, b in zip(x.split(5), y.split(5), strict=True):
                (LOSS(other(a), b) * (len(a) / len(x))).backward()
            optimizer.step()
            optimizer.zero_grad()
    with Trainer(
        model, LOSS, torch.optim.SGD(model.parameters(), lr=0.1), loader(), chunk_size=5
    ) as trainer:
        trainer.train(3)
    assert torch.equal(parameters(model), parameters(other))


def test_stale_gradients_do_not_count() -> None:
    model, other = network(), network()
    by_hand(other, torch.optim.Adam(other.parameters(), lr=0.01), loader(), 1)
    LOSS(model(torch.ones(4, IN)), torch.zeros(4, dtype=torch.int64)).backward()
    with trainer_of(model) as trainer:
        trainer.train(1)
    assert torch.equal(parameters(model), parameters(other))


def test_clipping_schedulers_and_several_optimizers() -> None:
    def parts(model: nn.Module) -> tuple[list[Any], list[Any]]:
        optimizers = [
            torch.optim.SGD(model[0].parameters(), lr=0.5),
            torch.optim.Adam(model[2].parameters(), lr=0.05),
        ]  # type: ignore[index]
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizers[1], patience=0, threshold=1.0
        )
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizers[0], 1, gamma=0.5), plateau]

    model, other = network(), network()
    optimizers, (step, plateau) = parts(other)
    for _ in range(3):
        losses = []
        for x, y in loader():
            found = LOSS(other(x), y)
            found.backward()
            losses.append(found.item() * len(x))
            nn.utils.clip_grad_norm_(other.parameters(), 0.1)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        step.step()
        plateau.step(sum(losses) / N)
    own, schedulers = parts(model)
    with Trainer(model, LOSS, own, loader(), scheduler=schedulers, clip_norm=0.1) as trainer:
        trainer.train(3)
    assert torch.equal(parameters(model), parameters(other))
    assert [group["lr"] for one in own for group in one.param_groups] == [
        group["lr"] for one in optimizers for group in one.param_groups
    ]
    assert own[0].param_groups[0]["lr"] == 0.0625


def test_a_scaler_and_autocast() -> None:
    model, other = network(), network()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.Adam(other.parameters(), lr=0.01)
    for x, y in loader():
        with torch.autocast("cpu", torch.bfloat16):
            found = LOSS(other(x), y)
        scaler.scale(found).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    with trainer_of(
        model,
        clip_norm=0.5,
        scaler=torch.amp.GradScaler("cpu", init_scale=8.0),
        autocast=torch.bfloat16,
    ) as trainer:
        trainer.train(1)
    assert torch.equal(parameters(model), parameters(other))


def test_feeders_dicts_and_inputs_alone() -> None:
    x, y = (tensor.numpy() for tensor in dataset().tensors)
    model, other = network(), network()
    by_hand(other, torch.optim.Adam(other.parameters(), lr=0.01), loader(), 2)
    with Feeder((x, y), batch_size=BATCH) as feeder, trainer_of(model, loader=feeder) as trainer:
        trainer.train(2)
        assert trainer.evaluate(feeder)["loss"] == pytest.approx(
            LOSS(model(dataset().tensors[0]), dataset().tensors[1]).item()
        )
    assert torch.equal(parameters(model), parameters(other))

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(IN, 1)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * scale[:, None]  # type: ignore[no-any-return]

    named = Named()
    batches = [{"x": torch.ones(4, IN), "scale": torch.arange(4.0)}] * 2
    with Trainer(
        named,
        lambda out, _: out.square().mean(),
        torch.optim.SGD(named.parameters(), lr=0.01),
        batches,
        chunk_size=3,
    ) as trainer:
        trainer.train(2)
        assert trainer.evaluate(batches)["loss"] < trainer.history.epochs[0].loss


def test_with_a_config() -> None:
    with trainer_of(config=pinfeed.Config(cpu_memory_limit=pinfeed.GiB(1))) as trainer:
        trainer.train(1)
        assert trainer.chosen is not None
        assert trainer.chosen.strategy == "plain"
        assert trainer.chosen.device_bytes["plain"]


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    with pytest.raises(ArgumentError, match="steps none of the 2 parameters of the model"):
        Trainer(model, LOSS, torch.optim.SGD(other.parameters(), lr=0.1), [])
    model.requires_grad_(requires_grad=False)
    # A frozen model is accepted, because something else is trained.
    Trainer(model, LOSS, torch.optim.SGD(other.parameters(), lr=0.1), []).close()


class Diary:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def on_train_begin(self, trainer: Trainer) -> None:
        self.calls.append(("train",))

    def on_epoch_begin(self, trainer: Trainer, epoch: int) -> None:
        self.calls.append(("epoch", epoch))

    def on_batch_end(self, trainer: Trainer, batch: int, loss: torch.Tensor) -> None:
        self.calls.append(("batch", batch, loss.item()))

    def on_epoch_end(self, trainer: Trainer, row: Record) -> None:
        assert trainer.history.epochs[-1] is row
        self.calls.append(("epoch ends", row.epoch))

    def on_train_end(self, trainer: Trainer) -> None:
        self.calls.append(("end",))


def test_callbacks() -> None:
    diary = Diary()
    with trainer_of(callbacks=[diary]) as trainer:
        trainer.train(2)
        losses = [row.loss for row in trainer.history.batches]
    batches = [("batch", i % 4, loss) for i, loss in enumerate(losses)]
    assert diary.calls == [
        *[("train",), ("epoch", 0), *batches[:4], ("epoch ends", 0)],
        *[("epoch", 1), *batches[4:], ("epoch ends", 1), ("end",)],
    ]


class StopsAt:
    def __init__(self, n: int) -> None:
        self.n = n

    def on_batch_end(self, trainer: Trainer, batch: int, loss: Any) -> None:
        self.n -= 1
        if not self.n:
            trainer.stop()


def test_a_callback_may_stop() -> None:
    diary = Diary()
    with trainer_of(callbacks=[StopsAt(6), diary]) as trainer:
        trainer.train(5)
        assert [
            len([row for row in trainer.history.batches if row.epoch == epoch])
            for epoch in range(3)
        ] == [4, 2, 0]
        assert diary.calls[-2:] == [("epoch ends", 1), ("end",)]
        trainer.train(1)  # once more
        assert len(trainer.history.epochs) == 3


def test_errors_surface_and_a_loop_can_be_left() -> None:
    class Fails:
        def on_batch_end(self, trainer: Trainer, batch: int, loss: Any) -> None:
            raise KeyError("mine")

    with trainer_of(callbacks=[Fails()]) as trainer:
        with pytest.raises(KeyError, match="mine"):
            trainer.train(1)
        assert len(trainer.history.batches) == 1
    diary = Diary()
    with trainer_of(callbacks=[diary]) as trainer:
        for x, y in itertools.islice(trainer.batches(), 2):
            trainer.backward(x, y)
            trainer.step()
            trainer.zero_grad()
        assert len(trainer.history.batches) == 2
        assert not trainer.history.epochs
        assert ("epoch ends", 0) not in diary.calls
        trainer.epoch()
        assert [row.epoch for row in trainer.history.epochs] == [1]


def test_training_continues_after_an_error_of_the_model() -> None:
    class Fails(nn.Linear):
        n = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n += 1
            if self.n == 2:
                raise ValueError("mine")
            return super().forward(x)

    with trainer_of(Fails(IN, OUT)) as trainer:
        with pytest.raises(ValueError, match="mine") as kept:
            trainer.train(1)
        assert len(trainer.history.batches) == 1
        trainer.train(1)
        assert len(trainer.history.batches) == 5
    assert kept.tb is not None


def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with trainer_of(progress=True) as trainer:
        trainer.train(1)
    shown = capsys.readouterr().err
    assert "4/4" in shown
    assert "loss=" in shown


def test_bad_arguments() -> None:
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for options, words in [
        ({"optimizer": None}, "optimizer= is empty"),
        ({"optimizer": [sgd, 3]}, "optimizer=3 has no step"),
        ({"scheduler": "cosine"}, "scheduler='cosine' has no step"),
        ({"clip_norm": 0}, "clip_norm=0"),
        ({"callbacks": [object()]}, "expected an object with some of on_train_begin"),
        ({"callbacks": [Diary]}, "callbacks= has"),
        ({"model": len}, "expected a torch module"),
        ({"loader": 3}, "cannot be iterated"),
        (
            {"loader": TensorDataset(torch.zeros(2, 3)), "chunk_size": 2},
            "loader is a TensorDataset, a Dataset, which returns single samples",
        ),
        ({"config": 3}, "config=3: expected a pinfeed.Config"),
        ({"loss": nn.MSELoss}, r"loss=MSELoss is a class; .*; give loss=MSELoss\(\)"),
        ({"scaler": 3}, "scaler=3: expected a torch.amp.GradScaler"),
        (
            {"autocast": "bfloat16"},
            "autocast='bfloat16': expected a floating-point dtype of torch, such as torch.bfloat16",
        ),
        ({"autocast": True}, "autocast=True: expected a floating-point dtype"),
        ({"clip_norm": "x"}, "clip_norm='x': expected a number above 0, or None"),
        ({"clip_norm": True}, "clip_norm=True: expected a number above 0, or None"),
        (
            {"callbacks": print},
            "callbacks=<built-in function print>: expected a list of objects with some of on_train",
        ),
        ({"verify": "no"}, "verify='no': expected True or False"),
        ({"progress": "no"}, "progress='no': expected True or False"),
    ]:
        with pytest.raises(ArgumentError, match=words):
            Trainer(
                **({"model": model, "loss": LOSS, "optimizer": sgd, "loader": loader()} | options)
            )
    for batches, words in [([], "yielded no batch"), ([(1, 2, 3)], "3 parts; expected a pair")]:
        with (
            Trainer(model, LOSS, sgd, batches) as trainer,
            pytest.raises(ArgumentError, match=words),
        ):
            trainer.train(1)
    with trainer_of() as trainer:
        with pytest.raises(ArgumentError, match="n_epochs=-1"):
            trainer.train(-1)
        with pytest.raises(ArgumentError, match="metrics= has 'loss'"):
            trainer.evaluate(loader(), {"loss": lambda out, y: 0})
        with pytest.raises(ArgumentError, match="yielded no samples"):
            trainer.evaluate([])
        with pytest.raises(ArgumentError, match="loader=None cannot be iterated"):
            trainer.evaluate(None)
        with pytest.raises(ArgumentError, match="a Dataset, which returns single samples"):
            trainer.evaluate(TensorDataset(torch.zeros(2, 3)))
        wrong: Any
        for wrong, words in [
            (len, "metrics=<built-in function len>: expected a dict of functions"),
            ({"a": 3}, "metrics= has 'a': 3; expected a name and a function"),
            ({1: len}, "metrics= has 1: "),
        ]:
            with pytest.raises(ArgumentError, match=words):
                trainer.evaluate(loader(), wrong)
        for _ in trainer.batches():
            with pytest.raises(ClosedError, match="another loop"):
                trainer.epoch()
    with pytest.raises(ClosedError, match="closed"):
        trainer.train(1)


@pytest.mark.parametrize("device", ["gpu", 3.5, "mps"])
def test_devices_that_do_not_exist(device: Any) -> None:
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for make in (
        lambda: Trainer(model, LOSS, sgd, loader(), device=device),
        lambda: Config(model=model, input_shape=(3,), device=device),
        lambda: MemoryMonitor(device),
    ):
        with pytest.raises(
            DeviceError, match=f"device='?{device}'? is not .*; expected .*'cpu', 'cuda'"
        ):
            make()


def test_a_missing_gpu() -> None:
    model = network()
    with pytest.raises(
        DeviceError,
        match=r"device='cuda': torch .* finds no usable GPU|device='cuda:99' does not exist",
    ):
        Trainer(
            model, LOSS, torch.optim.SGD(model.parameters(), lr=0.1), loader(), device="cuda:99"
        )


def test_classes_in_place_of_what_they_make() -> None:
    for arguments in (
        {"optimizer": torch.optim.Adam},
        {"scheduler": torch.optim.lr_scheduler.StepLR},
    ):
        given: dict[str, Any] = {"optimizer": torch.optim.Adam(network().parameters())} | arguments
        with pytest.raises(ArgumentError, match=r"got the class (Adam|StepLR); expected an object"):
            Trainer(network(), LOSS, given.pop("optimizer"), loader(), **given)


def test_a_model_whose_samples_see_each_other_is_refused() -> None:
    """Chunks give other gradients; without ``chunk_size`` the plain step is right."""

    class Centered(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(0)

    def trainer(**options: Any) -> Trainer:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), Centered(), nn.Linear(8, 3))
        data = TensorDataset(torch.randn(24, 4), torch.randint(3, (24,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Trainer(
            model, nn.CrossEntropyLoss(), optimizer, DataLoader(data, batch_size=24), **options
        )

    with (
        trainer(chunk_size=8) as wrong,
        pytest.raises(ArgumentError, match=r"may combine samples: mean"),
    ):
        wrong.epoch()
    with (
        trainer(chunk_size=24) as whole,
        trainer() as plain,
        trainer(chunk_size=8, verify=False) as unproved,
    ):
        assert whole.epoch() == plain.epoch()
        unproved.epoch()
        for one, other in zip(whole.model.parameters(), plain.model.parameters(), strict=True):
            assert torch.equal(one, other)
        assert not torch.allclose(unproved.model[0].weight, plain.model[0].weight, rtol=1e-3)
