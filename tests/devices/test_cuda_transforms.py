"""Batch transforms on a GPU: their stream, memory and random generators.

Run with ``pytest -m gpu``.
"""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from pinfeed import (
    Config,
    Feeder,
    HostEmbedding,
    MiB,
    PinnedStore,
    RowOptimizer,
    train_rows,
    wrap_loader,
)

pytestmark = pytest.mark.gpu

# Clock ticks: about 1 ms, a hundred times what the function of a small batch takes.
LATE = 2_000_000
N, SIZE = 640, 32
X = np.arange(N * 16, dtype=np.float32).reshape(N, 16)


def augmented(batch: Any, generator: torch.Generator) -> Any:
    """Allocate, change the batch in place, and draw random numbers on the GPU, all late."""
    assert generator.device.type == "cuda"
    assert torch.cuda.current_stream() != torch.cuda.default_stream()
    batch, rows = batch if isinstance(batch, tuple) else (batch, {})
    torch.cuda._sleep(LATE)
    batch["x"].mul_(2)
    noise = torch.rand(batch["x"].shape, generator=generator, device="cuda")
    return {"x": batch["x"] + noise, "id": batch["id"], **rows}


def feeder_of(kind: str, depth: int) -> Any:
    options: Any = {"device": "cuda", "depth": depth, "device_transform": augmented, "seed": 3}
    loader = [
        {"x": torch.from_numpy(X[i : i + SIZE].copy()), "id": torch.arange(i, i + SIZE) % 50}
        for i in range(0, N, SIZE)
    ]
    if kind == "rows":
        return Feeder({"x": X, "id": np.arange(N)}, batch_size=SIZE, **options)
    if kind == "pinned":
        x = PinnedStore(X.copy(), pin="auto")
        return Feeder({"x": x, "id": np.arange(N)}, batch_size=SIZE, shuffle=True, **options)
    if kind == "loader":
        return wrap_loader(loader, host_transform=dict, **options)
    if kind == "fetch":
        return wrap_loader(loader, fetch={"row": (X, "id")}, **options)
    table = HostEmbedding(50, 4)
    with torch.no_grad():
        table.store.array[:] = np.linspace(0, 1, 200).reshape(50, 4)
    optimizer = RowOptimizer(torch.optim.SGD, [table], lr=0.5)
    loop = train_rows(loader, {table: "id"}, optimizer=optimizer, **options)
    loop.table, loop.optimizer = table, optimizer
    return loop


def values_of(kind: str, depth: int) -> list[Any]:
    """Return what a late training step computes of each batch, without keeping the batches."""
    seen = []
    with feeder_of(kind, depth) as feeder:
        for batch in feeder:
            torch.cuda._sleep(LATE // 2)
            if kind == "table":
                found = feeder.table(batch["id"])
                (found * batch["x"][:, :4]).sum().backward()
                feeder.optimizer.step()
                feeder.optimizer.zero_grad()
                batch["found"] = found.detach()
            seen.append({key: value.double().sin() for key, value in batch.items()})
            del batch
    return [{key: value.cpu() for key, value in batch.items()} for batch in seen]


@pytest.mark.parametrize("kind", ["rows", "pinned", "loader", "fetch", "table"])
def test_functions_give_the_same_at_every_depth(kind: str) -> None:
    want = values_of(kind, 0)
    for depth in (1, 2, 5):
        got = values_of(kind, depth)
        for ours, theirs in zip(got, want, strict=True):
            for key in theirs:
                assert torch.equal(ours[key], theirs[key]), (depth, key)


def test_the_step_may_change_its_stream() -> None:
    want = values_of("rows", 0)
    streams = itertools.cycle([torch.cuda.Stream() for _ in range(3)])
    seen = []
    with feeder_of("rows", 2) as feeder:
        batches = iter(feeder)
        for stream in streams:
            with torch.cuda.stream(stream):
                if (batch := next(batches, None)) is None:
                    break
                torch.cuda._sleep(LATE // 2)
                seen.append(batch["x"].double().sin())
                del batch
    torch.cuda.synchronize()
    for ours, theirs in zip(seen, want, strict=True):
        assert torch.equal(ours.cpu(), theirs["x"])


def test_a_function_sees_tensors_of_before_the_loop() -> None:
    """The transform waits for tensors that the stream of the loop computes late."""
    torch.cuda._sleep(10 * LATE)
    mean = torch.full((16,), 3.0, device="cuda")
    with Feeder(X, batch_size=SIZE, device="cuda", device_transform=lambda x: x - mean) as feeder:
        got = torch.cat([batch.clone() for batch in feeder])
    assert torch.equal(got.cpu(), torch.from_numpy(X - 3))


def test_a_loop_that_is_left_has_ended_its_transforms() -> None:
    for _ in range(20):
        with feeder_of("rows", 5) as feeder:
            next(iter(feeder))
        # Memory that the loop has freed.
        ones = [torch.ones((SIZE, 16), device="cuda") for _ in range(8)]
        assert all(bool((one == 1).all()) for one in ones)


def test_memory_of_functions_is_within_the_plan() -> None:
    def worked_on(x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(LATE)
        return (x.double() * 2).float()

    x = np.ones((4096, 4096), np.float32)
    limits = Config(cpu_memory_limit=MiB(64), gpu_memory_limit=MiB(64))
    before = torch.cuda.memory_allocated()
    with Feeder(x, config=limits, device="cuda", device_transform=worked_on) as feeder:
        items = {item.what: item.nbytes for item in feeder.plan.items}
        nbytes = feeder.plan.batch_size * x.strides[0]
        assert items["results of device_transform"] == pytest.approx(nbytes, rel=0.1)
        # Two tensors of double precision, and the batch itself.
        assert items["work of device_transform"] >= 2 * nbytes
        torch.cuda.reset_peak_memory_stats()
        for batch in feeder:
            torch.cuda._sleep(2 * LATE)
            del batch
        assert torch.cuda.max_memory_allocated() - before <= feeder.plan.device_bytes <= MiB(64)


def test_a_timeline_has_the_work_of_transforms() -> None:
    def worked_on(x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(LATE)
        return x + 1

    with Feeder(
        X, batch_size=SIZE, device="cuda", device_transform=worked_on, timeline=True
    ) as feeder:
        # The first loop sets the clock.
        list(feeder)
        list(feeder)
        spans = [span for span in feeder.timeline.spans if span.loop == 1]
    worked = [span for span in spans if span.lane == "device_transform"]
    assert [span.batch for span in worked] == list(range(N // SIZE))
    assert all(span.end_s - span.start_s > 0.5e-3 for span in worked)
    copies = {span.batch: span for span in spans if span.lane == "copy"}
    assert all(copies[span.batch].end_s <= span.start_s + 1e-6 for span in worked)
