"""wrap_loader: the batches of a DataLoader on the device, its attributes and statistics."""

import collections
import multiprocessing
import time
import typing
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.loaders import (
    DEPTHS,
    DEVICES,
    SIZE,
    STARTS,
    N,
    Numbers,
    Sample,
    Stream,
    all_same,
    queues_closed,
    starts,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    TensorDataset,
)

from pinfeed import errors, wrap_loader
from pinfeed.tensors.numpy_torch import NUMPY

__all__ = ["queues_closed"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Any:
    return DEVICES[request.param]()


class Pair(typing.NamedTuple):
    image: Any
    label: Any


class SizedStream(Stream):
    def __len__(self) -> int:
        return N


def structured(x: float) -> dict[str, Any]:
    return {
        "pair": Pair(torch.full((2, 3), x), int(x)),
        "name": f"sample {x}",
        "more": [(torch.tensor([x]), x)],
    }


def as_sample(samples: list[Any]) -> Sample:
    return Sample(
        torch.stack(samples), {"n": len(samples), "names": [str(sample) for sample in samples]}
    )


LOADERS: dict[str, Callable[[], Any]] = {
    "tensors": lambda: DataLoader(
        TensorDataset(torch.arange(N * 6.0).reshape(N, 2, 3), torch.arange(N)), batch_size=SIZE
    ),
    "structured": lambda: DataLoader(Numbers(structured), batch_size=SIZE),
    "dataclasses": lambda: DataLoader(Numbers(), batch_size=SIZE, collate_fn=as_sample),
    "drop_last": lambda: DataLoader(Numbers(), batch_size=SIZE, drop_last=True),
    "batch_sampler": lambda: DataLoader(Numbers(), batch_sampler=[[3, 1], [2], [9, 8, 7, 6, 5, 4]]),
    "samples": lambda: DataLoader(Numbers(structured), batch_size=None),
    "iterable": lambda: DataLoader(Stream(structured), batch_size=SIZE),
    "iterable samples": lambda: DataLoader(Stream(), batch_size=None),
    "iterable with a length": lambda: DataLoader(SizedStream(), batch_size=SIZE),
    "a list": lambda: [torch.ones(2, 3), {"x": torch.zeros(1)}, None, "text", 5],
}


# ---- the same batches ----------------------------------------------------------------------------


@pytest.mark.sweep(4)
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_the_same_batches(make: Callable[[], Any], device: Any, depth: int) -> None:
    wanted = list(make())
    with wrap_loader(make(), device=device, depth=depth) as loader:
        for _ in range(2):
            assert all_same(loader, wanted)


@pytest.mark.parametrize(
    "dataset", [Numbers(structured), Stream(structured)], ids=["map", "iterable"]
)
def test_workers(dataset: Any, device: Any) -> None:
    bare = DataLoader(dataset, batch_size=2, num_workers=2)
    assert all_same(wrap_loader(bare, device=device), bare)
    assert not multiprocessing.active_children()


def test_persistent_workers() -> None:
    bare = DataLoader(Numbers(), batch_size=SIZE, num_workers=2, persistent_workers=True)
    with wrap_loader(bare, device="cpu") as loader:
        workers = set()
        for last in (12, 4, 12):
            # The second epoch ends early, by break.
            for batch in loader:
                workers.add(tuple(process.pid for process in multiprocessing.active_children()))
                if batch[0] == last:
                    break
            assert batch[0] == last
        assert len(workers) == 1
    # The loader is the user's, and still works after the feeder was closed.
    assert starts(bare) == STARTS


@pytest.mark.parametrize("depth", [0, 2])
def test_an_empty_loader(device: Any, depth: int) -> None:
    for bare in (
        DataLoader(TensorDataset(torch.empty(0, 3)), batch_size=2),
        DataLoader(Numbers(), batch_size=20, drop_last=True),
        [],
    ):
        loader = wrap_loader(bare, device=device, depth=depth)
        assert len(loader) == 0
        for _ in range(2):
            assert list(loader) == []
        assert loader.stats.batches == 0


@pytest.mark.parametrize("dtype", NUMPY, ids=str)
def test_dtypes(dtype: torch.dtype, device: Any) -> None:
    batches = [
        torch.randint(0, 2, shape).to(dtype) for shape in [(3, 2), (), (0, 4), (5, 2), (2, 3, 1)]
    ]
    for got, wanted in zip(wrap_loader(batches, device=device), batches, strict=True):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert got.tolist() == wanted.tolist()


def test_tensors_in_any_layout_of_memory(device: Any) -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    views = [
        x.mT,
        x[:, ::2],
        x.expand(2, 2, 3, 4),
        x.flip(0),
        (x + 1j * x).conj(),
        (x + 1j * x).conj().imag,
        x[1:, 1:],
        x.permute(2, 0, 1),
    ]
    assert all_same(wrap_loader(views, device=device), views)


class Tagged(torch.Tensor):
    """A tensor subclass of a user."""


def special_tensors() -> list[Any]:
    x, ragged = torch.eye(4), [torch.ones(3), torch.ones(1)]
    with warnings.catch_warnings():
        # torch warns that some of these layouts are new.
        warnings.simplefilter("ignore")
        return [
            x.to_sparse(),
            x.to_sparse_csr(),
            x.as_subclass(Tagged),
            torch.nn.Parameter(x),
            x.clone().requires_grad_(),
            # This is a named tuple of torch.
            torch.max(x, dim=1),
            torch.nn.utils.rnn.pack_sequence(ragged),
            torch.nested.nested_tensor(ragged),
            torch.nested.nested_tensor(ragged, layout=torch.jagged),
        ]


def test_special_tensors(device: Any) -> None:
    for value in special_tensors():
        for batch in wrap_loader([{"x": value}], device=device):
            got = batch["x"]
            assert type(got) is type(value)
            assert repr(got) == repr(value)
            assert getattr(got, "requires_grad", False) == getattr(value, "requires_grad", False)


@pytest.mark.parametrize(
    "leaf",
    ["text", b"bytes", None, 7, 2.5, np.arange(3), np.float32(1), {1, 2}, collections.deque([1])],
    ids=repr,
)
def test_other_leaves_pass_through(leaf: Any, device: Any) -> None:
    for x, rest in wrap_loader([(torch.ones(2), {"leaf": [leaf]})], device=device):
        assert x.tolist() == [1, 1]
        assert rest["leaf"][0] is leaf


class Graph:
    """An object with a method ``to``."""

    def __init__(self) -> None:
        self.moved_to: list[Any] = []

    def to(self, device: Any) -> "Graph":
        self.moved_to.append(torch.device(device))
        return self


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "staged",
    ],
)
def test_objects_that_move_themselves(name: str) -> None:
    graph = Graph()
    ((got, x),) = wrap_loader([(graph, torch.ones(1))], device=DEVICES[name]())
    assert got is graph
    assert graph.moved_to == [torch.device("cpu")]
    assert x == 1


def test_kept_batches_stay_valid(device: Any) -> None:
    dataset = TensorDataset(torch.arange(200.0).reshape(100, 2))
    kept = list(wrap_loader(DataLoader(dataset, batch_size=5), device=device, depth=1))
    assert torch.equal(torch.cat([x for (x,) in kept]), dataset.tensors[0])
    # A batch belongs to the user: changing it changes no other batch and no data set.
    kept[3][0].zero_()
    assert torch.equal(kept[4][0], dataset.tensors[0][20:25])
    assert torch.equal(dataset.tensors[0][15], torch.tensor([30.0, 31.0]))


def test_a_loaders_own_containers_stay_as_they_are(device: Any) -> None:
    batch = {"x": [torch.ones(2)], "y": torch.zeros(2)}
    x = batch["x"][0]
    (got,) = wrap_loader([batch], device=device)
    got["x"].append(got.pop("y"))
    assert list(batch) == ["x", "y"]
    assert len(batch["x"]) == 1
    assert batch["x"][0] is x


@pytest.mark.parametrize("batch", [[torch.ones(2)], {0: torch.ones(2)}], ids=["list", "dict"])
def test_flat_containers_stay_as_they_are(batch: Any, device: Any) -> None:
    (got,) = wrap_loader([batch], device=device)
    got.pop(0)
    assert len(batch) == 1


def test_tensors_elsewhere_are_moved_to_the_cpu() -> None:
    # A tensor without values cannot be moved.
    with pytest.raises(NotImplementedError, match="meta"):
        list(wrap_loader([[torch.zeros(2, device="meta")]], device="cpu"))


@pytest.mark.parametrize("make", [lambda x: x, lambda x: [x], lambda x: [[x]]])
def test_only_the_training_step_keeps_a_batch(make: Callable[[Any], Any]) -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    def collate(values: Any) -> Any:
        x = torch.tensor(values)
        kept.append(weakref.ref(x))
        return make(x)

    for batch in wrap_loader(DataLoader(range(2), collate_fn=collate), device="cpu", depth=0):
        del batch
        assert kept.pop()() is None


# ---- attributes and length -----------------------------------------------------------------------


def test_attributes_are_the_loaders() -> None:
    bare = DataLoader(Numbers(), batch_size=SIZE, drop_last=True)
    loader = wrap_loader(bare, device="cpu")
    assert len(loader) == len(bare) == 3
    assert loader.dataset is bare.dataset
    assert loader.batch_sampler is bare.batch_sampler
    assert (loader.batch_size, loader.drop_last, loader.num_workers) == (SIZE, True, 0)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = loader.no_such_thing
    # The loader itself says what cannot be changed.
    with pytest.raises(ValueError, match="batch_size attribute should not be set after"):
        loader.batch_size = 7
    with pytest.raises(ValueError, match="dataset attribute should not be set after"):
        loader.dataset = []
    with pytest.raises(AttributeError):
        loader.plan = None  # type: ignore[misc,assignment]
    loader.timeout = 3
    loader.my_name = "mine"
    assert (bare.timeout, loader.my_name, hasattr(bare, "my_name")) == (3, "mine", False)


def test_an_unknown_length() -> None:
    loader = wrap_loader(DataLoader(Stream(), batch_size=SIZE), device="cpu")
    with pytest.raises(TypeError):
        len(loader)
    assert len(list(loader)) == len(STARTS)
    assert len(wrap_loader(DataLoader(SizedStream(), batch_size=SIZE), device="cpu")) == len(STARTS)


def test_attributes_that_are_not_the_loaders() -> None:
    class Saving(DataLoader[Any]):
        def state_dict(self) -> dict[str, Any]:
            return {}

        _private = 1

    loader = wrap_loader(Saving(Numbers()), device="cpu")
    assert not hasattr(loader, "_private")
    with pytest.raises(
        AttributeError, match="Saving has no state_dict, so the loop cannot be resumed"
    ):
        loader.state_dict()


class Epochs(Numbers):
    """Data set that records the epochs that it is set to."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[int] = []

    def set_epoch(self, number: int) -> None:
        self.told.append(number)


def test_set_epoch_reaches_samplers_and_the_dataset_once() -> None:
    dataset = Epochs()
    sampler = Epochs()
    batch_sampler = Epochs()
    batch_sampler.sampler = sampler  # type: ignore[attr-defined]
    for bare, told in (
        (DataLoader(dataset, sampler=sampler), [dataset, sampler]),
        (DataLoader(dataset, sampler=sampler, batch_size=None), [dataset, sampler]),
        (DataLoader(dataset, batch_sampler=BatchSampler(sampler, 2, False)), [dataset, sampler]),
        (DataLoader(dataset, batch_sampler=batch_sampler), [dataset, sampler, batch_sampler]),
    ):
        wrap_loader(bare, device="cpu").set_epoch(3)
        for target in told:
            assert target.told == [3]
            target.told.clear()


def test_set_epoch_shuffles_anew() -> None:
    def make() -> Any:
        return DataLoader(
            Numbers(),
            batch_size=2,
            sampler=DistributedSampler(range(N), num_replicas=2, rank=1, shuffle=True),
        )

    bare, loader = make(), wrap_loader(make(), device="cpu")
    epochs = []
    for epoch in (0, 1, 5):
        bare.sampler.set_epoch(epoch)
        loader.set_epoch(epoch)
        epochs.append(torch.cat(list(loader)).tolist())
        assert epochs[-1] == torch.cat(list(bare)).tolist()
    assert epochs[0] != epochs[1] != epochs[2]


def test_set_epoch_of_a_loader_without_set_epoch_changes_nothing() -> None:
    """Loops that work with any sampler call it in every epoch."""
    batches = [torch.ones(2), torch.zeros(2)]
    with wrap_loader(batches, device="cpu") as loader:
        loader.set_epoch(3)
        assert all_same(loader, batches)


def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    for dataset, wanted in ((Numbers(), "4/4"), (Stream(), "4batch")):
        assert (
            starts(wrap_loader(DataLoader(dataset, batch_size=SIZE), device="cpu", progress=True))
            == STARTS
        )
        assert wanted in capsys.readouterr().err
    list(wrap_loader(DataLoader(Numbers()), device="cpu"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("depth", [0, 2])
def test_stats_count_batches_that_the_loop_received(device: Any, depth: int) -> None:
    data = TensorDataset(torch.zeros(N, 3), torch.zeros(N, dtype=torch.int64))
    loader = wrap_loader(DataLoader(data, batch_size=SIZE), device=device, depth=depth)
    list(loader)
    assert (loader.stats.batches, loader.stats.rows, loader.stats.bytes) == (4, N, N * 20)
    for _ in loader:
        break
    assert (loader.stats.batches, loader.stats.rows, loader.stats.bytes) == (
        5,
        N + SIZE,
        (N + SIZE) * 20,
    )
    assert loader.stats.seconds >= loader.stats.wait_s > 0


def test_stats_count_the_time_of_the_loader() -> None:
    def batches() -> Iterator[torch.Tensor]:
        time.sleep(0.02)
        yield torch.ones(2)

    loader = wrap_loader(batches(), device="cpu")
    list(loader)
    assert loader.stats.read_s >= loader.stats.source_s >= 0.02


def test_stats_count_the_bytes_of_tensors() -> None:
    batch = (
        torch.zeros(3, 4).t(),
        torch.nn.Parameter(torch.zeros(2)),
        torch.nested.nested_tensor([torch.zeros(1)]),
        # The bytes of these leaves are unknown.
        torch.eye(3).to_sparse(),
        collections.UserString("moves"),
    )
    batch[-1].__dict__["to"] = lambda device: "moved"
    loader = wrap_loader([batch], device="cpu")
    assert next(iter(loader))[-1] == "moved"
    assert loader.stats.bytes == 48 + 8 + 4


@pytest.mark.parametrize(
    ("batch", "n"),
    [
        (torch.ones(3, 2), 3),
        (["a", torch.tensor(1.0), np.zeros((2, 5))], 2),
        ([torch.tensor(1.0), torch.zeros(2, 5)], 2),
        ((torch.zeros(0, 2), torch.zeros(3)), 0),
        (torch.tensor(1.0), 1),
        ("text", 1),
        ({}, 1),
    ],
)
def test_stats_count_samples(batch: Any, n: int) -> None:
    loader = wrap_loader([batch], device="cpu")
    list(loader)
    assert loader.stats.rows == n


def test_timeline(device: Any) -> None:
    loader = wrap_loader(DataLoader(Numbers(), batch_size=SIZE), device=device, timeline=True)
    list(loader)
    lanes = collections.Counter(span.lane for span in loader.timeline.spans)
    assert (lanes["read"], lanes["wait"], lanes["compute"], lanes["copy"]) == (
        4,
        4,
        4,
        0 if device == "cpu" else 4,
    )
    with pytest.raises(errors.ArgumentError, match="timeline=True"):
        _ = wrap_loader([], device="cpu").timeline


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(errors.ArgumentError, match="depth"):
        wrap_loader([], depth=-1)
    with pytest.raises(
        errors.ArgumentError, match="loader is 3, and it cannot be iterated; expected a DataLoader"
    ):
        wrap_loader(3)
    with pytest.raises(errors.DeviceError, match="'tpu'"):
        wrap_loader([], device="tpu")


def test_an_iterator_gives_its_batches_once() -> None:
    loader = wrap_loader(iter([torch.ones(2), torch.zeros(2)]), device="cpu")
    assert len(list(loader)) == 2
    with pytest.raises(errors.ArgumentError, match="yields its batches only once"):
        iter(loader)


def test_a_path_is_no_loader() -> None:
    with pytest.raises(errors.ArgumentError, match="cannot be iterated"):
        wrap_loader("x.npy", device="cpu")
