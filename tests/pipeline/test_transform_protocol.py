"""Batch transforms give the results of the plain loop in every schedule of the device."""

import itertools
import linecache
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.schedules import next_stream, randomly, stalling, switch
from support.simtorch import META, SimTorchDevice

from pinfeed import ArrayStore, Feeder, HostEmbedding, RowOptimizer, train_rows, wrap_loader
from pinfeed.testing import SimDevice, favour, lazy
from pinfeed.testing.sim import Choose

N, SIZE = 22, 4
X = np.arange(N * 3, dtype=np.float32).reshape(N, 3)
TABLE = np.linspace(0, 1, N * 2, dtype=np.float32).reshape(N, 2)
READ = ("read", "pinfeed-read")
CORNERS: dict[str, Callable[[], Choose]] = {
    f"fast {'+'.join(names)}": partial(favour, *names)
    for names in (
        (),
        READ,
        ("transform", "pinfeed-transform", *READ),
        ("pinfeed-transform", "pinfeed-read"),
        ("pinfeed-transform", "pinfeed-read", "compute"),
        ("compute",),
        ("transform", "pinfeed-transform", "pinfeed-read", "compute"),
    )
} | {
    f"{name} stalls after {moves}": partial(stalling, name, moves, ())
    for name in ("compute", "transform", "read")
    for moves in (8, 20)
}


CORNERS_OF_THREADS: list[Callable[[], Choose]] = [
    partial(favour, *names)
    for names in (
        ("pinfeed-transform", "pinfeed-read"),
        ("pinfeed-device-transform", "pinfeed-transform", "pinfeed-read"),
        ("pinfeed-device-transform", "transform", "pinfeed-transform", "pinfeed-read"),
        ("transform", "compute", "pinfeed-device-transform", "pinfeed-transform", *READ),
    )
]


class Functions:
    """Functions that allocate, change their batch, keep tensors, and draw random numbers."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.tensor([1.0, 2.0, 4.0], device=device)
        self.device = device
        # The program owns this, and frees it after the loop.
        self.zeros = torch.zeros(3, device=device)
        self.last = self.zeros
        # The program frees this after the loop.
        self.total = torch.zeros(SIZE, 3, device=device)

    def on_host(self, batch: Any, generator: torch.Generator) -> Any:
        noise = torch.rand(batch["x"].shape, generator=generator)
        return {**batch, "x": batch["x"] + noise}

    def on_device(self, batch: Any, generator: torch.Generator) -> Any:
        batch, rows = batch if isinstance(batch, tuple) else (batch, {})
        noise = torch.rand(batch["x"].shape, generator=generator).to(self.device)
        batch["x"].mul_(self.scale)
        made = {**batch, "sum": (batch["x"] + noise).sum(1), "last": self.last * 2}
        self.total[: len(batch["x"])].add_(batch["x"])
        # The next call drops these rows, maybe before the device has read them.
        self.last = batch["x"][0]
        return (made, rows) if rows else made


class Run:
    """The batches that a loop has seen, in the device's own time.

    Args:
        kind: One of ``KINDS``.
        stop_after: Number of batches after which the loop is left.
        switch_once: Number of batches after which the loop changes its stream for good.
        n_threads: Number of threads that call ``host_transform``.
    """

    def __init__(
        self,
        kind: str,
        stop_after: int | None = None,
        switch_once: int | None = None,
        n_threads: int = 1,
    ) -> None:
        self.kind = kind
        self.n_threads = n_threads
        self.stop_after = stop_after
        self.switch_once = switch_once
        self.seen: dict[int, dict[str, np.ndarray]] = {}
        self.table = TABLE.copy()

    def on(self, device: Any, depth: int) -> "Run":
        """Run the loop on a device: the simulated one, or ``"cpu"``."""
        is_simulated = isinstance(device, SimDevice)
        functions = Functions(META if is_simulated else torch.device("cpu"))
        batches = self.batches(functions, device, depth)
        for i in range(self.stop_after or N):
            # enumerate() over the batches would hold a batch until the next one arrives.
            if (batch := next(batches, None)) is None:
                break
            self.step(device if is_simulated else None, i, batch)
            # The batch is not held while the next one is made, so its memory can be reused.
            del batch
            if is_simulated and (name := next_stream(i, None, self.switch_once)):
                # The step of a table ends only when the loop requests the next batch.
                switch(device, name) if self.kind == "table" else device.switch(name)
        del batches, functions
        if is_simulated:
            self.use_freed_memory(device)
        return self

    def batches(self, functions: Functions, device: Any, depth: int) -> Iterator[Any]:
        options: dict[str, Any] = {
            "device": device,
            "depth": depth,
            "seed": 7,
            "host_transform": functions.on_host,
            "device_transform": functions.on_device,
            "transform_threads": self.n_threads,
        }
        loader = [
            {
                "x": torch.from_numpy(X[i : i + SIZE].copy()),
                "id": torch.arange(i, min(i + SIZE, N)) % 7,
            }
            for i in range(0, N, SIZE)
        ]
        if self.kind == "rows":
            del options["host_transform"], options["transform_threads"]
            return iter(Feeder({"x": ArrayStore(X)}, batch_size=SIZE, **options))
        if self.kind == "host and device":
            # The size of these batches is unknown, so several threads gather them.
            rows = [range(i, min(i + SIZE, N)) for i in range(0, N, SIZE)]
            return iter(Feeder({"x": ArrayStore(X)}, rows=rows, **options))
        if self.kind == "loader":
            return iter(wrap_loader(loader, **options))
        if self.kind == "fetch":
            fetch = {"row": (TABLE, lambda batch: batch["id"] * 3)}
            return iter(wrap_loader(loader, fetch=fetch, **options))
        return self.table_batches(loader, options)

    def table_batches(self, loader: Any, options: dict[str, Any]) -> Iterator[Any]:
        table = HostEmbedding(N, 2, store=ArrayStore(self.table), name="table")
        optimizer = RowOptimizer(torch.optim.SGD, [table], lr=0.5)
        for batch in train_rows(loader, {table: "id"}, optimizer=optimizer, **options):
            found = table(batch["id"])
            (found.sum(1) * batch["sum"]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            yield {**batch, "found": found.detach()}

    def step(self, device: Any, i: int, batch: Any) -> None:
        batch, rows = batch if isinstance(batch, tuple) else (batch, {})
        tensors = {**batch, **rows}
        if device is None:
            self.seen[i] = {key: value.numpy().copy() for key, value in tensors.items()}
            return

        def keep(*arrays: np.ndarray) -> None:
            self.seen[i] = {key: a.copy() for key, a in zip(tensors.keys(), arrays, strict=True)}

        tensors = dict(tensors)
        device.launch(keep, *tensors.values())
        del batch, rows
        for key in tensors:
            tensors[key] = None
        self.use(device, 2)

    def use(self, device: Any, value: int) -> list[Any]:
        """Use as much memory as a batch, as a model does."""
        shapes = [((SIZE, 3), "f4"), ((SIZE,), "f4"), ((SIZE, 2), "f4"), ((1024,), "u1")]
        arrays = [device.array(shape, dtype) for shape, dtype in shapes]
        for array in arrays:
            device.launch(lambda a: a.fill(value), array)
        return arrays

    def use_freed_memory(self, device: Any) -> None:
        """Check that nothing of the loop changes memory that it has freed."""
        arrays = [array for _ in range(6) for array in self.use(device, 7)]
        device.drain()
        assert all((array._array == 7).all() for array in arrays), "memory written after the loop"


KINDS = ("rows", "host and device", "loader", "fetch", "table")
EXPECTED = {kind: Run(kind).on("cpu", 0) for kind in KINDS}


def check(
    device: SimTorchDevice,
    depth: int,
    kind: str,
    stop_after: int | None = None,
    switch_once: int | None = None,
    n_threads: int = 1,
) -> None:
    with device.factories():
        got = Run(kind, stop_after, switch_once, n_threads).on(device, depth)
    want = EXPECTED[kind]
    n_batches = stop_after or len(want.seen)
    assert sorted(got.seen) == list(range(n_batches))
    for i, batch in got.seen.items():
        for key, array in batch.items():
            np.testing.assert_array_equal(array, want.seen[i][key], f"{key} of batch {i}")
    if stop_after is None:
        np.testing.assert_array_equal(got.table, want.table)


@pytest.mark.parametrize("kind", KINDS)
def test_corner_schedules(kind: str) -> None:
    for i, choose in enumerate(CORNERS.values()):
        depth = (2, 1, 5, 0)[i % 4]
        check(SimTorchDevice(choose(), direct=i % 2 == 0), depth, kind, (None, 3)[i % 3 == 2])


@pytest.mark.parametrize("kind", KINDS)
def test_corner_schedules_of_a_loop_that_changes_its_stream_once(kind: str) -> None:
    for i, choose in enumerate(CORNERS.values()):
        device = SimTorchDevice(choose(), direct=i % 2 == 0)
        check(device, (2, 1, 5, 0)[i % 4], kind, switch_once=1 + i % 3)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_corner_schedules_of_several_threads(kind: str) -> None:
    for i, choose in enumerate((*CORNERS.values(), *CORNERS_OF_THREADS)):
        device = SimTorchDevice(choose(), direct=i % 2 == 0)
        n_threads = (2, 4, 3)[i % 3]
        check(device, (2, 1, 5)[i % 3], kind, (None, 3)[i % 5 == 4], None, n_threads)


@pytest.mark.parametrize("seed", range(1150, 1160))
def test_random_schedules_of_several_threads(seed: int) -> None:
    rng = random.Random(seed)
    device = SimTorchDevice(randomly(seed), direct=rng.random() < 0.5)
    options = rng.choice([None, 3]), rng.choice([None, 1, 2]), rng.randint(2, 4)
    check(device, rng.randint(0, 4), rng.choice(KINDS[1:]), *options)


@pytest.mark.parametrize("seed", range(1130, 1140))
def test_random_schedules(seed: int) -> None:
    rng = random.Random(seed)
    device = SimTorchDevice(randomly(seed), direct=rng.random() < 0.5)
    options = rng.choice([None, 3]), rng.choice([None, 1, 2])
    check(device, rng.randint(0, 4), rng.choice(KINDS), *options)


def fails(
    device: SimTorchDevice, kind: str, stop_after: int | None, switch_once: int | None = None
) -> bool:
    try:
        check(device, 2, kind, stop_after, switch_once)
    except AssertionError:
        return True
    return False


def sites_of_transforms() -> list[tuple[str, int]]:
    """Return every call site of wait and sync that concerns functions."""
    device = SimTorchDevice(lazy)
    check(device, 2, "rows")
    lines = {site: linecache.getline(*site) for site in device.sites}
    return sorted(
        site for site, line in lines.items() if "transform" in line or "slot.filled" in line
    )


@pytest.mark.parametrize(
    "site", sites_of_transforms(), ids=lambda s: linecache.getline(*s).split("#")[0].strip()
)
def test_every_wait_for_functions_is_needed(site: tuple[str, int]) -> None:
    """A device that ignores one of them gives wrong results or uses freed memory in a schedule."""
    assert site[0].endswith("transfer.py")
    runs = itertools.product(CORNERS.values(), ("rows",), (None, 3))
    assert any(fails(SimTorchDevice(c(), deaf_to=site), kind, stop) for c, kind, stop in runs)


@pytest.mark.parametrize("name", ["compute", "transform"])
def test_streams_must_share_tensors_of_transforms(name: str) -> None:
    """Memory would be reused while the step, or a later call of a transform, uses it."""

    class Forgetful(SimTorchDevice):
        def share(self, tensor: Any, stream: Any) -> None:
            if stream.name != name:
                super().share(tensor, stream)

    # A later call of a transform follows all steps in the stream that is current then, but not
    # those in an earlier one.
    every = itertools.product(CORNERS.values(), (None, 1, 2, 3))
    assert any(fails(Forgetful(choose()), "rows", None, switch) for choose, switch in every)
