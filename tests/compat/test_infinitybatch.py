"""The programs of infinitybatch's README run, with gradients of whole batches in bounded memory."""

import copy
import gc
import json
import mmap
import random
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import pinfeed
import pinfeed.compat.infinitybatch as infinitybatch
from pinfeed.compat.infinitybatch.tools import (
    CudaHistory,
    CudaMemorySnapShot,
    CudaMemorySnapshot,
    compare_with_error_,
    determinize,
    is_equal_network,
    is_equal_with_error,
)

# It warns of a machine without CUDA, and of equal devices.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pinfeed.compat.infinitybatch.InfinityBatchWarning"),
    pytest.mark.usefixtures("one_thread"),
]

N = 40
IN = 6
OUT = 3
BATCH = 12


def loader() -> "DataLoader[Any]":
    generator = torch.Generator().manual_seed(5)
    return DataLoader(
        TensorDataset(
            torch.randn(N, IN, generator=generator), torch.randint(OUT, (N,), generator=generator)
        ),
        batch_size=BATCH,
    )


def MyModel(middle: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(IN, 8), middle or nn.Tanh(), nn.Linear(8, OUT))


def by_hand(
    n_epochs: int, model: nn.Module | None = None
) -> tuple[nn.Module, list[list[tuple[float, int]]]]:
    model = model or MyModel()
    optimizer, losses = torch.optim.Adam(model.parameters()), []
    for _ in range(n_epochs):
        losses.append([])
        for x, y in loader():
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            losses[-1].append((loss.item(), len(x)))
            optimizer.step()
            optimizer.zero_grad()
    return model, losses


def as_the_readme_makes_it(**options: Any) -> Any:
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    ib = infinitybatch.InfinityBatch(**options)
    ib.model = MyModel().to(device)
    ib.criterion = torch.nn.CrossEntropyLoss()
    ib.optimier = torch.optim.Adam(ib.model.parameters())
    ib.dataloader = loader()
    return ib


def assert_equal(ib: Any, model: nn.Module, losses: list[list[tuple[float, int]]] | None) -> None:
    for a, b in zip(ib.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.cpu(), b)
    if losses is not None:
        assert [[n for _, n in epoch] for epoch in ib.losses] == [
            [n for _, n in epoch] for epoch in losses
        ]
        assert [x for epoch in ib.losses for x, _ in epoch] == pytest.approx(
            [x for epoch in losses for x, _ in epoch], rel=1e-5
        )


def test_simple_use_case(capsys: pytest.CaptureFixture[str]) -> None:
    ib = as_the_readme_makes_it()
    ib(3)
    assert_equal(ib, *by_hand(3))
    assert ib.chosen.strategy == "plain"
    shown = capsys.readouterr().out
    assert "Training for 3 epochs." in shown
    assert "Epoch: 3/3" in shown
    assert "4 batch(es), 40 element(s)" in shown


def test_epoch_use_case(capsys: pytest.CaptureFixture[str]) -> None:
    ib = as_the_readme_makes_it(verbose=False)
    for _ in range(3):
        ib.epoch()
    assert_equal(ib, *by_hand(3))
    assert not capsys.readouterr().out


@pytest.mark.parametrize("as_printed", [True, False])
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_custom_use_case(as_printed: bool, chunk_size: int | None) -> None:
    ib = as_the_readme_makes_it(verbose=False, chunk_size=chunk_size)
    for _ in range(3):
        for inputs, targets in ib.dataloader:
            outputs = ib.batch_() if as_printed else ib.batch_(inputs)
            loss = ib.criterion(outputs, targets)
            loss.backward()
            ib.step()
            ib.zero_grad()
    assert_equal(ib, by_hand(3)[0], None)
    assert (
        ib.chosen.strategy == ("plain" if chunk_size is None else "two_pass")
        or ib.chosen.chunk_size == 4
    )


def test_a_loop_of_its_own_calls() -> None:
    ib = as_the_readme_makes_it(verbose=False, chunk_size=5)
    for _ in range(2):
        for inputs, _ in ib.dataloader:
            ib.batch_(inputs)
            ib.loss()
            ib.backward()
            ib.step()
            ib.zero_grad()
    assert_equal(ib, *by_hand(2))
    ib.epochstart_()
    for inputs, targets in loader():
        # These batches do not pass through ib.dataloader.
        ib.batch_(inputs)
        ib.targets[-1].append(targets)
        ib.loss()
        ib.backward()
        ib.step()
        ib.zero_grad()
    assert_equal(ib, *by_hand(3))
    assert len(ib.dataloader) == 4
    assert ib.dataloader.batch_size == BATCH


def test_all_at_once_and_a_loss_of_the_whole_batch() -> None:
    def spread(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return -torch.pdist(outputs).mean() + nn.functional.cross_entropy(outputs, targets)

    model, other = MyModel(), MyModel()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(2):
        for x, y in loader():
            spread(other(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    ib = infinitybatch.InfinityBatch(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        spread,
        loader(),
        "cpu",
        False,
        chunk_size=5,
    )
    ib.train(2)
    assert_equal(ib, other, None)
    ib.train(1)
    # train() clears the losses of earlier calls.
    assert len(ib.losses) == 1


@pytest.mark.parametrize(
    "strategy", ["plain", "two_pass", "checkpoint", "checkpoint_offload", "offload"]
)
def test_every_strategy_gives_the_same(strategy: str) -> None:
    ib = as_the_readme_makes_it(verbose=False, strategy=strategy, chunk_size=5)
    ib.train(2)
    assert_equal(ib, *by_hand(2))


def test_batch_norm_sees_the_whole_batch() -> None:
    middle = nn.BatchNorm1d(8)
    model = MyModel(middle)
    ib = infinitybatch.InfinityBatch(
        model, torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss(), loader(), verbose=False
    )
    ib.train(2)
    other, losses = by_hand(2, MyModel(nn.BatchNorm1d(8)))
    assert_equal(ib, other, losses)
    assert is_equal_network(model, other)
    for options in ({"chunk_size": 5}, {"chunk_size": 5, "strategy": "two_pass"}):
        small = infinitybatch.InfinityBatch(
            model, ib.optimizer, ib.criterion, loader(), verbose=False, **options
        )
        with pytest.raises(ValueError, match="normalizes over the batch"):
            small.epoch()


def test_a_forward_pass_that_is_repeated_draws_the_same() -> None:
    model = MyModel(nn.Dropout(0.5))
    ib = infinitybatch.InfinityBatch(model, chunk_size=5, verbose=False)
    x = torch.randn(12, IN)
    torch.manual_seed(7)
    outputs = ib.batch_(x)
    after = torch.get_rng_state()
    outputs.square().sum().backward()
    assert torch.equal(torch.get_rng_state(), after)
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(7)
    again = torch.cat([model(part) for part in x.split(5)])
    assert torch.equal(outputs, again)
    again.square().sum().backward()
    for a, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad)


def test_memory_is_bounded() -> None:
    """The backward pass of a batch keeps no more than that of a chunk."""
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.nbytes)
        return tensor

    model = MyModel()
    for chunk_size, most in ((8, 0), (None, 10**9)):
        ib = infinitybatch.InfinityBatch(model, chunk_size=chunk_size, verbose=False)
        # The first batch is compared with the plain step.
        ib.batch_(torch.randn(512, IN))
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = ib.batch_(torch.randn(512, IN))
        assert sum(saved) <= most
        assert bool(saved) == (chunk_size is None)
        assert outputs.requires_grad


def test_containers_keep_the_last_batch() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def criterion(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.extend(map(weakref.ref, (outputs, targets)))
        return nn.functional.cross_entropy(outputs, targets)

    model = MyModel()
    ib = infinitybatch.InfinityBatch(
        model, torch.optim.Adam(model.parameters()), criterion, loader(), verbose=False
    )
    ib.train(3)
    gc.collect()
    assert len(seen) == 24
    # Only the targets of the last batch may be kept.
    assert sum(ref() is not None for ref in seen) <= 1
    assert [len(epoch) for epoch in ib.inputs] == [len(epoch) for epoch in ib.targets] == [0, 0, 1]
    assert ib.outputs[-1][-1].shape == (4, OUT)
    assert not ib.outputs[-1][-1].requires_grad
    assert all(isinstance(value, float) for epoch in ib.losses for value, _ in epoch)
    ib.clearcontainers_()
    assert ib.losses == ib.inputs == ib.outputs == ib.targets == []


def test_stale_gradients_do_not_count() -> None:
    ib = as_the_readme_makes_it(verbose=False)
    ib.batch_(torch.ones(4, IN)).sum().backward()
    ib.epoch()
    assert_equal(ib, by_hand(1)[0], None)


def test_structures_and_unpredictable_steps() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(IN, 2)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            # The branch depends on data, so the step cannot be predicted.
            out = self.inner(x) if float(y.sum()) > -1e9 else x
            return {"a": out, "n": y.round().long()}

    model = Two()
    x = torch.randn(7, IN)
    y = torch.arange(7.0)
    outputs = infinitybatch.InfinityBatch(model, verbose=False, chunk_size=3).batch_((x, y))
    assert torch.equal(outputs["n"], torch.arange(7))
    outputs["a"].square().sum().backward()
    found = model.inner.weight.grad
    model.inner.weight.grad = None
    model(x, y)["a"].square().sum().backward()
    torch.testing.assert_close(found, model.inner.weight.grad)
    ib = infinitybatch.InfinityBatch(model, verbose=False)
    with pytest.warns(infinitybatch.InfinityBatchWarning, match="give chunk_size="):
        ib.batch_((x, y))


@pytest.mark.filterwarnings("always::pinfeed.compat.infinitybatch.InfinityBatchWarning")
def test_warnings() -> None:
    warning = infinitybatch.InfinityBatchWarning
    if not torch.cuda.is_available():
        with pytest.warns(warning, match="no CUDA device"):
            infinitybatch.InfinityBatch()
    ib = as_the_readme_makes_it(verbose=False, backward_device="meta")
    model = ib.model
    for name in ("model", "optimizer", "criterion"):
        with pytest.warns(warning, match=f"{name} was set before"):
            setattr(ib, name, MyModel())
    assert ib.model is model
    with pytest.warns(warning, match="has no loss"):
        ib.backward()
    ib.changemodeldevice("cpu")
    assert ib.forward_device == torch.device("cpu")
    with pytest.warns(warning, match="are the same"):
        ib.backward_device = None
    assert ib.backward_device == torch.device("cpu")
    with pytest.warns(warning, match="are the same"):
        ib.changemodeldevice("cpu")
    model.requires_grad_(requires_grad=False)
    with pytest.warns(warning, match="no trainable parameter"):
        ib.updateforwarddevice()
    assert ib.forward_device is None


def test_missing_parts_are_named() -> None:
    model = MyModel()
    parts: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters()),
        "criterion": nn.CrossEntropyLoss(),
        "dataloader": loader(),
    }
    for name in parts:
        ib = infinitybatch.InfinityBatch(**(parts | {name: None}), verbose=False)
        with pytest.raises(
            infinitybatch.InfinityBatchError, match=f"{name} is not set; set it: ib.{name}"
        ):
            ib.train(1)
    ib = infinitybatch.InfinityBatch(**(parts | {"dataloader": []}), verbose=False)
    for act, words in [
        (ib.epoch, "yielded no batch"),
        (ib.batch_, r"give the inputs: batch_\(inputs\)"),
        (ib.loss, "no outputs"),
        (lambda: infinitybatch.InfinityBatch(strategy="accumulate"), "strategy='accumulate'"),
        (lambda: infinitybatch.InfinityBatch(chunk_size=0), "chunk_size=0"),
        (lambda: ib.batch_(torch.zeros(0, IN)), "the batch is empty"),
        (lambda: (ib.batch_(torch.zeros(2, IN)), ib.loss()), "no targets"),
    ]:
        with pytest.raises(ValueError, match=words):
            act()

    def fails(outputs: Any, targets: Any) -> Any:
        class Loss(torch.Tensor):
            def backward(self, *args: Any) -> None:  # type: ignore[override]
                raise AttributeError("mine")

        return outputs.sum().as_subclass(Loss)

    ib = infinitybatch.InfinityBatch(**(parts | {"criterion": fails}), verbose=False)
    with pytest.raises(AttributeError, match="mine"):
        ib.epoch()


def test_tools() -> None:
    history = CudaHistory()
    assert str(history) == "CudaHistory is empty."
    history.append("a label that is longer than it may be", None, False)
    history.append("after")
    assert [name for name, _ in history] == ["a label that is long", "after"]
    assert "| Name" in str(history)
    assert len(str(history).splitlines()) == 5
    assert CudaMemorySnapshot is CudaMemorySnapShot is infinitybatch.tools.CudaMemorySnapShot
    snapshot = CudaMemorySnapShot("cuda")
    assert snapshot.device == "cuda"
    assert snapshot.free_cache == snapshot.reserved - snapshot.allocated >= 0
    if not torch.cuda.is_available():
        assert (snapshot.total, snapshot.reserved, snapshot.allocated) == (0, 0, 0)

    class Mine(CudaHistory):
        pass

    Mine().append("a subclass")


def test_a_history_of_snapshots_is_saved(tmp_path: Path) -> None:
    history = CudaHistory()
    history.append("before")
    with mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        # A tensor might reuse the memory of an earlier one, so a new mapping is used.
        held.write(b"x" * len(held))
        history.append("after")
        before, after = (snapshot.process for _, snapshot in history)
        assert after.anonymous - before.anonymous > 0.9 * len(held)
    assert after.peak >= after.anonymous
    assert history[0][1].inactive <= history[0][1].free_cache
    history.save(tmp_path / "memory.json")
    rows = json.loads((tmp_path / "memory.json").read_text())
    assert [row["name"] for row in rows] == ["before", "after"]
    assert rows[1]["anonymous"] == after.anonymous
    history.save(tmp_path / "memory.csv")
    lines = (tmp_path / "memory.csv").read_text().splitlines()
    assert lines[0].startswith("name,total,free,reserved,allocated,free_cache,inactive,anonymous")
    with pytest.raises(pinfeed.ArgumentError, match=r"expected the path of a \.csv or"):
        history.save(tmp_path / "memory.txt")


def test_comparisons() -> None:
    one = torch.randn(3, 4, requires_grad=True)
    assert is_equal_with_error(one, one.detach() + 1e-9)
    assert not is_equal_with_error(one, one + 1e-3)
    assert not is_equal_with_error(one, one[:2])
    assert is_equal_with_error(torch.tensor(1.0), torch.tensor(1.0), False)
    assert is_equal_with_error(torch.ones(3), torch.ones(3))
    assert not is_equal_with_error(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert compare_with_error_(1.0, 1.0 + 1e-8)
    assert not compare_with_error_(1.0, 1.1)
    assert is_equal_network(MyModel(), MyModel())
    assert not is_equal_network(MyModel(), nn.Linear(2, 2))
    other = MyModel()
    with torch.no_grad():
        next(other.parameters()).add_(1e-9)
    assert not is_equal_network(MyModel(), other)


def test_determinize(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("deterministic", "benchmark"):
        monkeypatch.setattr(torch.backends.cudnn, name, False)

    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002

    draws = []
    for seed in (None, 0, 3, 3):
        determinize(seed)
        draws.append(drawn())
    assert draws[0] == draws[1] != draws[2] == draws[3]
    assert torch.backends.cudnn.deterministic
    for _ in range(2):
        determinize(be_deterministic=False)
        draws.append(drawn())
    assert draws[-1] != draws[-2]
    assert torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.deterministic


def manager(model: nn.Module, **options: Any) -> Any:
    return infinitybatch.InfinityBatch(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.CrossEntropyLoss(),
        loader(),
        verbose=False,
        **options,
    )


@pytest.mark.parametrize(
    "layer",
    [
        lambda x: x - x.mean(0),
        lambda x: functional.batch_norm(x, None, None, training=True),
        lambda x: x + x.roll(1, 0),
    ],
    ids=["minus the mean", "F.batch_norm", "the sample before"],
)
def test_a_model_whose_samples_see_each_other_is_refused(layer: Any) -> None:
    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return layer(x)

    with pytest.raises(pinfeed.ArgumentError, match="chunks do not give the gradients"):
        manager(MyModel(Layer()), chunk_size=5).epoch()
    manager(MyModel(Layer()), chunk_size=5, verify=False).epoch()


def test_buffers_take_one_step_for_each_batch() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = self.count + len(x)
            return x * self.count

    model = MyModel(Counts())
    ib = manager(model, chunk_size=5, strategy="two_pass")
    with pytest.warns(
        infinitybatch.InfinityBatchWarning,
        match="strategy='two_pass' does not give the gradients of the plain step",
    ):
        ib.epoch()
    assert model[1].count == N


def test_the_strategy_is_chosen_for_each_mode() -> None:
    model = MyModel(nn.BatchNorm1d(8)).eval()
    ib = manager(model, chunk_size=5)
    ib.batch_(torch.randn(BATCH, IN))
    model.train()
    with pytest.raises(pinfeed.errors.ArgumentError, match="normalizes over the batch"):
        ib.batch_(torch.randn(BATCH, IN))


def test_a_dataloader_that_was_kept() -> None:
    ib = manager(MyModel())
    kept = ib.dataloader
    ib.train(1)
    for i, (x, _) in enumerate(kept):
        assert len(ib.batch_()) == len(x)
        if i == 1:
            ib.clearcontainers_()


def test_a_history_is_copied() -> None:
    history = CudaHistory()
    history.append("here")
    assert [name for name, _ in copy.deepcopy(history)] == ["here"]


def chunked_run() -> tuple[nn.Module, Any, torch.Tensor]:
    model = nn.Linear(8, 1)
    run = infinitybatch.InfinityBatch(
        model, None, nn.MSELoss(), [], verbose=False, chunk_size=16, strategy="two_pass"
    )
    return model, run, torch.randn(64, 8)


@pytest.mark.filterwarnings("ignore::pinfeed.compat.infinitybatch.InfinityBatchWarning")
def test_evaluation_without_gradients() -> None:
    model, run, inputs = chunked_run()
    model.eval()
    with torch.no_grad():
        outputs = run.batch_(inputs)
        assert torch.equal(outputs, model(inputs))
    assert not outputs.requires_grad


@pytest.mark.filterwarnings("ignore::pinfeed.compat.infinitybatch.InfinityBatchWarning")
def test_a_weight_changed_before_the_backward_pass_is_refused() -> None:
    model, run, inputs = chunked_run()
    outputs = run.batch_(inputs)
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"parameters \(weight\) have changed since the forward"):
        outputs.sum().backward()


@pytest.mark.filterwarnings("ignore::pinfeed.compat.infinitybatch.InfinityBatchWarning")
def test_the_number_of_epochs_is_checked() -> None:
    _, run, _ = chunked_run()
    for n in (2.5, -1):
        with pytest.raises(pinfeed.errors.ArgumentError, match="num_epochs"):
            run(n)
