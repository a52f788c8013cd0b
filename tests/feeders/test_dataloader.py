"""What a user of wrap_loader sees: the batches of a DataLoader, on the device."""

import collections
import dataclasses
import gc
import multiprocessing
import random
import re
import subprocess
import sys
import threading
import traceback
import typing
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from pinfeed import errors, wrap_loader
from pinfeed.devices.cpu import HostDevice
from pinfeed.tensors.numpy_torch import NUMPY

DEPTHS = [0, 1, 2, 5]
N, SIZE = 14, 4
STARTS = [0, 4, 8, 12]
"""First sample of each batch."""


class CopyingDevice(HostDevice):
    """The host, doing what a GPU does with the batches of a loader: tensors are copied, from staging or from where they are."""

    unified = False

    def __init__(self, *, direct: bool) -> None:
        super().__init__()
        self._direct = direct

    def adopt(self, part: Any, stream: Any) -> Any:
        value = part.host_value
        plain = (
            type(value) is torch.Tensor
            and value.layout is torch.strided
            and not value.is_nested
            and not value.requires_grad
        )
        return None if plain else value.to("cpu")

    def reaches(self, source: Any) -> bool:
        return self._direct


DEVICES: dict[str, Callable[[], Any]] = {
    "cpu": lambda: "cpu",
    "staged": lambda: CopyingDevice(direct=False),
    "direct": lambda: CopyingDevice(direct=True),
}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Any:
    return DEVICES[request.param]()


@pytest.fixture(autouse=True)
def queues_closed() -> Iterator[None]:
    """torch leaves it to the threads of its queues to close them, in their own time."""
    yield
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(timeout=10)


class Pair(typing.NamedTuple):
    image: Any
    label: Any


@dataclasses.dataclass(frozen=True)
class Sample:
    image: Any
    label: Any


class Numbers(Dataset[Any]):
    """0.0 … 13.0; ``make`` is what is said of each."""

    def __init__(self, make: Callable[[float], Any] = torch.tensor) -> None:
        self.make = make

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return self.make(float(i))


class Stream(IterableDataset[Any]):
    """The same, split among the workers."""

    def __init__(
        self, make: Callable[[float], Any] = torch.tensor, *, length: int | None = None
    ) -> None:
        self.make = make
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        for i in range(N) if info is None else range(info.id, N, info.num_workers):
            yield self.make(float(i))


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


def same(a: Any, b: Any) -> bool:
    """Whether two batches are of the same structure and equal, to the bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a.nan_to_num(), b.nan_to_num())
        )
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Sample):
        return same([a.image, a.label], [b.image, b.label])
    return bool(a == b)


def all_same(batches: Iterable[Any], others: Iterable[Any]) -> bool:
    return same(list(batches), list(others))


def starts(batches: Iterable[Any]) -> list[int]:
    """First sample of each batch of Numbers."""
    return [int(batch[0]) for batch in batches]


# ---- the same batches ----------------------------------------------------------------------------

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
            # The second epoch is left.
            for batch in loader:
                workers.add(tuple(process.pid for process in multiprocessing.active_children()))
                if batch[0] == last:
                    break
            assert batch[0] == last
        assert len(workers) == 1
    # It is the user's, and goes on.
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
    """A tensor subclass of a user's."""


def special_tensors() -> list[Any]:
    x, ragged = torch.eye(4), [torch.ones(3), torch.ones(1)]
    with warnings.catch_warnings():
        # torch calls some of them new.
        warnings.simplefilter("ignore")
        return [
            x.to_sparse(),
            x.to_sparse_csr(),
            x.as_subclass(Tagged),
            torch.nn.Parameter(x),
            x.clone().requires_grad_(),
            # A tuple of torch's own.
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
    """An object that moves itself."""

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
    # The user's own
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


# ---- randomness ----------------------------------------------------------------------------------


def noisy(x: float) -> torch.Tensor:
    return torch.rand(()) + x


def seeded(x: float) -> torch.Tensor:
    """Draws from generators that only a worker process has for itself."""
    return torch.tensor([x, torch.rand(()), random.random()])


def shuffling() -> Any:
    return DataLoader(Numbers(), batch_size=SIZE, shuffle=True)


RANDOM: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "shuffle": lambda wrap: wrap(shuffling()),
    "replacement": lambda wrap: wrap(
        DataLoader(Numbers(), sampler=RandomSampler(range(N), replacement=True, num_samples=9))
    ),
    "generator": lambda wrap: wrap(
        DataLoader(Numbers(), shuffle=True, generator=torch.Generator().manual_seed(5))
    ),
    "workers": lambda wrap: wrap(
        DataLoader(Numbers(seeded), batch_size=7, shuffle=True, num_workers=2)
    ),
    "two at a time": lambda wrap: Zipped(wrap(shuffling()), wrap(shuffling())),
}


class Zipped:
    def __init__(self, *loaders: Any) -> None:
        self.loaders = loaders

    def __iter__(self) -> Iterator[Any]:
        return zip(*self.loaders, strict=True)


def trained(loader: Any) -> list[Any]:
    """Three epochs of a loop that draws random numbers itself; the later ones are left."""
    torch.manual_seed(7)
    random.seed(7)
    log = []
    for _ in range(3):
        log.append(torch.rand(1))
        for i, batch in enumerate(loader):
            log += [batch, torch.rand(2), torch.nn.functional.dropout(torch.ones(8))]
            if len(log) > 12 and i == 1:
                break
    return log


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("make", RANDOM.values(), ids=RANDOM)
def test_random_numbers_are_those_of_the_loader_alone(
    make: Callable[[Callable[[Any], Any]], Any], depth: int
) -> None:
    wanted = trained(make(lambda loader: loader))
    assert same(
        trained(make(lambda loader: wrap_loader(loader, device="cpu", depth=depth))), wanted
    )


def test_an_iterator_draws_its_seed_when_it_is_made() -> None:
    def numbers(loader: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        iterator = iter(loader)
        return [torch.rand(3), *iterator, torch.rand(3)]

    assert same(numbers(wrap_loader(shuffling(), device="cpu")), numbers(shuffling()))


def test_a_dataset_that_draws_itself_is_reproduced_at_depth_0() -> None:
    """Ahead of the loop's body it cannot be; but no number is drawn twice, and without a body that draws it is the same."""
    bare = DataLoader(Numbers(noisy), batch_size=SIZE)
    assert same(trained(wrap_loader(bare, device="cpu", depth=0)), trained(bare))
    torch.manual_seed(1)
    wanted = list(bare)
    torch.manual_seed(1)
    assert all_same(wrap_loader(bare, device="cpu"), wanted)


class Witness:
    """A loader that notes which thread makes its iterator, and which asks for batches."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.seen.append(threading.current_thread().name)
        return self._batches()

    def _batches(self) -> Iterator[torch.Tensor]:
        self.seen.append(threading.current_thread().name)
        yield torch.ones(1)


@pytest.mark.parametrize(("depth", "reader"), [(0, "MainThread"), (2, "pinfeed-read_0")])
def test_a_loop_begins_in_the_callers_thread(depth: int, reader: str) -> None:
    bare = Witness()
    iterator = iter(wrap_loader(bare, device="cpu", depth=depth))
    assert bare.seen == ["MainThread"]
    assert list(iterator) == [1]
    assert bare.seen == ["MainThread", reader]


# ---- errors --------------------------------------------------------------------------------------


def broken(x: float) -> torch.Tensor:
    if x == 9:
        raise KeyError("number nine")
    return torch.tensor(x)


def stopping(x: float) -> torch.Tensor:
    return torch.tensor(x) if x != 9 else next(iter([]))


def exiting(x: float) -> torch.Tensor:
    return torch.tensor(x) if x != 9 else sys.exit(3)


def interrupted(x: float) -> torch.Tensor:
    if x == 9:
        raise KeyboardInterrupt
    return torch.tensor(x)


def stopping_collate(samples: list[Any]) -> torch.Tensor:
    return torch.stack([stopping(float(sample)) for sample in samples])


def until_error(loader: Any, kind: type[BaseException]) -> tuple[list[int], BaseException]:
    """First samples of the batches that came, and then the error.

    (pytest.raises would make a cycle of it and the loop's frames.)
    """
    got: list[int] = []
    try:
        got.extend(int(batch[0]) for batch in loader)  # one by one
    except kind as error:
        return got, error
    pytest.fail(f"a silent end after {got}")


def let_go(error: BaseException | None) -> None:
    """Empty its frames. torch raises a worker's error from a variable: a cycle that holds the workers until it is collected."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__


def frames(error: BaseException | None) -> list[str]:
    """Names of the functions that it came through."""
    assert error is not None
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("dataset", [Numbers(broken), Stream(broken)], ids=["map", "iterable"])
def test_errors_come_after_the_good_batches_with_their_traceback(dataset: Any, depth: int) -> None:
    loader = wrap_loader(DataLoader(dataset, batch_size=SIZE), device="cpu", depth=depth)
    for _ in range(2):
        # An error ends its loop, not the loader.
        got, error = until_error(loader, KeyError)
        assert got == [0, 4]
        assert error.args == ("number nine",)
        assert frames(error)[-1] == "broken"


def test_errors_of_workers_come_after_the_good_batches_with_their_traceback() -> None:
    got, error = until_error(
        wrap_loader(DataLoader(Numbers(broken), batch_size=SIZE, num_workers=2), device="cpu"),
        KeyError,
    )
    assert got == [0, 4]
    assert "in broken" in str(error)
    let_go(error)
    assert not multiprocessing.active_children()


SILENT: dict[str, tuple[Callable[[], Any], str]] = {
    "StopIteration": (lambda: DataLoader(Numbers(stopping), batch_size=SIZE), "stopping"),
    "StopIteration, no length": (
        lambda: DataLoader(Numbers(stopping), batch_sampler=BatchSampler(Endless(), SIZE, False)),
        "stopping",
    ),
    "StopIteration, collate": (
        lambda: DataLoader(Numbers(), batch_size=SIZE, collate_fn=stopping_collate),
        "stopping",
    ),
    "StopIteration, samples": (
        lambda: DataLoader(
            Numbers(lambda x: [stopping(x)]), sampler=range(0, N, 3), batch_size=None
        ),
        "stopping",
    ),
    "StopIteration, iterable": (lambda: DataLoader(Stream(stopping), batch_size=SIZE), "stopping"),
    "SystemExit": (lambda: DataLoader(Numbers(exiting), batch_size=SIZE), "exiting"),
    "SystemExit, iterable": (lambda: DataLoader(Stream(exiting), batch_size=SIZE), "exiting"),
}


class Endless:
    """A sampler without a length."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(N)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize(("make", "where"), SILENT.values(), ids=SILENT)
def test_what_would_end_the_loop_in_silence_is_an_error(
    make: Callable[[], Any], where: str, depth: int
) -> None:
    got, error = until_error(wrap_loader(make(), device="cpu", depth=depth), errors.WorkerError)
    assert got in ([0, 4], [0, 3, 6])
    raised = r"raised (StopIteration\(\)|SystemExit\(3\)), which would end the loop in silence"
    assert re.match(rf"{where} \(.*test_dataloader.py, line \d+\) {raised}", str(error))
    assert where in frames(error.__cause__)


@pytest.mark.parametrize("depth", [0, 2])
def test_stop_iteration_in_a_worker_is_an_error(depth: int) -> None:
    bare = DataLoader(Numbers(stopping), batch_size=SIZE, num_workers=2)
    got, error = until_error(wrap_loader(bare, device="cpu", depth=depth), errors.WorkerError)
    assert got == [0, 4]
    assert "in stopping" in str(error)
    let_go(error)
    assert not multiprocessing.active_children()


def test_system_exit_in_a_worker_is_an_error() -> None:
    """In a process of its own: torch's handler for the death of a worker raises wherever the main thread is."""
    program = """
        import sys
        from torch.utils.data import DataLoader
        from pinfeed import wrap_loader

        class Numbers:
            def __len__(self):
                return 8

            def __getitem__(self, i):
                return i if i != 5 else sys.exit(3)

        try:
            for batch in wrap_loader(DataLoader(Numbers(), batch_size=None, num_workers=1, timeout=1), device="cpu"):
                pass
        except Exception as error:
            print("an error:", error)
        else:
            print("silence")
        """
    run = subprocess.run(
        [sys.executable, "-c", "if True:" + program], capture_output=True, text=True, timeout=100
    )
    assert run.stdout.startswith("an error:"), run


@pytest.mark.parametrize("depth", [0, 2])
def test_an_interrupt_is_one(depth: int) -> None:
    got, _ = until_error(
        wrap_loader(DataLoader(Numbers(interrupted), batch_size=SIZE), device="cpu", depth=depth),
        KeyboardInterrupt,
    )
    assert got == [0, 4]


class Bounded:
    """A batch sampler whose length is an upper bound."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1], [4, 5])


class Protocol:
    """The same as an iterator of its own, which ends by raising StopIteration."""

    def __init__(self) -> None:
        self.batches = [[4, 5], [0, 1]]

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> "Protocol":
        return Protocol()

    def __next__(self) -> list[int]:
        return self.fetch()

    def fetch(self) -> list[int]:
        if not self.batches:
            raise StopIteration
        return self.batches.pop()


@pytest.mark.parametrize("sampler", [Bounded(), Protocol()], ids=["generator", "iterator"])
@pytest.mark.parametrize("n_workers", [0, 1])
def test_a_length_that_is_an_upper_bound_is_no_error(sampler: Any, n_workers: int) -> None:
    bare = DataLoader(Numbers(), batch_sampler=sampler, num_workers=n_workers)
    assert starts(wrap_loader(bare, device="cpu")) == [0, 4]


class Refusing:
    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        raise self.kind("no batches today")


def test_an_error_at_the_begin_is_raised_there() -> None:
    with wrap_loader(Refusing(KeyError), device="cpu") as loader:
        kept = []
        for _ in range(2):
            with pytest.raises(KeyError, match="no batches today") as caught:
                iter(loader)
            # As sys.last_exc is: no loop runs.
            kept.append(caught)
    for kind in (StopIteration, SystemExit):
        with pytest.raises(errors.WorkerError, match="no batches today"):
            iter(wrap_loader(Refusing(kind), device="cpu"))


class Batches:
    """An iterator that can be watched; its third batch is an error."""

    def __init__(self) -> None:
        self.n = 0

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> int:
        self.n += 1
        if self.n == 3:
            raise KeyError
        return self.n


class Watched:
    def __iter__(self) -> Iterator[int]:
        batches = Batches()
        self.last = weakref.ref(batches)
        return batches


@pytest.mark.parametrize("depth", [0, 2])
def test_nothing_holds_the_loaders_iterator_after_an_error(depth: int) -> None:
    """Its worker processes would live on until the next garbage collection, and be forked along into the next epoch's."""
    bare = Watched()
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(KeyError):
            list(wrap_loader(bare, device="cpu", depth=depth))
        assert bare.last() is None
    finally:
        gc.enable()


# ---- epochs, closing -----------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_loop_that_is_left_and_the_next_one(depth: int) -> None:
    loader = wrap_loader(DataLoader(Numbers(), batch_size=SIZE), device="cpu", depth=depth)
    for last in (0, 4, 12):
        for batch in loader:
            if batch[0] == last:
                break
        assert starts(loader) == STARTS


def test_workers_end_with_a_loop_that_is_left() -> None:
    loader = wrap_loader(DataLoader(Numbers(), batch_size=SIZE, num_workers=2), device="cpu")
    for _ in loader:
        break
    assert not multiprocessing.active_children()
    iterator = iter(loader)
    assert len(multiprocessing.active_children()) == 2
    del iterator
    # What was begun and never asked for a batch.
    loader.close()
    assert not multiprocessing.active_children()


def test_an_exception_in_the_body_leaves_nothing_behind() -> None:
    loader = wrap_loader(DataLoader(Numbers(), batch_size=SIZE), device="cpu")

    def train() -> None:
        for batch in loader:
            if batch[0] == 4:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert starts(loader) == STARTS


def test_two_loops_at_a_time() -> None:
    bare = DataLoader(Numbers(), batch_size=SIZE)
    with wrap_loader(bare, device="cpu") as loader:
        first = iter(loader)
        for _ in range(2):
            # Before it has given a batch, and after.
            with pytest.raises(errors.ClosedError, match="loop over this feeder is running"):
                iter(loader)
            next(first)
        assert starts(first) == [8, 12]
        assert starts(loader) == STARTS
        with wrap_loader(bare, device="cpu") as second:
            assert [(int(a[0]), int(b[0])) for a, b in zip(loader, second, strict=True)] == [
                (i, i) for i in STARTS
            ]


def test_after_close() -> None:
    loader = wrap_loader(DataLoader(Numbers(), batch_size=SIZE), device="cpu")
    iterator = iter(loader)
    batch = next(iterator)
    loader.close()
    loader.close()
    assert batch.tolist() == [0, 1, 2, 3]
    with pytest.raises(errors.ClosedError, match="closed"):
        iter(loader)
    with pytest.raises(errors.ClosedError):
        loader.set_epoch(1)
    with loader, pytest.raises(errors.ClosedError):
        iter(loader)
    assert list(iterator) == []


def test_a_device_that_was_given_stays_open() -> None:
    device = CopyingDevice(direct=False)
    for _ in range(2):
        with wrap_loader(DataLoader(Numbers(), batch_size=SIZE), device=device) as loader:
            assert starts(loader) == STARTS


class Worker(ThreadPoolExecutor):
    def __init__(self, joined_by: list[str]) -> None:
        super().__init__(1, "pinfeed-inner")
        self._joined_by = joined_by

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._joined_by.append(threading.current_thread().name)
        super().shutdown(wait, cancel_futures=cancel_futures)


class JoinedDevice(HostDevice):
    """Notes which threads join its workers."""

    def __init__(self) -> None:
        super().__init__()
        self.joined_by: list[str] = []

    def worker(self, name: str, n_threads: int = 1) -> Worker:
        return Worker(self.joined_by)


def test_a_wrapped_loader_is_a_loader() -> None:
    """The inner loop runs in the outer one's reader, and has ended when that has."""
    device = JoinedDevice()
    loader = wrap_loader(
        wrap_loader(DataLoader(Numbers(), batch_size=SIZE), device=device), device="cpu"
    )
    try:
        assert starts(loader) == STARTS
        assert device.joined_by == ["pinfeed-read_0"], "nothing was written: there is no writer"
    finally:
        for thread in threading.enumerate():
            if thread.name == "pinfeed-end":
                thread.join()


# ---- what it knows -------------------------------------------------------------------------------


def test_attributes_are_the_loaders() -> None:
    bare = DataLoader(Numbers(), batch_size=SIZE, drop_last=True)
    loader = wrap_loader(bare, device="cpu")
    assert len(loader) == len(bare) == 3
    assert loader.dataset is bare.dataset
    assert loader.batch_sampler is bare.batch_sampler
    assert (loader.batch_size, loader.drop_last, loader.num_workers) == (SIZE, True, 0)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = loader.no_such_thing


def test_a_length_that_nobody_knows() -> None:
    loader = wrap_loader(DataLoader(Stream(), batch_size=SIZE), device="cpu")
    with pytest.raises(TypeError):
        len(loader)
    assert len(list(loader)) == len(STARTS)
    assert len(wrap_loader(DataLoader(SizedStream(), batch_size=SIZE), device="cpu")) == len(STARTS)


def test_what_the_loader_must_not_answer_for_it() -> None:
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
    """Notes the epochs that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[int] = []

    def set_epoch(self, number: int) -> None:
        self.told.append(number)


def test_set_epoch_reaches_sampler_batch_sampler_and_dataset_once() -> None:
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


def test_set_epoch_of_a_loader_in_which_nobody_has_it_changes_nothing() -> None:
    """Loops for any sampler call it in every epoch."""
    batches = [torch.ones(2), torch.zeros(2)]
    with wrap_loader(batches, device="cpu") as loader:
        loader.set_epoch(3)
        assert all_same(loader, batches)


def test_set_epoch_in_the_loop_is_refused_and_reaches_nobody() -> None:
    dataset = Epochs()
    with wrap_loader(DataLoader(dataset), device="cpu") as loader:
        for _ in loader:
            with pytest.raises(errors.ClosedError, match="set_epoch"):
                loader.set_epoch(1)
            break
        loader.set_epoch(2)
    assert dataset.told == [2]


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
def test_stats_count_what_was_lent(device: Any, depth: int) -> None:
    data = TensorDataset(torch.zeros(N, 3), torch.zeros(N, dtype=torch.int64))
    loader = wrap_loader(DataLoader(data, batch_size=SIZE), device=device, depth=depth)
    moved = device != "cpu"
    list(loader)
    assert (loader.stats.batches, loader.stats.rows, loader.stats.bytes) == (4, N, N * 20 * moved)
    for _ in loader:
        break
    assert (loader.stats.batches, loader.stats.rows, loader.stats.bytes) == (
        5,
        N + SIZE,
        (N + SIZE) * 20 * moved,
    )
    assert loader.stats.seconds >= loader.stats.wait_s > 0


@pytest.mark.parametrize(
    ("batch", "n"),
    [
        (torch.ones(3, 2), 3),
        (["a", torch.tensor(1.0), np.zeros((2, 5))], 2),
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


def test_arguments() -> None:
    with pytest.raises(errors.ArgumentError, match="depth"):
        wrap_loader([], depth=-1)
    with pytest.raises(
        errors.ArgumentError, match="loader=3 cannot be iterated; expected a DataLoader"
    ):
        wrap_loader(3)
    with pytest.raises(errors.DeviceError, match="'tpu'"):
        wrap_loader([], device="tpu")


def test_an_iterator_gives_its_batches_once() -> None:
    loader = wrap_loader(iter([torch.ones(2), torch.zeros(2)]), device="cpu")
    assert len(list(loader)) == 2
    with pytest.raises(errors.ArgumentError, match="gives its batches once"):
        iter(loader)


def test_a_path_is_no_loader() -> None:
    with pytest.raises(errors.ArgumentError, match="cannot be iterated"):
        wrap_loader("x.npy", device="cpu")
