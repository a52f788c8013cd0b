"""A loader's batches on a device, moved without threads, equal the loader's own."""

import collections
import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.internals import runner_of
from support.schedules import next_stream, randomly, switch
from support.sim_engine import SimEngineDevice

from pinfeed import wrap_loader
from pinfeed.native import library as native
from pinfeed.pipeline.device_batches import DeviceBatches
from pinfeed.pipeline.loader_loop import MovingLoaderLoop
from pinfeed.testing import SimDevice, favour, lazy

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())

CHOICES = {
    "lazy": lazy,
    "fast copies": favour("read"),
    "fast steps": favour("compute"),
    "fast": favour("read", "compute"),
}
Pair = collections.namedtuple("Pair", "x y")


def one(i: int) -> torch.Tensor:
    return torch.arange(12.0).reshape(3, 4) + 100 * i


def pair(i: int) -> list[torch.Tensor]:
    return [one(i), torch.tensor(i)]


def mapping(i: int) -> dict[str, torch.Tensor]:
    return {"x": one(i), "b": torch.tensor([True, i % 2 == 0]), "h": one(i).bfloat16()}


def nested(i: int) -> Any:
    return Pair({"x": one(i)}, (torch.full((i + 1,), i), "text"))


def empty(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(0, 3), one(i)


def growing(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((5 * i + 1, 3), float(i)), torch.arange(i)


def long(i: int) -> list[torch.Tensor]:
    # Several copies of 2 MiB, which run while later bytes are staged.
    return [torch.full((700_000,), float(i)), torch.arange(300_000) + i, one(i)]


MAKES = [one, pair, mapping, nested, empty, growing, long]


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


class Refilled:
    """A loader that fills the memory of its batch again and again."""

    def __init__(self, n: int) -> None:
        self._memory = [torch.zeros(3, 4), torch.zeros(2)]
        self._n = n

    def __iter__(self) -> Any:
        for i in range(self._n):
            self._memory[0].fill_(i)
            self._memory[1].fill_(-i)
            yield self._memory


def moved(
    loader: Any, device: SimDevice, depth: int | None, *, switch_after: int | None = None
) -> list[list[np.ndarray]]:
    """Return what the training steps of a loop have read, late, of each batch."""
    seen: list[list[np.ndarray]] = []
    with wrap_loader(loader, device=device, depth=depth) as feeder:
        for i, batch in enumerate(feeder):
            arrays = [leaf for leaf in leaves(batch) if not isinstance(leaf, str)]
            device.launch(lambda *read: seen.append([one.copy() for one in read]), *arrays)
            if (name := next_stream(i, switch_after, None)) is not None:
                switch(device, name)
        assert isinstance(runner_of(feeder)._last_loop, MovingLoaderLoop)
    device.drain()
    return seen


def as_arrays(batch: Any) -> list[np.ndarray]:
    tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
    return [tensor.float().numpy() for tensor in tensors]


def equal(found: list[list[np.ndarray]], batches: list[Any]) -> bool:
    return len(found) == len(batches) and all(
        len(arrays) == len(want)
        and all(np.array_equal(a.astype(np.float32), b) for a, b in zip(arrays, want, strict=True))
        for arrays, want in zip(found, map(as_arrays, batches), strict=True)
    )


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("depth", [0, 1, 3, None])
@pytest.mark.parametrize("make", MAKES)
def test_batches_equal_those_of_the_loader(make: Any, depth: int | None, choice: str) -> None:
    batches = [make(i) for i in range(6)]
    device = SimEngineDevice(CHOICES[choice], has_engine=True)
    assert equal(moved(batches, device, depth), batches)


@given(
    seed=st.integers(0, 1 << 30),
    make=st.sampled_from([one, pair, mapping, nested, growing]),
    n=st.integers(0, 7),
    depth=st.integers(0, 4),
    switch_after=st.one_of(st.none(), st.integers(1, 4)),
)
def test_a_random_schedule_changes_nothing(
    seed: int, make: Any, n: int, depth: int, switch_after: int | None
) -> None:
    batches = [make(i) for i in range(n)]
    device = SimEngineDevice(randomly(seed), has_engine=True)
    assert equal(moved(batches, device, depth, switch_after=switch_after), batches)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_loader_may_fill_its_memory_again(depth: int) -> None:
    device = SimEngineDevice(lazy, has_engine=True)
    want = [[torch.full((3, 4), float(i)), torch.full((2,), -float(i))] for i in range(5)]
    assert equal(moved(Refilled(5), device, depth), want)


class Reaching(SimEngineDevice):
    """A device that copies long page-locked tensors from where they are."""

    def reaches(self, source: Any) -> bool:
        value = getattr(source, "host_value", None)
        return value is not None and value.nbytes > 1000

    def page_locked(self) -> torch.Tensor:
        return torch.from_numpy(self.staging(80_000).view(np.float32))


class RefilledAndPageLocked:
    """A loader that fills page-locked memory again and again, beside a small tensor."""

    def __init__(self, device: Reaching) -> None:
        self._memory = device.page_locked()

    def __iter__(self) -> Any:
        for i in range(5):
            self._memory.fill_(i)
            yield {"small": torch.tensor([i]), "long": self._memory}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_page_locked_tensors_are_copied_from_where_they_are(depth: int, choice: str) -> None:
    want = [{"small": torch.tensor([i]), "long": torch.full((20_000,), float(i))} for i in range(5)]
    device = Reaching(CHOICES[choice], has_engine=True)
    loader = [
        {"small": one["small"], "long": device.page_locked().copy_(one["long"])} for one in want
    ]
    assert equal(moved(loader, device, depth), want)
    device = Reaching(CHOICES[choice], has_engine=True)
    assert equal(moved(RefilledAndPageLocked(device), device, depth), want)


def test_the_wait_for_memory_that_a_loader_fills_again_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DeviceBatches, "finish_reads", lambda self: None)
    want = [{"small": torch.tensor([i]), "long": torch.full((20_000,), float(i))} for i in range(5)]
    device = Reaching(lazy, has_engine=True)
    assert not equal(moved(RefilledAndPageLocked(device), device, 1), want)


def test_the_structure_is_that_of_the_loader() -> None:
    device = SimEngineDevice(favour("read"), has_engine=True)
    with wrap_loader([nested(1)], device=device) as feeder:
        (batch,) = feeder
    assert type(batch) is Pair
    assert batch.y[1] == "text"
    with wrap_loader([mapping(1), pair(1), (one(1),), one(2)], device=device) as feeder:
        batches = list(feeder)
    assert list(map(type, batches[:3])) == [dict, list, tuple]
    assert list(batches[0]) == ["x", "b", "h"]
    assert batches[3].shape == (3, 4)


class Failing:
    """A loader that fails after some batches."""

    def __init__(self, n: int) -> None:
        self._n = n

    def __iter__(self) -> Any:
        yield from (one(i) for i in range(self._n))
        raise ValueError("the loader has failed")


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_an_error_comes_after_the_batches_before_it(depth: int, n: int) -> None:
    n_received = 0
    feeder = wrap_loader(Failing(n), device=SimEngineDevice(has_engine=True), depth=depth)
    with feeder, pytest.raises(ValueError, match="has failed"):
        for _ in feeder:
            n_received += 1
    assert n_received == n


@pytest.mark.parametrize("hazard", [1, 2, 4])
def test_each_wait_is_needed(hazard: int) -> None:
    for choice, depth, make in itertools.product(CHOICES.values(), (0, 1, 3), (one, growing)):
        batches = [make(i) for i in range(6)]
        device = SimEngineDevice(choice, has_engine=True, deaf_to=("engine.c", hazard))
        try:
            if not equal(moved(batches, device, depth), batches):
                return
        except AssertionError:
            return
    pytest.fail(f"no schedule notices that the waits of hazard ({hazard}) are missing")


@pytest.mark.parametrize("is_deaf", [False, True])
def test_a_loop_that_is_left_writes_no_memory_afterwards(
    is_deaf: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimEngineDevice(lazy, has_engine=True)
    if is_deaf:
        monkeypatch.setattr(device, "_force", lambda event: None)
    with wrap_loader([one(i) for i in range(6)], device=device, depth=3) as feeder:
        for _ in feeder:
            break
    free = [
        (device.stream(name), block) for name, blocks in device._free.items() for block in blocks
    ]
    for stream, block in free:
        stream._enqueue(functools.partial(block.fill, 0xAB))
    device.drain()
    assert all((block == 0xAB).all() for _, block in free) != is_deaf
