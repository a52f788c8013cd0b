"""Statistics of every kind of loop: none is negative, and the shares of the time add up."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.internals import counters_of
from support.simulated_loops import Clock
from torch.utils.data import DataLoader

from pinfeed import (
    ArrayStore,
    Feeder,
    HostEmbedding,
    RowOptimizer,
    train_rows,
    wrap_dataset,
    wrap_loader,
)
from pinfeed.profiling.stats import FeederStats
from pinfeed.testing import SimDevice, lazy

# Batches are large enough for several reader threads.
ROWS = np.zeros((60, 20_000), np.float32)
TRANSFORMS: dict[str, tuple[str, ...]] = {
    "none": (),
    "host": ("host_transform",),
    "both": ("host_transform", "device_transform"),
}


class Dataset(torch.utils.data.Dataset[Any]):
    """Samples that take time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> np.ndarray:
        self._clock.pass_s(0.25)
        return np.full(3, index)


def rows(clock: Clock, **given: Any) -> Feeder[Any]:
    return Feeder(ROWS, batch_size=10, shuffle=True, **given)


def store(clock: Clock, **given: Any) -> Feeder[Any]:
    return Feeder(ArrayStore(ROWS), batch_size=10, **given)


def loader(clock: Clock, **given: Any) -> Any:
    return wrap_loader(DataLoader(Dataset(clock), batch_size=5), **given)


def threaded(clock: Clock, **given: Any) -> Any:
    return loader(clock, threads=2, **given)


def dataset(clock: Clock, *, host_transform: Any = None, **given: Any) -> Any:
    return wrap_dataset(Dataset(clock), host_transform, batch_size=5, threads=2, **given)


def fetch(clock: Clock, **given: Any) -> Any:
    return wrap_loader([{"i": torch.arange(5)}] * 4, fetch={"rows": (ROWS, "i")}, **given)


MAKERS: list[Callable[..., Any]] = [rows, store, loader, threaded, dataset, fetch]


def require_sound(stats: FeederStats) -> None:
    """Check the numbers of an interval."""
    numbers = stats.as_dict()
    assert min(numbers.values()) >= 0, numbers
    assert max(value for key, value in numbers.items() if key.endswith("percent")) <= 100
    parts = stats.wait_s + stats.overhead_s + stats.write_wait_s + stats.compute_s
    assert parts == pytest.approx(stats.seconds)
    assert stats.first_batch_s <= stats.starved_s <= stats.seconds
    assert stats.source_s <= stats.read_s
    assert stats.late <= stats.batches


def intervals(feeder: Any, clock: Clock, steps: Iterator[Any]) -> None:
    """Train, and check the numbers between all moments at which a step reads them."""
    moments = [feeder.stats]
    for _ in steps:
        clock.pass_s(0.5)
        moments.append(feeder.stats)
    moments.append(feeder.stats)
    for i, earlier in enumerate(moments):
        for later in moments[i:]:
            require_sound(later - earlier)
    assert moments[-1].batches


@pytest.mark.parametrize(
    ("transforms", "depth", "device"),
    [(name, depth, "cpu") for name in TRANSFORMS for depth in (0, None)] + [("both", None, "sim")],
)
@pytest.mark.parametrize("make", MAKERS)
def test_no_statistic_is_negative(
    make: Callable[..., Any], transforms: str, depth: int | None, device: str
) -> None:
    clock = Clock()

    def slowly(batch: Any) -> Any:
        clock.pass_s(2.0)
        return batch

    given = dict.fromkeys(TRANSFORMS[transforms], slowly)
    on = "cpu" if device == "cpu" else SimDevice(lazy, now=clock)
    with make(clock, depth=depth, device=on, timeline=True, **given) as feeder:
        counters_of(feeder).now = clock
        for function in (feeder._transforms.host, feeder._transforms.device):
            if function is not None:
                function.now = clock
        for n_steps in (100, 3, 100):
            intervals(feeder, clock, itertools.islice(feeder, n_steps))


@pytest.mark.parametrize("depth", [0, 2])
def test_no_statistic_of_a_table_is_negative(depth: int) -> None:
    clock = Clock()
    table = HostEmbedding(100, 4)
    optimizer = RowOptimizer(torch.optim.SGD, [table], lr=0.1)
    loader = [torch.arange(i, i + 10) for i in range(20)]
    loop = train_rows(loader, {table: lambda ids: ids}, optimizer=optimizer, depth=depth)

    def steps() -> Iterator[Any]:
        for ids in loop:
            table(ids).sum().backward()
            optimizer.step()
            yield ids

    with loop:
        counters_of(loop).now = clock
        intervals(loop, clock, steps())
