"""Several threads that call host_transform: the results, order, errors and ends of a loop."""

import collections
import copy
import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.internals import runner_of
from support.transformed_loops import (
    KINDS,
    SIZE,
    N,
    X,
    batches_of,
    feeder_of,
    on_device,
    on_host,
    require_equal,
    step,
)
from support.unwrapped import unwrapped
from torchdata.stateful_dataloader import StatefulDataLoader

from pinfeed import Feeder, HostEmbedding, read_rows, train_rows, wrap_loader
from pinfeed.errors import ArgumentError
from pinfeed.feeders.base_feeder import MAX_TRANSFORM_THREADS

ALL_KINDS = [*KINDS, "several readers"]
N_BATCHES = -(-N // SIZE)
LIMIT_S = 60


class InOrder:
    """A host_transform that several threads call together, and whose calls end in a given order.

    The calls are made in groups of as many as there are threads. The last group of an epoch may be
    smaller.

    Args:
        order: The calls of a group, in the order in which they end.
        firsts: First number of each batch, in the order of the batches of all epochs.
    """

    def __init__(self, order: Sequence[int], firsts: Sequence[float]) -> None:
        self.order = order
        self.ended = [threading.Event() for _ in firsts]
        self.calls: dict[float, collections.deque[int]] = collections.defaultdict(collections.deque)
        for call, first in enumerate(firsts):
            self.calls[first].append(call)

    def __call__(self, batch: Any, generator: torch.Generator) -> Any:
        made = on_host(batch, generator)
        self.end(batch["x"][0, 0].item())
        return made

    def end(self, first: float) -> None:
        """Wait for the calls of the group that end earlier."""
        epoch, number = divmod(self.calls[first].popleft(), N_BATCHES)
        group = number - number % len(self.order)
        members = [group + one for one in self.order if group + one < N_BATCHES]
        position = members.index(number)
        if position:
            assert self.ended[epoch * N_BATCHES + members[position - 1]].wait(LIMIT_S)
        self.ended[epoch * N_BATCHES + number].set()


def n_threads_of_loops() -> int:
    return sum(thread.name.startswith("pinfeed-") for thread in threading.enumerate())


def synchronous(kind: str) -> tuple[list[Any], list[float]]:
    """Return the batches of the synchronous loop, and the first number that each call is given."""
    firsts = []

    def noted(batch: Any, generator: torch.Generator) -> Any:
        firsts.append(batch["x"][0, 0].item())
        return on_host(batch, generator)

    return batches_of(feeder_of(kind, host_transform=noted, depth=0)), firsts


WANTED, FIRSTS = {}, {}
for _kind in ALL_KINDS:
    WANTED[_kind], FIRSTS[_kind] = synchronous(_kind)


@settings(max_examples=40)
@given(
    kind=st.sampled_from(ALL_KINDS),
    order=st.sampled_from([1, 2, 4]).flatmap(lambda n: st.permutations(range(n))),
    depth=st.sampled_from([1, 2, None]),
)
def test_results_do_not_depend_on_the_threads(
    kind: str, order: list[int], depth: int | None
) -> None:
    options = {
        "host_transform": InOrder(order, FIRSTS[kind]),
        "transform_threads": len(order),
        "depth": depth,
    }
    require_equal(batches_of(feeder_of(kind, **options)), WANTED[kind])


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_threads_call_the_function_at_the_same_time(kind: str) -> None:
    n_threads = 7
    together = threading.Barrier(n_threads, timeout=LIMIT_S)

    def meeting(batch: Any, generator: torch.Generator) -> Any:
        together.wait()
        return on_host(batch, generator)

    assert n_threads == N_BATCHES
    options: Any = {"host_transform": meeting, "transform_threads": n_threads, "depth": 1}
    require_equal(batches_of(feeder_of(kind, **options)), WANTED[kind])


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_one_thread_calls_device_transform_in_order(kind: str) -> None:
    calls: list[Any] = []
    threads = set()
    inside = threading.Lock()

    def recorded(batch: Any, generator: torch.Generator) -> Any:
        assert inside.acquire(blocking=False)
        data = batch[0] if isinstance(batch, tuple) else batch
        calls.append(data["id"].tolist())
        threads.add(threading.get_ident())
        inside.release()
        return on_device(batch, generator)

    options: Any = {
        "host_transform": InOrder([3, 1, 2, 0], FIRSTS[kind]),
        "device_transform": recorded,
    }
    got = batches_of(feeder_of(kind, **options, transform_threads=4, depth=2), 1)
    assert calls == [batch["id"].tolist() for batch in got]
    assert len(threads) == 1


def test_the_loop_without_prefetching_has_no_threads() -> None:
    callers = set()

    def noted(batch: Any, generator: torch.Generator) -> Any:
        callers.add(threading.get_ident())
        return on_host(batch, generator)

    for kind in ALL_KINDS:
        options: Any = {"host_transform": noted, "transform_threads": 4, "depth": 0}
        require_equal(batches_of(feeder_of(kind, **options)), WANTED[kind])
    assert callers == {threading.get_ident()}


# ---- positions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["feeder", "several readers", "table"])
def test_a_loop_resumes_after_every_batch(kind: str) -> None:
    for n_done in range(1, N_BATCHES + 1):
        with feeder_of(kind, transform_threads=3) as first:
            for _, batch in zip(range(n_done), first, strict=False):
                step(first, batch)
                state = first.state_dict()
            if kind == "table":
                first.flush_writes()
        rest = feeder_of(kind, transform_threads=2)
        if kind == "table":
            rest.table.store.array[:] = first.table.store.array
        rest.load_state_dict(state)
        n_left = N_BATCHES - n_done
        require_equal(batches_of(rest, 1), WANTED[kind][n_done:][: n_left or N_BATCHES])


# StatefulDataLoader calls a deprecated function of torch.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("on_error", ["raise", "next"])
def test_states_are_those_of_the_loader_itself(on_error: Any) -> None:
    def doubled(batch: Any) -> Any:
        in_order.end(batch[0].item())
        return batch * 2

    in_order = InOrder([2, 0, 1], range(0, N, SIZE))
    bare, inner = (StatefulDataLoader(list(range(N)), batch_size=SIZE) for _ in range(2))
    wanted = [(batch * 2, copy.deepcopy(bare.state_dict())) for batch in bare]
    loop = wrap_loader(
        inner,
        device="cpu",
        depth=2,
        on_error=on_error,
        host_transform=doubled,
        transform_threads=3,
    )
    got = [(batch, copy.deepcopy(loop.state_dict())) for batch in loop]
    assert [batch.tolist() for batch, _ in got] == [batch.tolist() for batch, _ in wanted]
    assert [state for _, state in got] == [state for _, state in wanted]


# ---- errors and ends -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["host_transform", "device_transform"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_an_error_takes_the_place_of_its_batch(kind: str, name: str) -> None:
    wanted = WANTED[kind]

    def failing(batch: Any, generator: torch.Generator) -> Any:
        data = batch[0] if isinstance(batch, tuple) else batch
        if data["id"].tolist() in (wanted[i]["id"].tolist() for i in (3, 5)):
            raise KeyError("no such label")
        return function(batch, generator)

    function = on_host if name == "host_transform" else on_device
    with feeder_of(kind, **{name: failing}, transform_threads=4) as feeder:
        got: list[Any] = []
        with pytest.raises(KeyError, match="no such label") as found:
            got.extend(step(feeder, batch) for batch in feeder)
    require_equal(got, wanted[:3])
    assert f"in {name} of batch 3, epoch 0" in found.value.__notes__
    assert not n_threads_of_loops()


@pytest.mark.parametrize("kind", ["loader", "fetch"])
def test_a_loop_continues_after_the_errors_of_batches(kind: str) -> None:
    def failing(batch: Any, generator: torch.Generator) -> Any:
        made = in_order(batch, generator)
        if batch["id"].tolist() in bad:
            raise KeyError("no such label")
        return made

    bad = [WANTED[kind][i]["id"].tolist() for i in (0, 2, 6)]
    in_order = InOrder([1, 2, 0], FIRSTS[kind])
    options: Any = {"host_transform": failing, "transform_threads": 3, "on_error": "next"}
    with feeder_of(kind, **options, depth=2) as feeder:
        batches = iter(feeder)
        for i, wanted in enumerate(WANTED[kind][:N_BATCHES]):
            if i in (0, 2, 6):
                with pytest.raises(KeyError, match="no such label") as found:
                    next(batches)
                assert f"in host_transform of batch {i}, epoch 0" in found.value.__notes__
            else:
                require_equal([step(feeder, next(batches))], [wanted])
        assert next(batches, None) is None
        assert feeder.stats.batches == N_BATCHES - 3


class Gate:
    """A host_transform that waits until the loop ends, except for the first batch.

    Args:
        first: Ids of the first batch.
    """

    def __init__(self, first: torch.Tensor) -> None:
        self.first = first
        self.n_calls = 0
        self.waits = threading.Semaphore(0)
        self.event = threading.Event()

    def __call__(self, batch: Any, generator: torch.Generator) -> Any:
        if not torch.equal(batch["id"], self.first):
            self.n_calls += 1
            self.waits.release()
            assert self.event.wait(LIMIT_S)
        return on_host(batch, generator)

    def watch(self, feeder: Any) -> None:
        """Let the calls end when the loop that has begun ends."""
        parts = runner_of(feeder)._last_loop._parts
        stop = parts.stop

        def stop_and_open() -> None:
            stop()
            self.event.set()

        parts.stop = stop_and_open


@pytest.mark.parametrize("way", ["break", "error", "close", "new loop"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_loop_ends_while_several_calls_run(kind: str, way: str) -> None:
    gate = Gate(WANTED[kind][0]["id"])
    feeder = feeder_of(kind, host_transform=gate, transform_threads=3, depth=2)
    with feeder:
        batches = iter(feeder)
        got = [step(feeder, next(batches))]
        gate.watch(feeder)
        for _ in range(3):
            assert gate.waits.acquire(timeout=LIMIT_S)
        if way == "break":
            batches.close()  # type: ignore[attr-defined]
        elif way == "error":
            with pytest.raises(ZeroDivisionError):
                batches.throw(ZeroDivisionError())  # type: ignore[attr-defined]
        elif way == "new loop":
            batches = iter(feeder)
            feeder.set_epoch(0)
        else:
            feeder.close()
        del batches
        require_equal(got, WANTED[kind][:1])
        if way != "new loop":
            assert not n_threads_of_loops()
    assert not n_threads_of_loops()
    # Calls that have not begun are not made.
    assert gate.n_calls == 3


# ---- arguments, plan and statistics --------------------------------------------------------------


def test_bad_arguments_are_refused() -> None:
    batches = [torch.zeros(2, dtype=torch.int64)]
    table = HostEmbedding(13, 2)
    ids = {table: lambda batch: batch}
    makes: list[Any] = [
        functools.partial(Feeder, X, batch_size=SIZE, device="cpu"),
        functools.partial(wrap_loader, batches, device="cpu"),
        functools.partial(train_rows, batches, ids, device="cpu"),
        functools.partial(read_rows, batches, ids, device="cpu"),
    ]
    for make in makes:
        for bad in (0, -1, MAX_TRANSFORM_THREADS + 1, 1.5, True, "2"):
            with pytest.raises(ArgumentError, match=r"transform_threads=.*whole number, from 1 to"):
                make(host_transform=abs, transform_threads=bad)
        with pytest.raises(ArgumentError, match="was given without host_transform"):
            make(transform_threads=2, device_transform=abs)
        make(host_transform=abs, transform_threads=np.int64(2)).close()


def test_tables_with_a_cache_need_batches_in_order() -> None:
    table = HostEmbedding(13, 2, device_cache=0.5)
    for make in (train_rows, read_rows):
        options: Any = {"device": "cpu", "host_transform": abs}
        with pytest.raises(ArgumentError, match=r"device_cache.*wrap the loader first"):
            make([torch.zeros(1)], {table: lambda b: b}, transform_threads=2, **options)
        make([torch.zeros(1)], {table: lambda b: b}, transform_threads=1, **options).close()


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_the_plan_and_statistics_name_the_threads(kind: str) -> None:
    with feeder_of(kind, transform_threads=3, depth=2) as feeder:
        for batch in feeder:
            step(feeder, batch)
        plan, stats = feeder.plan, feeder.stats
    assert (plan.depth, plan.n_transform_threads) == (4, 3)
    assert "depth=4, host_transform in 3 threads" in unwrapped(plan)
    assert (stats.depth, stats.n_transform_threads) == (4, 3)
    assert stats.host_transform_s > 0
    counts = {item.what: item.count for item in plan.items}
    assert counts["results of host_transform, as measured so far"] == 6
    with feeder_of(kind, depth=2) as feeder:
        assert feeder.plan.n_transform_threads == 1
        assert "threads" not in str(feeder.plan)


class Counted(np.ndarray):
    """An array that can be watched."""


def test_no_more_results_are_in_memory_than_planned() -> None:
    depth = 4
    made = threading.Semaphore(0)
    lock = threading.Lock()
    alive = 0
    peak = 0

    def forget() -> None:
        nonlocal alive
        with lock:
            alive -= 1

    def counted(batch: Any) -> Any:
        nonlocal alive, peak
        result = np.zeros(8).view(Counted)
        weakref.finalize(result, forget)
        with lock:
            alive += 1
            peak = max(peak, alive)
        made.release()
        return torch.from_numpy(result)

    options: Any = {"host_transform": counted, "transform_threads": 3, "depth": 2}
    with Feeder(np.zeros((40, 2)), batch_size=1, device="cpu", **options) as feeder:
        n_made = 0
        for i, batch in enumerate(feeder):
            while n_made < min(40, i + 1 + depth):
                assert made.acquire(timeout=LIMIT_S)
                n_made += 1
            del batch
        (item,) = (item for item in feeder.plan.items if item.what.startswith("results"))
    assert depth + 1 <= peak <= item.count == depth + 2
