"""wrap_loader while reader threads are ahead of the loop: generators and memory of the loader."""

import functools
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.loaders import Numbers, queues_closed, same
from torch.utils.data import DataLoader, RandomSampler, default_collate

from pinfeed import HostEmbedding, errors, read_rows, wrap_loader
from pinfeed.tensors.rng_state import GeneratorStates

__all__ = ["queues_closed"]

Wrap = Callable[[Any], Any]


class Shuffled(RandomSampler):
    """The sampler of ``shuffle=True``; it notes when it has drawn numbers at its end."""

    def __init__(self, seed: int = 1) -> None:
        self.generator_used = torch.Generator().manual_seed(seed)
        super().__init__(range(14), generator=self.generator_used)
        self.ended = threading.Event()

    def __iter__(self) -> Iterator[int]:
        self.ended.clear()
        yield from super().__iter__()
        self.ended.set()


class Noisy:
    """Adds noise from generators of numpy and Python to the batches of a DataLoader."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)
        self.old = np.random.RandomState(4)
        self.more = {"python": random.Random(5)}

    def __call__(self, samples: list[Any], by: float) -> Any:
        noise = self.rng.random() + self.old.rand() + self.more["python"].random()
        return default_collate(samples) + noise * by


def shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_size=4, sampler=Shuffled(), **options)


def noisy() -> DataLoader[Any]:
    return shuffled(collate_fn=functools.partial(Noisy(), by=2.0))


def left(loader: DataLoader[Any], wrapped: Any, n: int, *, is_ahead: bool) -> list[Any]:
    """Leave a loop after ``n`` batches, when the sampler was exhausted; return the next epochs."""
    for i, _ in enumerate(wrapped, start=1):
        if i == n:
            if is_ahead:
                assert loader.sampler.ended.wait(10)
            break
    return [*wrapped, *wrapped]


@pytest.mark.parametrize(
    ("make", "depth", "n"),
    [
        *itertools.product([shuffled, noisy], [1, 4], [1, 3, 4]),
        (functools.partial(shuffled, num_workers=1), 4, 1),
    ],
)
def test_the_epoch_after_a_break_is_that_of_the_loader_alone(
    make: Callable[[], Any], depth: int, n: int
) -> None:
    bare = make()
    wanted = left(bare, bare, n, is_ahead=False)
    loader = make()
    with wrap_loader(loader, device="cpu", depth=depth) as wrapped:
        assert same(left(loader, wrapped, n, is_ahead=depth == 4), wanted)


def test_the_epoch_after_a_break_with_threads() -> None:
    bare, loader = shuffled(), shuffled()
    wanted = left(bare, bare, 2, is_ahead=False)
    with wrap_loader(loader, device="cpu", depth=4, threads=2) as wrapped:
        assert same(left(loader, wrapped, 2, is_ahead=True), wanted)


@pytest.mark.parametrize(("inner", "outer"), [(0, 3), (3, 0), (1, 2), (2, 1)])
def test_the_epoch_after_a_break_of_a_loader_wrapped_twice(inner: int, outer: int) -> None:
    bare, loader = noisy(), noisy()
    wanted = [*left(bare, bare, 1, is_ahead=False), *bare]
    with (
        wrap_loader(loader, device="cpu", depth=inner) as wrapped,
        wrap_loader(wrapped, device="cpu", depth=outer) as twice,
    ):
        assert same([*left(loader, twice, 1, is_ahead=True), *wrapped], wanted)


def test_the_epoch_after_a_break_of_a_loop_over_tables() -> None:
    bare, loader = shuffled(), shuffled()
    table = HostEmbedding(14, 2, name="items", device_cache=64)
    wanted = left(bare, bare, 2, is_ahead=False)
    with read_rows(loader, {table: lambda x: x.long()}, depth=3, device="cpu") as wrapped:
        assert same(left(loader, wrapped, 2, is_ahead=True), wanted)


def test_an_error_of_a_batch_leaves_the_generators_at_this_batch() -> None:
    def failing(x: torch.Tensor) -> torch.Tensor:
        if len(seen) == 1:
            raise OSError("bad")
        seen.append(x)
        return x

    orders = []
    for depth in (0, 4):
        seen: list[torch.Tensor] = []
        loader = noisy()
        with wrap_loader(loader, device="cpu", depth=depth, host_transform=failing) as wrapped:
            with pytest.raises(OSError, match="bad"):
                list(wrapped)
            seen += seen
            orders.append(list(wrapped))
    assert same(*orders)


def drawn(n: int) -> torch.Tensor:
    """Return the state of a generator after ``n`` draws."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(n):
        torch.rand(1, generator=generator)
    return generator.get_state()


@pytest.mark.parametrize(("used_after", "n_draws"), [(None, 1), (1, 4), (2, 4), (3, 4)])
def test_draws_of_the_program_are_not_undone(used_after: int | None, n_draws: int) -> None:
    generator = torch.Generator().manual_seed(1)
    states = GeneratorStates(generator, n_kept=4, first=0)
    for i in range(1, 4):
        states.begin_batch()
        torch.rand(1, generator=generator)
        states.end_batch()
        if i == used_after:
            torch.rand(1, generator=generator)
    states.rewind(1)
    assert torch.equal(generator.get_state(), drawn(n_draws))


class Refilled:
    """A loader that fills ``n`` buffers in turn."""

    def __init__(self, fill: Callable[[torch.Tensor, float], Any], n: int = 1) -> None:
        self.fill = fill
        self.buffers = [torch.zeros(3) for _ in range(n)]

    def __iter__(self) -> Iterator[Any]:
        for i in range(8):
            buffer = self.buffers[i % len(self.buffers)]
            yield self.fill(buffer, i)


def by_torch(buffer: torch.Tensor, x: float) -> Any:
    return [buffer.fill_(x)]


def by_numpy(buffer: torch.Tensor, x: float) -> Any:
    buffer.numpy()[...] = x
    return {"x": buffer[:]}


def an_array(buffer: torch.Tensor, x: float) -> Any:
    array = buffer.numpy()
    array[...] = x
    return (x, {"y": array})


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("fill", [by_torch, by_numpy, an_array])
def test_memory_that_is_filled_again_is_refused(fill: Any, n: int) -> None:
    with wrap_loader(Refilled(fill, n), device="cpu", depth=3) as wrapped:
        kept = []
        with pytest.raises(errors.ArgumentError, match="Refilled has filled the memory") as caught:
            kept += wrapped
        assert "depth=0" in str(caught.value)


@pytest.mark.parametrize("fill", [by_torch, by_numpy, an_array])
def test_memory_filled_again_of_a_loader_wrapped_twice(fill: Any) -> None:
    # Two batches wait in each loop, and one is in the step.
    for n, is_enough in ((4, False), (5, True)):
        wrapped = wrap_loader(Refilled(fill, n), device="cpu", depth=2)
        with wrapped, wrap_loader(wrapped, device="cpu", depth=2) as twice:
            if is_enough:
                assert len(list(twice)) == 8
                continue
            with pytest.raises(errors.ArgumentError, match="Refilled has filled the memory"):
                list(twice)


@pytest.mark.parametrize("fill", [by_torch, by_numpy, an_array])
def test_memory_that_is_filled_again_after_many_batches(fill: Any) -> None:
    loader = Refilled(fill, 8)
    # The buffers of later batches are one buffer.
    loader.buffers[6:] = loader.buffers[5:6] * 2
    with wrap_loader(loader, device="cpu", depth=2) as wrapped:
        kept = []
        with pytest.raises(errors.ArgumentError, match="Refilled has filled the memory"):
            kept += wrapped


@pytest.mark.parametrize("fill", [by_torch, by_numpy, an_array])
def test_buffers_that_no_prefetched_batch_uses_may_be_filled(fill: Any) -> None:
    # These batches are waiting or in use at the same time: two, and the one in the step.
    for depth, n in ((0, 1), (2, 3)):
        with wrap_loader(Refilled(fill, n), device="cpu", depth=depth) as wrapped:
            for _ in range(2):
                seen = [float(str(batch).split("[")[-1].split(".")[0]) for batch in wrapped]
                assert seen == [*range(8)]


def test_dtypes_that_numpy_does_not_have() -> None:
    loader = [torch.full((4,), float(i)).to(torch.float8_e4m3fn) for i in range(8)]
    with wrap_loader(loader, device="cpu", depth=2) as wrapped:
        assert [batch.float().tolist() for batch in wrapped] == [[i] * 4 for i in range(8)]
    whole = torch.zeros(4, dtype=torch.float8_e4m3fn)
    filled = Refilled(lambda buffer, x: whole.copy_(loader[int(x)]), 1)
    with wrap_loader(filled, device="cpu", depth=2) as wrapped:
        kept = []
        with pytest.raises(errors.ArgumentError, match="Refilled has filled the memory"):
            kept += wrapped


def test_the_same_batch_may_come_again_unchanged() -> None:
    x = torch.arange(6.0)
    loader = [x, x, x.reshape(2, 3).T, x[:2], x.numpy(), x, x, x]
    for depth in (0, 3):
        assert same(list(wrap_loader(loader, device="cpu", depth=depth))[:2], [x, x])


def test_a_host_transform_may_copy_from_a_buffer() -> None:
    copy = torch.Tensor.clone
    loader = Refilled(lambda buffer, x: buffer.fill_(x))
    with wrap_loader(loader, device="cpu", depth=3, host_transform=copy) as wrapped:
        assert [batch[0] for batch in wrapped] == [*range(8)]


def test_a_host_transform_may_not_fill_its_result_again() -> None:
    loader = [torch.full((3,), float(i)) for i in range(8)]
    result = torch.zeros(3)
    wrapped = wrap_loader(loader, device="cpu", depth=3, host_transform=result.copy_)
    with wrapped, pytest.raises(errors.ArgumentError, match="has filled the memory"):
        list(wrapped)
