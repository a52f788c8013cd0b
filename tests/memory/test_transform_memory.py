"""Batch transforms in the plan: memory of their results, measured in the loop or on trial."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.simtorch import SimTorchDevice
from support.unwrapped import unwrapped

import pinfeed
from pinfeed import Config, Feeder, MiB, Plan, RaggedStore, wrap_loader
from pinfeed.feeders.memory_trials import linear
from pinfeed.testing import lazy

ROWS = np.zeros((600, 256), np.uint8)
LIMITS = {"cpu_memory_limit": MiB(64), "gpu_memory_limit": MiB(64)}


def as_double(batch: Any) -> Any:
    return batch.double()


def as_two(batch: Any) -> Any:
    # The first result is in new memory, the second in that of the batch.
    return batch.float(), batch[:, :5]


def items(plan: Plan) -> dict[tuple[str, str], tuple[int, int]]:
    found = {
        (item.what.replace(", as measured so far", ""), item.place): (item.count, item.nbytes)
        for item in plan.items
    }
    return {key: found[key] for key in found if not key[0].startswith(("row ind", "the order"))}


def filled(**kwargs: Any) -> Iterator[Plan]:
    """Yield the plans of a feeder before its first batch, and after it."""
    with Feeder(ROWS, depth=2, **kwargs) as feeder:
        yield feeder.plan
        next(iter(feeder))
        yield feeder.plan


FUNCTIONS: dict[str, Any] = {"host_transform": as_double, "device_transform": as_two}
ON_CPU = {
    ("rows for host_transform", "host"): (4, 28672),
    ("results of host_transform", "host"): (4, 204800),
    ("results of device_transform", "host"): (4, 102400),
}
ON_DEVICE = {
    ("rows for host_transform", "host"): (4, 28672),
    ("results of host_transform", "host"): (3, 204800),
    ("batches", "device"): (4, 204800),
    ("staging", "pinned"): (3, 204800),
    ("results of device_transform", "device"): (6, 102400),
}


def as_float(batch: Any) -> Any:
    return batch.float()


@pytest.mark.parametrize(
    ("is_unified", "on_device", "wanted"), [(True, as_two, ON_CPU), (False, as_float, ON_DEVICE)]
)
def test_results_are_counted_as_measured_or_as_predicted(
    is_unified: bool, on_device: Any, wanted: dict[Any, Any]
) -> None:
    device = "cpu" if is_unified else SimTorchDevice(lazy)
    functions: Any = {"host_transform": as_double, "device_transform": on_device}
    first, later = filled(batch_size=100, device=device, **functions)
    assert items(first) == {("rows for host_transform", "host"): (4, 28672)}
    assert "memory of transform results is counted after" in str(first)
    assert items(later) == wanted
    assert "memory of transform results" not in str(later)
    limits = Config(**LIMITS, preferred_batch_size=100)
    first, later = filled(config=limits, device=device, **functions)
    assert first.batch_size == 100
    assert items(first) == items(later) == wanted


def test_results_of_a_function_on_the_device_alone() -> None:
    (_, later) = filled(batch_size=100, device="cpu", device_transform=as_two)
    assert items(later) == {
        ("batches", "host"): (4, 28672),
        ("results of device_transform", "host"): (4, 102400),
    }


def test_results_keep_to_the_limits() -> None:
    limits = Config(cpu_memory_limit=MiB(10))
    with Feeder(ROWS, config=limits, depth=2, device="cpu") as feeder:
        assert feeder.plan.batch_size == 600
    with Feeder(ROWS, config=limits, depth=2, device="cpu", **FUNCTIONS) as feeder:
        assert feeder.plan.host_bytes <= MiB(10)
        assert 400 < feeder.plan.batch_size < 600
        sizes = [len(x) for x, _ in feeder]
    assert sum(sizes) == 600


def test_a_trial_leaves_no_trace_in_the_random_numbers() -> None:
    n_rows = []

    def noisy(batch: Any, generator: torch.Generator) -> Any:
        n_rows.append(len(batch))
        noise = torch.rand(batch.shape, generator=generator) + torch.rand(batch.shape)
        return batch + noise + random.random()

    state_in_python = random.getstate()
    state = torch.get_rng_state()
    limits = Config(**LIMITS, preferred_batch_size=100)
    with Feeder(ROWS, config=limits, device="cpu", depth=0, host_transform=noisy) as feeder:
        # Two trial batches of the first rows.
        assert n_rows == [300, 600]
        assert torch.equal(torch.get_rng_state(), state)
        assert random.getstate() == state_in_python
        first = next(iter(feeder))
    torch.set_rng_state(state)
    random.setstate(state_in_python)
    with Feeder(ROWS, batch_size=100, device="cpu", depth=0, host_transform=noisy) as feeder:
        assert n_rows == [300, 600, 100]
        assert torch.equal(next(iter(feeder)), first)


def test_an_error_on_trial_is_raised_when_the_feeder_is_made() -> None:
    def fails(batch: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        Feeder(ROWS, config=Config(**LIMITS), device="cpu", host_transform=fails)
    assert "in a trial with the first 300 rows, for the limits" in caught.value.__notes__[-1]


def test_results_of_ragged_rows_grow_with_the_largest_rows() -> None:
    store = RaggedStore(np.zeros(1000, np.uint8), np.array([0, 10, 20, 30, 40, 1000]))
    limits = Config(**LIMITS, preferred_batch_size=2)
    with Feeder(
        store, config=limits, depth=2, device="cpu", host_transform=lambda batch: batch[0].double()
    ) as feeder:
        ((_, nbytes),) = [
            found for (what, _), found in items(feeder.plan).items() if "results" in what
        ]
    # The largest batch has 970 items.
    assert nbytes >= 8 * 970


def test_results_of_wrapped_loaders_are_counted_as_measured() -> None:
    table = pinfeed.HostEmbedding(50, 4)
    batches = [torch.arange(10), torch.arange(20)]
    wrapped = wrap_loader(batches, device="cpu", depth=2, host_transform=as_double)
    trained = pinfeed.train_rows(
        batches, {table: lambda ids: ids}, device="cpu", depth=2, device_transform=as_double
    )
    for loop, name in ((wrapped, "host_transform"), (trained, "device_transform")):
        assert items(loop.plan) == {}
        assert "is counted after the first batch" in unwrapped(loop.plan)
        list(loop)
        assert items(loop.plan) == {(f"results of {name}", "host"): (4, 160)}


def test_predictions_are_linear_and_never_decrease() -> None:
    assert [linear((10, 25), (20, 45))(n) for n in (0, 10, 15, 100)] == [5, 25, 35, 205]
    assert [linear((10, 50), (20, 40))(n) for n in (0, 100)] == [40, 40]
    assert [linear((10, 20), (10, 20))(n) for n in (0, 5)] == [0, 10]
    assert linear((0, 0), (0, 7))(0) == 7
