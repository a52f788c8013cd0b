"""Batch transforms: their arguments, their order and their random numbers."""

import collections
import copy
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.transformed_loops import (
    DEPTHS,
    IDS,
    KINDS,
    SIZE,
    TABLE,
    N,
    X,
    batches_of,
    feeder_of,
    generator_of,
    loader,
    on_device,
    on_host,
    require_equal,
    step,
)

from pinfeed import (
    ArrayStore,
    Config,
    Feeder,
    HostEmbedding,
    MiB,
    Ranks,
    train_rows,
    wrap_loader,
)
from pinfeed.errors import ArgumentError, RowIndexError, WorkerError, WriteBackError
from pinfeed.feeders import base_feeder
from pinfeed.tensors.transform_calls import tensors_in


@pytest.mark.parametrize("kind", [*KINDS, "several readers"])
def test_results_do_not_depend_on_the_depth(kind: str) -> None:
    want = batches_of(feeder_of(kind, depth=0))
    for depth in DEPTHS[1:]:
        require_equal(batches_of(feeder_of(kind, depth=depth)), want)


def test_results_are_those_of_the_plain_loop() -> None:
    plain = []
    batches = loader()
    for epoch in range(2):
        for i, batch in enumerate(batches):
            batch = on_host(batch, generator_of(epoch, i, 0))
            plain.append(on_device(batch, generator_of(epoch, i, 1)))
    require_equal(batches_of(feeder_of("loader")), plain)
    x, ids = torch.from_numpy(X.copy()), torch.from_numpy(IDS)
    cuts = [slice(i, i + SIZE) for i in range(0, N, SIZE)]
    host = [on_host({"x": x[c], "id": ids[c]}, generator_of(0, i, 0)) for i, c in enumerate(cuts)]
    device = [on_device(batch, generator_of(0, i, 1)) for i, batch in enumerate(host)]
    require_equal(batches_of(feeder_of("several readers"), 1), device)


def test_each_rank_of_a_feeder_has_generators_of_its_own() -> None:
    def drawn(batch: Any, generator: torch.Generator) -> Any:
        return torch.rand(2, generator=generator)

    for rank in (0, 1):
        ranks = Ranks("drop", rank=rank, world_size=2)
        options: Any = {"device": "cpu", "ranks": ranks, "seed": -1, "device_transform": drawn}
        with Feeder(X, batch_size=SIZE, **options) as feeder:
            for i, got in enumerate(feeder):
                state = np.random.SeedSequence((2**64 - 1, 0, i, 1, rank)).generate_state(1, "u8")
                generator = torch.Generator().manual_seed(int(state[0]))
                assert torch.equal(got, torch.rand(2, generator=generator))


@pytest.mark.parametrize("kind", ["feeder", "table"])
def test_a_resumed_loop_continues_its_batch_numbers(kind: str) -> None:
    want = batches_of(feeder_of(kind))
    with feeder_of(kind) as first:
        for i, batch in enumerate(first):
            step(first, batch)
            if i == 2:
                state = first.state_dict()
                break
        rest = feeder_of(kind)
        if kind == "table":
            rest.table.store.array[:] = first.table.store.array
    with (
        feeder_of(kind, seed=4) as other,
        pytest.raises(ArgumentError, match=r"seed.* was 3, is 4"),
    ):
        other.load_state_dict(state)
    rest.load_state_dict(state)
    require_equal(batches_of(rest), want[3:])


class Stateful:
    """A loader with a state, as torchdata's."""

    def __init__(self) -> None:
        self.n = 0

    def __iter__(self) -> Iterator[Any]:
        while self.n < N:
            rows = slice(self.n, self.n + SIZE)
            self.n += SIZE
            yield {"x": torch.from_numpy(X[rows].copy()), "id": torch.from_numpy(IDS[rows])}
        self.n = 0

    def state_dict(self) -> Any:
        return {"n": self.n}

    def load_state_dict(self, state: Any) -> None:
        self.n = state["n"]


@pytest.mark.parametrize("n_done", [3, 7])
def test_a_resumed_stateful_loader_continues_its_batch_numbers(n_done: int) -> None:
    functions: Any = {"device": "cpu", "host_transform": on_host, "device_transform": on_device}
    with wrap_loader(Stateful(), **functions) as whole:
        want = [batch["double"].clone() for _ in range(2) for batch in whole]
    with wrap_loader(Stateful(), **functions) as first:
        for _ in zip(range(n_done), first, strict=False):
            state = copy.deepcopy(first.state_dict())
    assert set(state) == {"loader", "pinfeed"}
    with wrap_loader(Stateful(), **functions) as rest:
        with pytest.raises(
            ArgumentError, match=r"got a state of the loader itself.*expected the return value"
        ):
            rest.load_state_dict(state["loader"])
        rest.load_state_dict(state)
        got = [batch["double"].clone() for _ in range(2) for batch in rest]
    assert all(torch.equal(a, b) for a, b in zip(got, want[n_done:], strict=True))
    # Without a generator, the state is the loader's own.
    with wrap_loader(Stateful(), device="cpu", device_transform=dict) as plain:
        plain.load_state_dict(state)
        assert plain.state_dict() == state["loader"]
        plain.load_state_dict({"n": 20})
        assert len(list(plain)) == 2


@pytest.mark.parametrize("kind", [*KINDS, "several readers"])
def test_one_thread_at_a_time_calls_a_function_and_in_order(kind: str) -> None:
    calls: list[Any] = []
    inside = threading.Lock()

    def recorded(batch: Any, generator: torch.Generator) -> Any:
        assert inside.acquire(blocking=False)
        data = batch[0] if isinstance(batch, tuple) else batch
        calls.append(data["id"].tolist())
        inside.release()
        return on_device(batch, generator)

    host_calls: list[Any] = []

    def recorded_on_host(batch: Any, generator: torch.Generator) -> Any:
        host_calls.append(batch["id"].tolist())
        return on_host(batch, generator)

    options = {"host_transform": recorded_on_host, "device_transform": recorded}
    got = batches_of(feeder_of(kind, **options, depth=5), 1)
    assert calls == host_calls == [batch["id"].tolist() for batch in got]


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("name", ["host_transform", "device_transform"])
@pytest.mark.parametrize("kind", ["feeder", "loader", "table"])
def test_an_error_names_its_batch_and_ends_one_epoch(kind: str, name: str, depth: int) -> None:
    n_calls = 0

    def failing(batch: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 4:
            raise KeyError("no such label")
        if n_calls == 6:
            raise StopIteration
        return None if n_calls == 8 else batch

    functions = {"host_transform": None, "device_transform": None, name: failing}
    with feeder_of(kind, **functions, seed=3 if kind == "feeder" else None, depth=depth) as feeder:
        got = 0
        with pytest.raises(KeyError, match="no such label") as found:
            for _ in feeder:
                got += 1
        assert got == 3
        note = f"in {name} of batch 3, epoch 0"
        assert note in found.value.__notes__
        n_calls = 4
        with pytest.raises(WorkerError, match=r"failing .* raised StopIteration"):
            list(feeder)
        n_calls = 6
        with pytest.raises(ArgumentError, match=f"^{name} of batch 1, epoch 2 returned None; exp"):
            list(feeder)
        n_calls = 8
        assert len(list(feeder)) == 7


@pytest.mark.parametrize("kind", ["feeder", "loader"])
def test_functions_do_not_see_the_modes_of_the_loop(kind: str) -> None:
    def seen(batch: Any) -> Any:
        batch["x"].add_(1)
        product = batch["x"] @ batch["x"].T
        assert not torch.is_grad_enabled()
        return {"x": product, "new": torch.zeros(1), "id": batch["id"]}

    found = []
    # A DataLoader itself does not run with a default device that has no values.
    default, seed = ("meta", 3) if kind == "feeder" else ("cpu", None)
    functions: Any = {"host_transform": seen, "device_transform": seen, "seed": seed}
    for depth in (0, 2):
        with (
            torch.inference_mode(),
            torch.autocast("cpu", torch.bfloat16),
            torch.device(default),
            feeder_of(kind, depth=depth, **functions) as feeder,
        ):
            found.append(list(feeder))
    for synchronous, prefetched in zip(*found, strict=True):
        for key in synchronous:
            assert torch.equal(synchronous[key], prefetched[key])
            assert synchronous[key].is_inference() == prefetched[key].is_inference() is False
        assert synchronous["x"].dtype is torch.float32
        assert synchronous["new"].device.type == "cpu"


def test_the_host_function_sees_the_batch_of_the_loader_itself() -> None:
    batches = [{"x": torch.zeros(2), "name": "a"}, {"x": torch.ones(2), "name": "b"}]
    seen = []

    def note(batch: Any) -> Any:
        seen.append(batch)
        return batch

    got = list(wrap_loader(batches, device="cpu", host_transform=note, depth=1))
    assert all(ours is theirs for ours, theirs in zip(seen, batches, strict=True))
    assert [batch["name"] for batch in got] == ["a", "b"]


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("kind", ["feeder", "fetch"])
def test_only_with_a_limit_is_freed_memory_returned_after_calls(
    kind: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The threads of the two transforms may call them at the same time.
    events: dict[int, list[str]] = collections.defaultdict(list)

    def note(event: str) -> None:
        events[threading.get_ident()].append(event)

    def host(batch: Any) -> Any:
        note("call")
        return batch

    def device(batch: Any, generator: torch.Generator) -> Any:
        note("call")
        return on_device(batch, generator)

    monkeypatch.setattr(base_feeder, "trim_heap", lambda: note("trim"))
    functions: dict[str, Any] = {"host_transform": host, "device_transform": device}
    rows = (X, "id") if kind == "fetch" else {"x": X, "id": IDS}
    for config, is_limited in (
        (Config(cpu_memory_limit=MiB(64), preferred_batch_size=SIZE), True),
        (Config(preferred_batch_size=SIZE), False),
        (None, False),
    ):
        options: Any = {"device": "cpu", "depth": depth, "config": config, **functions}
        if kind == "fetch":
            feeder = wrap_loader(loader(), fetch={"row": rows}, **options)
        else:
            feeder = Feeder(rows, batch_size=None if config else SIZE, **options)
        events.clear()
        with feeder:
            n = len(list(feeder))
        cycle = ["call", "trim"] if is_limited else ["call"]
        assert sum(map(len, events.values())) == 2 * n * len(cycle)
        for found in events.values():
            assert found == cycle * (len(found) // len(cycle))


@pytest.mark.parametrize("depth", [0, 2])
def test_ids_that_a_function_changes_are_searched_again(depth: int) -> None:
    table = HostEmbedding(13, 2, store=ArrayStore(TABLE.copy()))
    batches = [torch.tensor([3, 5, 3]), torch.tensor([7, 1, 1])]
    same = train_rows(
        batches,
        {table: lambda batch: batch},
        device="cpu",
        depth=depth,
        device_transform=lambda batch: batch,
    )
    for ids, given in zip(same, batches, strict=True):
        assert torch.equal(table(ids), torch.from_numpy(TABLE[given]))
    swapped = train_rows(
        [batch.clone() for batch in batches],
        {table: lambda batch: batch},
        device="cpu",
        depth=depth,
        device_transform=lambda batch: batch.copy_(batch.flip(0)),
    )
    for ids, given in zip(swapped, batches, strict=True):
        assert torch.equal(table(ids), torch.from_numpy(TABLE[given.flip(0)]))
    wrong = train_rows(
        [batch.clone() for batch in batches],
        {table: lambda batch: batch},
        device="cpu",
        depth=depth,
        device_transform=lambda batch: batch.add_(1),
    )
    with pytest.raises(RowIndexError, match="was not announced"):
        for ids in wrong:
            table(ids)


def test_changed_batches_cannot_be_written_back() -> None:
    x = X.copy()
    with Feeder(x, batch_size=SIZE, device="cpu", host_transform=lambda x: (x, len(x))) as feeder:
        for i, batch in enumerate(feeder.batches()):
            assert batch.rows.tolist() == list(range(i * SIZE, min((i + 1) * SIZE, N)))
            assert torch.equal(batch.data[0], torch.from_numpy(X[batch.rows]))
            with pytest.raises(WriteBackError, match="without these functions"):
                batch.write_back(batch.data[0])
    assert (x == X).all()


def test_bad_arguments_are_refused() -> None:
    def generated(batch: Any) -> Iterator[Any]:
        yield batch

    def refused(match: str, make: Callable[..., Any], **options: Any) -> None:
        with pytest.raises(ArgumentError, match=match):
            make(**options)

    rows = functools.partial(Feeder, X, batch_size=SIZE, device="cpu")
    of_loader = functools.partial(wrap_loader, [torch.zeros(2)], device="cpu")
    table = HostEmbedding(13, 2)
    of_table = functools.partial(train_rows, [torch.zeros(2)], {table: lambda b: b}, device="cpu")
    for make in (rows, of_loader, of_table):
        refused("^host_transform=3: expected a function", make, host_transform=3)
        refused("^device_transform='x': ", make, device_transform="x")
        refused("is a generator function.* replace yield", make, host_transform=generated)
    refused("^verify=True was given with", rows, verify=True, device_transform=abs)
    refused("^route='direct' was given with", rows, route="direct", host_transform=abs)
    refused("^seed=1 was given without shuffle", rows, seed=1, host_transform=abs)
    rows(seed=1, host_transform=on_host).close()
    bound = functools.partial(on_host, generator=torch.Generator())
    for make in (of_loader, of_table):
        refused("^seed=1 was given, but no function with a param", make, seed=1)
        refused("^seed=1 was given, but no function", make, seed=1, host_transform=bound)
        refused("^seed='x': expected a whole number", make, seed="x", host_transform=on_host)
        make(seed=-1, host_transform=on_host).close()


@pytest.mark.parametrize("depth", [0, 2])
def test_a_loop_continues_after_the_error_of_a_function(depth: int) -> None:
    """The numbers of later batches, and so their generators, are as without the errors."""

    def host(batch: Any, generator: torch.Generator) -> Any:
        if batch["id"][0] in failing:
            raise KeyError("on the host")
        return on_host(batch, generator)

    def device(batch: Any, generator: torch.Generator) -> Any:
        made = on_device(batch, generator)
        if batch["id"][-1] in failing:
            raise KeyError("on the device")
        return made

    failing: list[int] = []
    feeder = feeder_of(
        "loader", host_transform=host, device_transform=device, on_error="next", depth=depth
    )
    want = list(feeder)
    failing += [int(want[1]["id"][0]), int(want[4]["id"][-1])]
    feeder.set_epoch(0)
    feeder.sampler.generator.manual_seed(5)
    feeder.generator.manual_seed(5)
    got = iter(feeder)
    for i, batch in enumerate(want):
        if i in (1, 4):
            with pytest.raises(KeyError) as found:
                next(got)
            assert f"of batch {i}, epoch 0" in found.value.__notes__[0]
        else:
            assert torch.equal(next(got)["double"], batch["double"])
    assert next(got, None) is None


class Unsized:
    """An object that looks like an array, and whose bytes are unknown."""

    dtype = "rows"
    shape = (None, 3)


class Unreadable:
    """An object whose attributes raise errors."""

    dtype = "rows"

    @property
    def shape(self) -> tuple[int, ...]:
        raise RuntimeError("no rows were read")


@pytest.mark.parametrize("name", ["host_transform", "device_transform"])
def test_functions_may_return_any_object(name: str) -> None:
    """The bytes of returned objects are counted if they are known."""
    made = [Unsized(), Unreadable(), torch.zeros(2)]
    options: dict[str, Any] = {name: lambda batch: made}
    (got,) = wrap_loader([1], device="cpu", **options)
    assert [*map(id, got)] == [*map(id, made)]


def test_tensors_are_found_at_any_depth() -> None:
    tensor = torch.zeros(2)
    nested: Any = collections.deque([tensor])
    for _ in range(3000):
        nested = [nested]
    assert tensors_in(nested) == [tensor]
