"""wrap_loader of a loader with a state: the states are those of the synchronous loop."""

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torchdata.nodes
from support.loaders import queues_closed, same
from torch.distributed.checkpoint.stateful import Stateful as CheckpointStateful
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.stateful import Stateful

from pinfeed import ArgumentError, Feeder, wrap_loader, wrap_readers

__all__ = ["queues_closed"]
# StatefulDataLoader calls the deprecated function.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
N = 14
SIZE = 4
N_BATCHES = 4


class Counting(IterableDataset[int]):
    """Numbers 0 to 13, split among the workers; its state is an object that it keeps changing."""

    def __init__(self) -> None:
        self.live = {"done": [0]}

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        while (number := first + step * self.live["done"][0]) < N:
            self.live["done"][0] += 1
            yield number
        self.live["done"][0] = 0

    def state_dict(self) -> dict[str, Any]:
        info = torch.utils.data.get_worker_info()
        # With worker processes, torchdata itself needs a copy.
        return self.live if info is None else {"done": list(self.live["done"])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.live = {"done": list(state["done"])}


class Plain(IterableDataset[int]):
    """The same numbers, without a state."""

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        yield from range(N) if info is None else range(info.id, N, info.num_workers)


def shuffled(n_workers: int) -> Any:
    torch.manual_seed(7)
    return StatefulDataLoader(range(N), batch_size=SIZE, shuffle=True, num_workers=n_workers)


def sampled(n_workers: int) -> Any:
    sampler = torch.utils.data.DistributedSampler(range(2 * N), num_replicas=2, rank=1)
    torch.manual_seed(7)
    return StatefulDataLoader(range(2 * N), batch_size=SIZE, sampler=sampler, num_workers=n_workers)


def counting(n_workers: int) -> Any:
    torch.manual_seed(7)
    return StatefulDataLoader(Counting(), batch_size=SIZE, num_workers=n_workers)


def seldom(n_workers: int) -> Any:
    torch.manual_seed(7)
    return StatefulDataLoader(
        range(N), batch_size=SIZE, shuffle=True, num_workers=n_workers, snapshot_every_n_steps=3
    )


def plain(n_workers: int) -> Any:
    torch.manual_seed(7)
    return StatefulDataLoader(Plain(), batch_size=SIZE, num_workers=n_workers)


def nodes(n_workers: int) -> Any:
    numbers = torchdata.nodes.SamplerWrapper(range(N))  # type: ignore[arg-type]
    batched: Any = torchdata.nodes.Batcher(numbers, batch_size=SIZE, drop_last=False)
    return torchdata.nodes.Loader(
        torchdata.nodes.Mapper(batched, torch.tensor), restart_on_stop_iteration=True
    )


def noted(loader: Any, n_epochs: int) -> list[tuple[Any, Any]]:
    """Return each batch with the state in its training step, and None with the state at an end."""
    found: list[tuple[Any, Any]] = []
    for _ in range(n_epochs):
        found += [(batch, copy.deepcopy(loader.state_dict())) for batch in loader]
        found.append((None, copy.deepcopy(loader.state_dict())))
    return found


CASES: list[tuple[Callable[[int], Any], int]] = [
    (shuffled, 0),
    (sampled, 0),
    (counting, 0),
    (plain, 0),
    (nodes, 0),
    (shuffled, 2),
    (counting, 2),
    (seldom, 2),
]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("make", "n_workers"), CASES, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_states_are_those_of_the_synchronous_loop(
    make: Callable[[int], Any], n_workers: int
) -> None:
    """They are equal at every batch and end of two epochs, at any depth; each resumes the other."""
    bare = noted(make(n_workers), 2)
    for depth in (0, 1, 3) if n_workers == 0 else (3,):
        found = noted(wrap_loader(make(n_workers), device="cpu", depth=depth), 2)
        assert same([list(one) for one in found], [list(one) for one in bare])
    # Worker processes take time to start, so only one position is tried with them.
    for i in range(len(bare)) if n_workers == 0 else (6,):
        state = bare[i][1]
        want = rest_of(make(n_workers), state)
        assert same(rest_of(wrap_loader(make(n_workers), device="cpu", depth=3), state), want)
        if bare[i][0] is not None and make is not nodes:
            # At the end of an epoch, the state has no remaining batch. Nodes are at the next epoch
            # after the last batch already.
            n = next(n for n, (batch, _) in enumerate(bare[i + 1 :]) if batch is None)
            assert same(want, [batch for batch, _ in bare[i + 1 : i + 1 + n]])


def rest_of(loader: Any, state: Any) -> list[Any]:
    loader.load_state_dict(state)
    return list(loader)


@pytest.mark.parametrize(("n_workers", "depth"), [(0, 0), (0, 1), (0, 3), (2, 3)])
def test_an_epoch_is_resumed_twice(n_workers: int, depth: int) -> None:
    """The loop is left after one batch, and again after the next, then continues to the next epoch.

    Prefetched batches are lost both times.
    """
    bare = shuffled(n_workers)
    want = [batch for _ in range(2) for batch in bare]
    got: list[Any] = []
    state = None
    for n in (1, 1, 2):
        loader = wrap_loader(shuffled(n_workers), device="cpu", depth=depth)
        if state is not None:
            loader.load_state_dict(state)
        for _, batch in zip(range(n), loader, strict=False):
            got.append(batch)
            state = loader.state_dict()
    # The first epoch is complete, so this loop is the second.
    got += list(loader)
    assert same(got, want)


def test_a_loaded_state_restores_the_position_of_a_left_loop() -> None:
    """A state that is loaded into the same feeder restores its position."""
    loader = wrap_loader(shuffled(0), device="cpu", depth=3)
    want = list(shuffled(0))
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    batches.close()  # type: ignore[attr-defined]
    assert same(loader.state_dict(), state)
    loader.load_state_dict(state)
    assert same(list(loader), want[2:])


def test_a_state_that_the_loader_keeps_changing() -> None:
    """The state is that of the received batch, although later batches were prefetched."""

    class Live:
        def __init__(self) -> None:
            self.state = {"done": [0]}
            self.asked = [threading.Event() for _ in range(N_BATCHES)]

        def __iter__(self) -> Iterator[Any]:
            for i in range(N_BATCHES):
                self.state["done"][0] = i + 1
                yield torch.tensor([i])
                # The reader has asked for the next batch.
                self.asked[i].set()

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    live = Live()
    for i, _ in enumerate(loader := wrap_loader(live, device="cpu", depth=2)):
        assert live.asked[min(i + 1, N_BATCHES - 1)].wait(timeout=30)
        assert loader.state_dict() == {"done": [i + 1]}


def test_after_an_error_the_state_is_that_of_the_last_good_batch() -> None:
    class Failing:
        def __len__(self) -> int:
            return N

        def __getitem__(self, i: int) -> int:
            if i == 9 and not mended:
                raise OSError("sector 9")
            return i

    mended: list[bool] = []

    def make() -> Any:
        return wrap_loader(StatefulDataLoader(Failing(), batch_size=SIZE), device="cpu", depth=3)  # type: ignore[arg-type]

    loader, got = make(), []
    with pytest.raises(OSError, match="sector 9"):
        for batch in loader:
            got += batch.tolist()
    state = loader.state_dict()
    mended.append(True)
    loader = make()
    loader.load_state_dict(state)
    assert got + torch.cat(list(loader)).tolist() == list(range(N))


def test_an_error_of_the_loaders_state_is_raised_on_request() -> None:
    """A loop whose state is never requested continues."""

    class Unready(DataLoader[int]):
        def state_dict(self) -> dict[str, Any]:
            raise LookupError("not configured")

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    loader = wrap_loader(Unready(range(N), batch_size=SIZE), device="cpu")  # type: ignore[arg-type]
    assert len(list(loader)) == N_BATCHES
    for _ in loader:
        with pytest.raises(LookupError, match="not configured"):
            loader.state_dict()
    with pytest.raises(LookupError, match="not configured"):
        loader.state_dict()


def test_the_state_is_taken_by_the_reader() -> None:
    """The reader thread saves the state once for each batch; the consumer thread does not."""
    threads: list[str] = []

    class Noting(StatefulDataLoader):  # type: ignore[type-arg]
        def state_dict(self) -> dict[str, Any]:
            threads.append(threading.current_thread().name.split("_")[0])
            return super().state_dict()

    for batch in wrap_loader(Noting(range(N), batch_size=SIZE), depth=2, device="cpu"):
        assert len(batch)
    assert threads == ["MainThread"] + ["pinfeed-read"] * N_BATCHES


# ---- where a StatefulDataLoader would be ---------------------------------------------------------


def readers() -> Any:
    return wrap_readers(
        range(8),
        range(8),
        read_input=lambda i: [i],
        get_output=lambda i: [i],
        batch_size=2,
        one_read_count=1,
        device="cpu",
    )


FEEDERS: dict[str, Callable[[], Any]] = {
    "feeder": lambda: Feeder(torch.arange(N), batch_size=SIZE, shuffle=True, device="cpu"),
    "readers": readers,
    "loader": lambda: wrap_loader(shuffled(0), device="cpu"),
}


@pytest.mark.parametrize("make", FEEDERS.values(), ids=FEEDERS)
# torch warns that there is one process only.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_feeders_are_part_of_a_distributed_checkpoint(
    make: Callable[[], Any], tmp_path: Any
) -> None:
    with make() as feeder:
        assert isinstance(feeder, Stateful)
        assert isinstance(feeder, CheckpointStateful)
        batches = iter(feeder)
        next(batches)
        dcp.save({"data": feeder}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
        want = list(batches)
    with make() as feeder:
        dcp.load({"data": feeder}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
        assert same(list(feeder), want)


def test_a_loader_without_a_state_is_not_stateful() -> None:
    loader = wrap_loader(DataLoader(range(N)), device="cpu")  # type: ignore[arg-type]
    assert not isinstance(loader, Stateful)


def test_a_state_of_another_kind_of_feeder_is_refused() -> None:
    with make_feeder() as feeder, pytest.raises(ArgumentError, match="not a state of a feeder"):
        feeder.load_state_dict(wrap_loader(shuffled(0), device="cpu").state_dict())


def make_feeder() -> Feeder:
    return Feeder(torch.arange(N), batch_size=SIZE, device="cpu")
