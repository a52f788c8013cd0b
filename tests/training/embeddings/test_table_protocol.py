"""Loops over tables under adversarial schedules equal the synchronous loop, bit for bit."""

import itertools
import linecache
import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.schedules import corners, randomly, sharing_function, stalling
from support.simtorch import META, SimTensor, SimTorchDevice
from support.table_runs import (
    FIXED,
    MIXED,
    OPTIMIZERS,
    PLAIN,
    SGD,
    Ids,
    Run,
    assert_same,
    check,
    looked_up,
)
from torch import nn
from torch.nn import functional

from pinfeed import ArrayStore, HostEmbedding, RowOptimizer, train_rows
from pinfeed.testing import favour, lazy
from pinfeed.testing.device_tests import DeviceTests

CORNERS = corners({"compute": (20, 150, 340), "read": (9, 30, 60)})
LATE = ("pinfeed-read", "write", "pinfeed-write")
CORNERS["compute stalls after 40, all else late but read"] = partial(stalling, "compute", 40, LATE)
# The simulator has neither sparse tensors nor fused steps.
DENSE = [name for name in OPTIMIZERS if name not in ("SparseAdam", "fused")]
GROWING: list[tuple[Ids, Ids, Ids]] = [
    ([0], [0], [0]),
    ([1], [0], [0]),
    ([0], [1], [1]),
    ([1, 1], [0, 0], [0, 0]),
    ([3], [2], [2]),
    ([3, 4, 5, 6, 7], [0, 1, 2, 3, 4], [5, 6, 7, 8, 0]),
    ([2, 1], [3, 1], [1, 3]),
    ([8, 9, 5, 4, 0], [8, 7, 6, 5, 4], [3, 2, 1, 0, 8]),
]


# Equally many rows in each batch, and no run of consecutive ones, which need no indices.
SCATTERED: list[tuple[Ids, Ids, Ids]] = [
    ([i % 2, 2 + i % 2, 5, 7 + i % 3, 11], [0, 2, 4, 6 + i % 2, 0], [2, 0, 4, 4, 2])
    for i in range(8)
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one torch thread, because more of them slow down work on small tensors."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("depth", "does"), [(0, MIXED), (1, PLAIN), (1, MIXED), (2, MIXED), (4, MIXED)]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_on_the_cpu(optimizer: str, depth: int, does: Sequence[str]) -> None:
    check("cpu", depth, optimizer, does=does, stop_after=None if depth % 2 else 7)


@pytest.mark.parametrize("sparse", [False, True], ids=["SGD", "Adagrad"])
def test_an_embedding_of_torch_is_trained_in_the_same_way(sparse: bool) -> None:
    """An optimizer that leaves rows without gradient alone has one rule for rows and tables."""
    made: Any = torch.optim.Adagrad if sparse else SGD
    start = np.random.default_rng(0).standard_normal((12, 8)).astype("f4")
    plain, ours = (
        nn.Embedding.from_pretrained(torch.from_numpy(start.copy()), freeze=False),
        HostEmbedding(12, 8, store=ArrayStore(start)),
    )
    dense, rows = made(plain.parameters(), lr=0.1), RowOptimizer(made, [ours], lr=0.1)
    batches = [torch.tensor(ids) for ids, _, _ in FIXED]
    for ids in batches:
        plain(ids).pow(3).sum().backward()
        dense.step()
        dense.zero_grad()
    for ids in train_rows(batches, {ours: lambda ids: ids}, optimizer=rows, device="cpu"):
        ours(ids).pow(3).sum().backward()
        rows.step()
        rows.zero_grad()
    np.testing.assert_array_equal(start, plain.weight.detach())


class TestSimTorchDevice(DeviceTests):
    def make(self) -> SimTorchDevice:
        return SimTorchDevice()


def test_torch_is_queued_until_a_value_is_needed() -> None:
    device = SimTorchDevice(lazy)
    with device.factories():
        weight = nn.Parameter(torch.arange(6.0).reshape(3, 2).to(META))
        ids, step = torch.tensor([0, 2, 2], device=META), torch.tensor(3.0)
        loss = (functional.embedding(ids, weight) * step).sum()
        loss.backward()
        # The host changes the tensor after work with it was queued.
        step += 1
        assert isinstance(weight.grad, SimTensor)
        expected = [[3, 3], [0, 0], [6, 6]]
        # The device has not computed the gradient yet.
        assert weight.grad.raw.tolist() != expected
        assert weight.grad.cpu().tolist() == expected
        assert loss.item() == 3 * (0 + 1 + 4 + 5 + 4 + 5)
        assert ids[ids > 0].cpu().tolist() == [2, 2]
        torch._assert_async((ids < 2).all(), "two is too much")
        with pytest.raises(RuntimeError, match="two is too much"):
            device.drain()


CROSS = list(itertools.product(DENSE, (0, 1, 2, 4), (False, True), (PLAIN, MIXED), (None, 3)))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("corner", CORNERS)
def test_corner_schedules(corner: str) -> None:
    optimizer, depth, direct, does, stop_after = random.Random(corner).choice(CROSS)
    check(
        SimTorchDevice(CORNERS[corner](), direct=direct),
        depth,
        optimizer,
        does=does,
        stop_after=stop_after,
    )


@pytest.mark.sweep(8)
@pytest.mark.parametrize("optimizer", DENSE)
def test_every_optimizer_as_late_as_can_be(optimizer: str) -> None:
    for i, choose in enumerate((lazy, favour("read", "pinfeed-read"))):
        check(SimTorchDevice(choose, direct=i == 1), 2, optimizer, does=MIXED)


def random_run(seed: int) -> None:
    rng = random.Random(seed)

    def ids(n: int, below: int) -> Ids:
        return [rng.randrange(below) for _ in range(n)]

    batches = [
        (ids(n, 12), ids(n, 9), ids(n, 9))
        for n in (rng.randint(1, 6) for _ in range(rng.randint(1, 8)))
    ]
    does = [rng.choice(MIXED) for _ in range(rng.randint(1, 5))]
    device = SimTorchDevice(randomly(seed), direct=rng.random() < 0.5)
    options: dict[str, Any] = {
        "does": does,
        "stop_after": rng.choice([None, 1, 3]),
        "switch_after": rng.choice([None, None, 1, 3]),
        "switch_once": rng.choice([None, None, 1, 2]),
        "switch_in": rng.choice([None, None, 0, 2]),
    }
    check(
        device, rng.randint(0, 4), rng.choice(DENSE), batches, verify=rng.random() < 0.2, **options
    )


@pytest.mark.sweep(4)
@pytest.mark.parametrize("seed", range(30))
def test_random_schedules(seed: int) -> None:
    random_run(seed)


@pytest.mark.stress
@pytest.mark.parametrize("start", range(1000, 4000, 100))
def test_many_random_schedules(start: int) -> None:
    for seed in range(start, start + 100):
        random_run(seed)


@pytest.mark.stress
@pytest.mark.parametrize("corner", CORNERS)
def test_corner_schedules_with_everything(corner: str) -> None:
    for optimizer, depth, direct, does, stop_after in CROSS:
        check(
            SimTorchDevice(CORNERS[corner](), direct=direct),
            depth,
            optimizer,
            does=does,
            stop_after=stop_after,
        )


table_batches = st.lists(st.integers(1, 5).flatmap(looked_up), min_size=1, max_size=7)


@given(
    st.lists(st.integers(0, 5), max_size=400),
    table_batches,
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from(DENSE),
)
@settings(max_examples=20)
def test_any_schedule(
    moves: list[int], batches: list[tuple[Ids, Ids, Ids]], depth: int, direct: bool, optimizer: str
) -> None:
    coming = iter(moves)

    def choose(ready: Any) -> str | None:
        return next(iter([None, *ready][next(coming, 0) :]), None)

    check(SimTorchDevice(choose, direct=direct), depth, optimizer, batches, does=MIXED)


# The schedules and loops that miss most waits are first.
WORST = (
    "compute stalls after 40, all else late but read",
    "fast ",
    "fast read+pinfeed-read",
    "fast compute+pinfeed-read",
)
VARIANTS: list[tuple[bool, dict[str, Any]]] = [
    (direct, kwargs)
    for kwargs in (
        {},
        {"stop_after": 3},
        {"batches": GROWING},
        {"batches": SCATTERED},
        {"batches": GROWING, "caches": (0.3, 0.4), "policy": 1},
    )
    for direct in (False, True)
]


def synchronisations() -> list[tuple[str, int]]:
    """Return every call site of wait and sync, except for those that bound memory."""
    sites: set[tuple[str, int]] = set()
    for direct, kwargs in VARIANTS:
        device = SimTorchDevice(lazy, direct=direct)
        check(device, 2, "momentum", **kwargs)
        sites |= device.sites
    # test_cache_failures.py shows that a flush takes the memory of a few parts.
    return sorted(site for site in sites if "fit in memory" not in linecache.getline(*site))


# Wrong row indices make torch raise errors, also while a loop is freed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_every_synchronisation_is_needed() -> None:
    """A loop without one wait computes other results, or uses freed memory, on some schedule."""
    known = ("transfer.py", "row_window.py", "batch_copies.py")
    for site in synchronisations():
        assert site[0].endswith(known), f"a wait or sync outside of {known}"
        every = itertools.product(VARIANTS, WORST)
        assert any(
            fails(SimTorchDevice(CORNERS[corner](), direct=direct, deaf_to=site), kwargs)
            for (direct, kwargs), corner in every
        ), f"no schedule notices that this wait is missing: {linecache.getline(*site)}"


def fails(device: SimTorchDevice, kwargs: dict[str, Any]) -> bool:
    try:
        check(device, 2, "momentum", **kwargs)
    except (AssertionError, RuntimeError, IndexError):
        return True
    return False


@pytest.mark.parametrize("i", [0, 1])
@pytest.mark.parametrize("corner", WORST)
def test_a_step_that_changes_its_stream_before_its_lookups(corner: str, i: int) -> None:
    caches = [(None, None), (0.3, 0.4)][i]
    device = SimTorchDevice(CORNERS[corner](), direct=bool(i))
    check(device, 2, "momentum", GROWING, switch_in=i, caches=caches)


def test_rows_looked_up_on_another_stream_are_shared_with_it() -> None:
    """The program may use their memory again in the stream for which it was allocated."""
    shared: list[str] = []

    class Noting(SimTorchDevice):
        def share(self, tensor: Any, stream: Any) -> None:
            if sharing_function() == "_share_rows":
                shared.append(stream.name)
            super().share(tensor, stream)

    for switch_in, is_shared in ((None, False), (1, True)):
        shared.clear()
        check(Noting(lazy), 2, "momentum", GROWING, switch_in=switch_in)
        assert ("another" in shared) == is_shared


@pytest.mark.parametrize("simulated", [False, True], ids=["cpu", "simulated"])
@pytest.mark.parametrize("depth", [0, 2])
def test_steps_before_an_error_count(depth: int, simulated: bool) -> None:
    class Stop(Exception):
        pass

    class Failing(Run):
        def body(self, i: int, batch: Any, *args: Any) -> None:
            super().body(i, batch, *args)
            if i == 3:
                raise Stop

    want, got = Run("Adam", stop_after=4).synchronous(), Failing("Adam")
    device = SimTorchDevice(lazy) if simulated else None
    with pytest.raises(Stop), device.factories() if device else torch.enable_grad():
        got.fed(device or "cpu", depth)
    for table, expected in zip(got.tables, want.tables, strict=True):
        # The stores share these arrays.
        np.testing.assert_array_equal(table, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("does", [PLAIN, MIXED], ids=["plain", "mixed"])
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_on_cuda(optimizer: str, depth: int, does: Sequence[str]) -> None:
    """Compare with depth 0 on the GPU, because a GPU adds in an order of its own.

    The kernels for such small batches add in the same order in every run.
    """
    for stop_after in (None, 3):
        got, want = (
            Run(optimizer, does=does, stop_after=stop_after).fed("cuda", d) for d in (depth, 0)
        )
        assert_same(got, want)
