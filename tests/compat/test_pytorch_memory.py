"""The programs of the README of "Pytorch Utilities" run, and memory stays flat."""

import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pinfeed import errors
from pinfeed.compat.pytorch_memory import (
    Config,
    Feeder,
    GiB,
    InspectNetwork,
    KiB,
    MiB,
    NotEnoughGPURam,
    generate_epoch,
    get_parameter_count,
    get_variable_count,
    multiply_epochs,
    round_to,
    summary_of_network,
)

pytestmark = pytest.mark.usefixtures("planned")


class Net(nn.Module):
    """A network like that of the README's example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=4)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.out = nn.Linear(8, 256)

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(self.pool(self.conv(x)).flatten(1))


class Small(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)


def small(**arguments: Any) -> Config:
    """Return the Config of a network that needs little memory."""
    defaults = {
        "cpu_memory_limit": GiB(1),
        "gpu_memory_limit": GiB(1),
        "input_shape": (2,),
        "output_shape": (),
        "model_class": Small,
        "total_sample_count": 10,
        "input_dtype": np.float32,
        "output_dtype": np.int64,
    }
    return Config(**{**defaults, **arguments})


def image(i: int) -> Iterator[np.ndarray]:
    yield np.full(2, i, np.float32)


def label(i: int) -> Iterator[int]:
    yield i


def feeder(n: int = 10, **arguments: Any) -> Feeder:
    config = arguments.pop("config", None) or small(preferred_batch_size=4, total_sample_count=n)
    defaults: dict[str, Any] = {"read_input": image, "get_output": label}
    return Feeder(config, range(n), range(n), **{**defaults, **arguments})


def labels(epoch: Any) -> list[list[int]]:
    return [y.tolist() for _, y in epoch]


def order_of(epoch: Any) -> list[int]:
    return [i for batch in labels(epoch) for i in batch]


# ---- the programs of the README ------------------------------------------------------------------

README: list[Callable[..., Any]] = [
    lambda config, *rest: Feeder(config, *rest).generate_epochs(epoch_count=3),
    lambda config, *rest: multiply_epochs(
        epoch_generator=generate_epoch(config, *rest), epoch_count=3
    ),
]


@pytest.mark.parametrize("make", README)
def test_the_programs_of_the_readme(make: Callable[..., Any]) -> None:
    config = Config(
        cpu_memory_limit=GiB(2),
        gpu_memory_limit=GiB(1.5),
        total_sample_count=8,
        input_shape=(3, 64, 64),
        output_shape=(256,),
        model_class=Net,
        input_dtype=np.float32,
        output_dtype=np.float32,
        one_read_count=2,
        preferred_batch_size=4,
    )
    model = Net()
    rng = np.random.default_rng(0)

    def read_input(identity: str) -> Iterator[np.ndarray]:
        sample = np.full((3, 64, 64), int(identity), np.float32)
        yield sample
        yield sample + rng.normal(0, 0.01, sample.shape)

    def get_output(identity: str) -> Iterator[np.ndarray]:
        for _ in range(2):
            yield np.full(256, int(identity), np.float32)

    def apply_on_batch(batch: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(list(batch), dtype=np.float32))

    names = [str(i) for i in range(8)]
    seen = []
    for epoch in make(config, names, names, read_input, get_output, apply_on_batch, apply_on_batch):
        means = []
        for x_batch, y_batch in epoch:
            y_pred = model.forward(x_batch)
            (y_batch - y_pred).square().mean().backward()
            assert x_batch.shape == (4, 3, 64, 64)
            assert torch.equal(x_batch.mean((1, 2, 3)).round(), y_batch[:, 0])
            means.append(x_batch.mean().item())
        seen.append(means)
    assert [len(means) for means in seen] == [4] * 3
    # Random variations differ from epoch to epoch.
    assert seen[0] != seen[1] != seen[2]


def test_the_names_of_the_first_readmes() -> None:
    inspector = InspectNetwork(Net(), (1, 3, 64, 64))
    assert inspector.get_parameter_count() == get_parameter_count(Net) == 2528
    assert inspector.get_intermediate_variable_count() == get_variable_count(Net, (1, 3, 64, 64))
    shapes: dict[str, Any] = {
        "total_sample_count": 8,
        "input_shape": (3, 64, 64),
        "output_shape": (256,),
    }
    config = Config(cpu_memory_limit=GiB(2), gpu_memory_limit=GiB(1.5), network=Net(), **shapes)
    assert config.parameter_count == 2528
    assert dataclasses.replace(config, total_sample_count=4).parameter_count == 2528
    with pytest.raises(
        errors.ArgumentError, match="model_class= and network= are two names of one argument"
    ):
        Config(
            cpu_memory_limit=GiB(2),
            gpu_memory_limit=GiB(1.5),
            network=Net(),
            model_class=Net,
            **shapes,
        )
    with pytest.raises(errors.ArgumentError, match="model_class=None: expected a torch module"):
        Config(cpu_memory_limit=GiB(2), gpu_memory_limit=GiB(1.5), **shapes)


def test_the_numbers_of_the_readme() -> None:
    config = Config(
        GiB(2), GiB(1.5), (1, 3, 1024, 1024), (1, 256), Net, 2048, np.float32, np.float32, 2, 16
    )
    assert config.parameter_count == 2528
    assert config.total_intermediate_variable_count == 1_049_104
    assert (config.input_item_size, config.input_size, config.output_size) == (4, 12_582_912, 1024)
    assert config.sample_size == 12_583_936
    assert (config.batch_size, config.sample_count_in_single_batch, config.batch_count) == (
        16,
        8,
        256,
    )
    assert config.sample_batch_memory_footprint == 16 * config.sample_size
    assert (config.allowed_sample_count, config.total_read_count, config.batch_count_in_memory) == (
        80,
        26,
        10,
    )
    used = config.model_memory_usage + config.batch_size * config.single_sample_memory_usage
    assert 0 <= config.budget.gpu_bytes - used < config.batch_size
    assert config.single_sample_memory_usage > config.sample_size + 4 * 8 * 256 * 256
    without = Config(
        GiB(2), GiB(1.5), (3, 1024, 1024), (256,), Net, 2048, np.float32, np.float32, 2
    )
    # The original gave 94, which left no memory for gradients and prefetched batches.
    assert config.batch_size < without.batch_size < 94
    assert without.batch_size % 2 == 0
    for given in (config, without):
        assert given.budget.gpu_bytes <= GiB(1.5)
        assert given.budget.cpu_bytes <= GiB(2)
        assert given.budget.fits


@pytest.mark.parametrize(
    ("one_read_count", "preferred", "batch_size"),
    [(2, 16, 16), (3, 16, 15), (4, 6, 4), (5, 4, 5), (1, 0, 10)],
)
def test_a_batch_is_a_multiple_of_what_is_read_at_once(
    one_read_count: int, preferred: int, batch_size: int
) -> None:
    assert (
        small(one_read_count=one_read_count, preferred_batch_size=preferred).batch_size
        == batch_size
    )


def test_the_limit_that_binds_decides() -> None:
    arguments: dict[str, Any] = {"input_shape": (2,), "total_sample_count": 10**9}
    by_gpu = small(gpu_memory_limit=MiB(96), cpu_memory_limit=GiB(64), **arguments)
    by_cpu = small(gpu_memory_limit=GiB(64), cpu_memory_limit=MiB(16), **arguments)
    assert MiB(92) < by_gpu.budget.gpu_bytes <= MiB(96)
    assert MiB(15.9) < by_cpu.budget.cpu_bytes <= MiB(16)
    both = small(gpu_memory_limit=MiB(96), cpu_memory_limit=MiB(16), **arguments)
    assert both.batch_size == min(by_gpu.batch_size, by_cpu.batch_size)
    synchronous = small(gpu_memory_limit=GiB(64), cpu_memory_limit=MiB(16), depth=0, **arguments)
    assert synchronous.batch_size > by_cpu.batch_size


def test_sizes() -> None:
    assert (KiB(), MiB(), GiB()) == (1 << 10, 1 << 20, 1 << 30)
    assert (GiB(1.5), MiB(0.3)) == (1_610_612_736, 314_572)
    assert (round_to(17, 5), round_to(4, 5)) == (15, 0)


# ---- memory of networks --------------------------------------------------------------------------


class Towers(nn.Module):
    """A network with parameters of its own, nested containers and several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(12))
        self.inner = nn.Sequential(
            nn.Sequential(nn.Linear(10, 10), nn.ReLU(inplace=True)), nn.Flatten()
        )
        self.rnn = nn.LSTM(10, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.rnn(self.inner(x)[:, None] * self.scale.sum())


def test_parameters_and_variables_are_counted_once() -> None:
    true = sum(p.numel() for p in Towers().parameters())
    assert get_parameter_count(Towers) == get_parameter_count(Towers()) == true
    assert (
        get_variable_count(Towers, (1, 10)) == get_variable_count(Towers, (10,)) == 2 * (10 + 3 * 3)
    )
    assert get_variable_count(lambda: nn.Sequential(nn.Embedding(5, 4)), (1, 7)) == 2 * 28
    layers = summary_of_network(Towers, (1, 10))
    assert [layer["layer_type_name"] for layer in layers] == [
        "Linear",
        "ReLU",
        "Sequential",
        "Flatten",
        "Sequential",
        "LSTM",
    ]
    assert [layer["parameter_count"] for layer in layers] == [110, 0, 110, 0, 110, true - 122]
    assert layers[-1]["input_shape"] == (1, 1, 10)
    assert layers[-1]["output_shape"] == ((1, 1, 3), (1, 1, 3), (1, 1, 3))


CONV = nn.Conv2d(1, 2, 3)
TAKEN = [
    (Net, (3, 32, 32), "float32", (3, 32, 32)),
    (Net, (1, 3, 32, 32), np.float64, (3, 32, 32)),
    (Net, (1, 3, 32, 32), torch.uint8, (3, 32, 32)),
    (CONV, (1, 28, 28), np.dtype("float32"), (1, 28, 28)),
    (CONV, (1, 1, 28, 28), float, (1, 28, 28)),
    (lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 5)), (1, 28, 28), "float16", (28, 28)),
    (lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), (1, 8), "float32", (8,)),
    (lambda: nn.Embedding(9, 4), (1, 5), "int64", (5,)),
    (lambda: nn.Embedding(9, 4), (5,), np.uint16, (5,)),
    (Towers, (10,), "float32", (10,)),
]


@pytest.mark.parametrize(("model", "shape", "dtype", "sample"), TAKEN)
def test_shapes_and_dtypes_that_networks_take(
    model: Any, shape: Any, dtype: Any, sample: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = small(
        model_class=model, input_shape=shape, input_dtype=dtype, preferred_batch_size=3, depth=0
    )
    assert config._format.sample_shape == sample
    assert config.batch_size == 3
    assert not caplog.records


def test_a_network_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()
    before = [p.detach().clone() for p in model.parameters()]
    config = small(
        model_class=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1, momentum=0.9),
        loss=lambda y, _: y.square().sum(),
    )
    assert config.parameter_count == 6
    assert config.budget.step.breakdown["optimizer state"]
    assert not model.training
    assert not model[1].training
    assert all(
        torch.equal(p, old) and p.grad is None
        for p, old in zip(model.parameters(), before, strict=True)
    )


def test_a_pair_of_inputs() -> None:
    model = nn.Bilinear(2, 3, 4)
    config = small(
        model_class=model,
        input_shape=((2,), (3,)),
        input_dtype=("float32", "float64"),
        output_shape=(4,),
    )
    assert config.sample_size == 8 + 24 + 32
    assert config.batch_size == 10


# ---- epochs --------------------------------------------------------------------------------------


def test_full_batches_of_a_feeder_and_all_of_generate_epoch() -> None:
    with pytest.raises(errors.ArgumentError, match="epoch_count=-1"):
        feeder().generate_epochs(-1)
    for epoch in feeder().generate_epochs(2):
        assert labels(epoch) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert labels(epoch) == []
    config = small(preferred_batch_size=4)
    assert labels(generate_epoch(config, range(10), range(10), image, label)) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]
    assert labels(generate_epoch(config, iter([]), iter([]), image, label)) == []


def test_many_batches() -> None:
    config = small(preferred_batch_size=1)
    assert (
        sum(map(len, labels(generate_epoch(config, range(1100), range(1100), image, label))))
        == 1100
    )


def test_batches_are_what_was_made_of_them() -> None:
    x, y = next(next(feeder().generate_epochs()))
    assert isinstance(x, np.ndarray)
    assert isinstance(y, np.ndarray)
    assert (x.dtype, y.dtype) == (np.float32, np.int64)
    assert torch.from_numpy(x).tolist() == [[i, i] for i in range(4)]
    made = []

    class Batch:
        """A batch that must not be inspected or moved."""

        def __init__(self, samples: Any) -> None:
            self.samples = list(samples)
            made.append(self)

        def to(self, device: Any) -> Any:
            raise AssertionError

    several = feeder(
        apply_on_input_batch=Batch,
        apply_on_output_batch=lambda samples: {"labels": torch.tensor(list(samples))},
    )
    for i, (x, y) in enumerate(next(several.generate_epochs())):
        assert x is made[i]
        assert x.samples[0].tolist() == [4 * i] * 2
        assert y["labels"].tolist() == list(range(4 * i, 4 * i + 4))


def test_tensors_on_a_device() -> None:
    for x, y in next(
        feeder(
            device="cpu", apply_on_output_batch=lambda samples: np.array(list(samples))
        ).generate_epochs()
    ):
        assert isinstance(x, torch.Tensor)
        assert isinstance(y, torch.Tensor)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, "bfloat16", torch.float16, np.float64, float, "torch.int32"]
)
def test_stacked_samples_have_the_dtype_of_the_config(dtype: Any) -> None:
    config = small(preferred_batch_size=4, input_dtype=dtype, model_class=lambda: nn.Linear(2, 2))
    x, _ = next(next(feeder(config=config).generate_epochs()))
    assert x.dtype.itemsize == config.input_item_size
    assert x.astype(np.float64).tolist() == [[i, i] for i in range(4)]


def test_memory_is_flat_over_epochs_and_every_epoch_is_read() -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    n_read = 0

    class Sample(np.ndarray):
        __hash__ = object.__hash__

    def read_input(i: int) -> Iterator[Any]:
        nonlocal n_read
        n_read += 1
        sample = np.full(2, n_read, np.float32).view(Sample)
        alive.add(sample)
        yield sample

    config = small(preferred_batch_size=4, total_sample_count=80)
    reading = feeder(80, config=config, read_input=read_input, apply_on_input_batch=list)
    most = n_batches = 0
    last = 0.0
    for epoch in reading.generate_epochs(epoch_count=5):
        for x, _ in epoch:
            # The samples were read after those of the previous batch, in this epoch, too.
            assert x[0][0] > last
            last = x[-1][0]
            n_batches += 1
            most = max(most, len(alive))
    assert n_batches == 100
    assert n_read == 400
    assert most <= 4 * (config.depth + 3)
    del x, epoch
    gc.collect()
    assert not alive


def test_batches_are_read_ahead_in_another_thread() -> None:
    threads, ahead = set(), threading.Event()

    def read_input(i: int) -> Iterator[Any]:
        threads.add(threading.current_thread())
        if i == 8:
            ahead.set()
        yield from image(i)

    config = small(preferred_batch_size=4, total_sample_count=12)
    for epoch in feeder(12, config=config, read_input=read_input).generate_epochs():
        next(epoch)
        # The third batch is read while the loop works on the first.
        assert ahead.wait(30)
        epoch.close()
    assert threading.main_thread() not in threads
    threads.clear()
    synchronous = small(preferred_batch_size=4, total_sample_count=12, depth=0)
    assert (
        len(labels(next(feeder(12, config=synchronous, read_input=read_input).generate_epochs())))
        == 3
    )
    assert threads == {threading.main_thread()}


def test_epochs_that_are_left_and_epochs_at_the_same_time() -> None:
    n_threads = threading.active_count()
    for epoch in feeder().generate_epochs(3):
        for _, y in epoch:
            assert y.tolist() == [0, 1, 2, 3]
            break
    del epoch
    assert threading.active_count() == n_threads
    first, second = feeder().generate_epochs(2)
    assert [(a.tolist(), b.tolist()) for (_, a), (_, b) in zip(first, second, strict=True)] == [
        ([0, 1, 2, 3],) * 2,
        ([4, 5, 6, 7],) * 2,
    ]


def test_shuffled_epochs() -> None:
    reading = feeder(shuffle=True, seed=3)
    first, second = (order_of(epoch) for epoch in reading.generate_epochs(2))
    (third,) = (order_of(epoch) for epoch in reading.generate_epochs())
    assert len({tuple(order) for order in (first, second, third)}) == 3
    assert [order_of(epoch) for epoch in feeder(shuffle=True, seed=3).generate_epochs(2)] == [
        first,
        second,
    ]


def test_epochs_that_can_be_multiplied() -> None:
    config = small(preferred_batch_size=4)
    epoch = generate_epoch(config, range(6), range(6), image, label)
    next(epoch)
    assert [labels(again) for again in multiply_epochs(epoch)] == [[[0, 1, 2, 3], [4, 5]]] * 2
    assert labels(epoch) == [[4, 5]]
    assert [list(again) for again in multiply_epochs([1, 2], epoch_count=3)] == [[1, 2]] * 3
    with pytest.raises(errors.ArgumentError, match="generator, which can be iterated only once"):
        multiply_epochs(pair for pair in epoch)


# ---- errors --------------------------------------------------------------------------------------


def test_limits_that_cannot_hold_a_read_are_refused_at_once() -> None:
    assert issubclass(NotEnoughGPURam, errors.NotEnoughGPUMemory)
    with pytest.raises(NotEnoughGPURam, match="gpu_memory_limit"):
        # The model alone exceeds the limit.
        small(model_class=lambda: nn.Linear(2, 10_000_000), gpu_memory_limit=MiB(64))
    with pytest.raises(NotEnoughGPURam, match=r"gpu_memory_limit is 5\.9 KiB"):
        small(gpu_memory_limit=6000, one_read_count=64)
    with pytest.raises(
        errors.NotEnoughCPUMemory, match=r"5 batches of .*; cpu_memory_limit is 4\.0 MiB"
    ):
        small(cpu_memory_limit=MiB(4), one_read_count=100_000)


def test_limits_may_be_text() -> None:
    assert small(cpu_memory_limit="512MiB").cpu_memory_limit == MiB(512)
    assert small(gpu_memory_limit=float(MiB(512))).gpu_memory_limit == MiB(512)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"model_class": nn.Linear}, "Linear cannot be called without arguments .*lambda: Linear"),
        ({"model_class": dict}, "returned a dict; expected a torch module"),
        ({"model_class": 3}, "expected a torch module"),
        ({"input_shape": (3,)}, "cannot be predicted"),
        ({"input_dtype": "floaty"}, "floaty"),
        ({"gpu_memory_limit": None}, "gpu_memory_limit=None: expected a whole number"),
        ({"cpu_memory_limit": 0}, "cpu_memory_limit=0: expected a whole number, at least 1"),
        ({"total_sample_count": 0}, "total_sample_count=0"),
        ({"one_read_count": 1.5}, "one_read_count=1.5"),
        ({"depth": -1}, "depth=-1"),
    ],
)
def test_invalid_configs_are_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises((errors.ArgumentError, errors.EstimateError), match=match):
        small(**arguments)


def test_invalid_readers_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    config = small(preferred_batch_size=4)
    with pytest.raises(
        errors.ArgumentError, match="3 identities; expected at least 4, one full batch"
    ):
        feeder(3, config=config)
    assert not caplog.records
    with pytest.raises(errors.ArgumentError, match="10 inputs and 9 outputs"):
        Feeder(config, range(10), range(9), image, label)
    with pytest.raises(errors.ArgumentError, match="apply_on_input_batch=3"):
        generate_epoch(config, range(10), range(10), image, label, 3)  # type: ignore[arg-type]
    with pytest.raises(
        errors.ArgumentError,
        match=r"outputs\[1\] = 1: got 4 samples; expected one_read_count=1|got more than 1",
    ):
        labels(next(feeder(get_output=lambda i: iter([i] * 4)).generate_epochs()))
    with pytest.raises(errors.ArgumentError, match="consumed 0 samples"):
        labels(next(feeder(apply_on_input_batch=lambda batch: batch).generate_epochs()))


def test_an_error_is_raised_in_place_of_its_batch() -> None:
    def read_input(i: int) -> Iterator[Any]:
        if i == 5:
            raise KeyError("file 5")
        yield from image(i)

    epoch = next(feeder(read_input=read_input).generate_epochs())
    assert next(epoch)[1].tolist() == [0, 1, 2, 3]
    with pytest.raises(KeyError, match="file 5"):
        next(epoch)
