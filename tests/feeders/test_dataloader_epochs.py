"""The epochs of wrap_loader: random numbers, and how a loop ends."""

import multiprocessing
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.internals import runner_of
from support.loaders import (
    DEPTHS,
    DEVICES,
    SIZE,
    STARTS,
    CopyingDevice,
    N,
    Numbers,
    all_same,
    queues_closed,
    same,
    starts,
)
from torch.utils.data import (
    DataLoader,
    RandomSampler,
)

from pinfeed import errors, wrap_loader
from pinfeed.devices.cpu import HostDevice

__all__ = ["queues_closed"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Any:
    return DEVICES[request.param]()


def noisy(x: float) -> torch.Tensor:
    return torch.rand(()) + x


def seeded(x: float) -> torch.Tensor:
    """Return draws from generators that only worker processes have for themselves."""
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
    """Run three epochs of a loop that draws random numbers itself; leave the later ones early."""
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


# ---- randomness ----------------------------------------------------------------------------------


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
    """The training step draws numbers, too, which prefetched batches cannot take into account.

    No number is drawn twice, and without a step that draws, the numbers are the same.
    """
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


# ---- epochs, closing -----------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_next_loop_after_one_that_was_left(depth: int) -> None:
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
    # An iterator of the loader without a requested batch is ended, too.
    loader.close()
    assert not multiprocessing.active_children()


def test_an_exception_in_the_training_step_leaves_nothing_behind() -> None:
    loader = wrap_loader(DataLoader(Numbers(), batch_size=SIZE), device="cpu")

    def train() -> None:
        for batch in loader:
            if batch[0] == 4:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert starts(loader) == STARTS


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


def test_a_loop_without_threads_counts_its_batches() -> None:
    loader = wrap_loader([torch.ones(2)] * 3, device="cpu", depth=0)
    numbers = [runner_of(loader).state()["batch"] for _ in loader]
    assert numbers == [1, 2, 3]


def close_in_another_thread(feeder: Any) -> None:
    closer = threading.Thread(target=feeder.close)
    closer.start()
    closer.join()


def test_close_in_another_thread_ends_a_loop_without_threads() -> None:
    loader = wrap_loader([torch.ones(2)] * 3, device="cpu", depth=0)
    iterator = iter(loader)
    next(iterator)
    close_in_another_thread(loader)
    with pytest.raises(errors.ClosedError, match="another thread closed the feeder"):
        next(iterator)


def test_close_while_a_loop_without_threads_waits() -> None:
    def batches() -> Iterator[torch.Tensor]:
        yield torch.ones(2)
        close_in_another_thread(loader)
        yield torch.ones(2)
        yield torch.ones(2)

    loader = wrap_loader(batches(), device="cpu", depth=0)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    with pytest.raises(errors.ClosedError, match="was waiting for a batch"):
        next(iterator)


def test_a_fork_cannot_continue_a_loop_without_threads() -> None:
    iterator = iter(wrap_loader([torch.ones(2)] * 3, device="cpu", depth=0))
    next(iterator)
    child = os.fork()
    if not child:
        code = 1
        try:
            next(iterator)
        except errors.ClosedError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(iterator)) == 2


class MetaDevice(HostDevice):
    """Device of another name, on which batches have no values."""

    name = "meta"

    def adopt(self, part: Any, stream: Any) -> Any:
        return part.host_value.to(self.name)


def test_batches_are_moved_to_other_devices_in_host_memory() -> None:
    (batch,) = wrap_loader([torch.ones(2)], device=MetaDevice(), depth=0)
    assert batch.is_meta


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
    """Device that records which threads join its workers."""

    def __init__(self) -> None:
        super().__init__()
        self.joined_by: list[str] = []

    def worker(self, name: str, n_threads: int = 1) -> Worker:
        return Worker(self.joined_by)


def test_a_wrapped_loader_is_a_loader() -> None:
    """The inner loop runs in the outer one's reader, and has ended when that has."""
    device = JoinedDevice()
    inner = wrap_loader(DataLoader(Numbers(), batch_size=SIZE), depth=2, device=device)
    loader = wrap_loader(inner, depth=2, device="cpu")
    try:
        assert starts(loader) == STARTS
        assert device.joined_by == ["pinfeed-read_0"], "nothing was written: there is no writer"
    finally:
        for thread in threading.enumerate():
            if thread.name == "pinfeed-end":
                thread.join()
