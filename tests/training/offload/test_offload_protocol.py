"""Steps with Offload equal plain steps on any schedule of the device.

Each wait of offload_transfer.py is needed, and none is missing.
"""

import itertools
import linecache
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.schedules import corners, randomly, switch
from support.simtorch import META, SimTensor, SimTorchDevice
from torch import nn

from pinfeed import KiB, MiB
from pinfeed.testing import favour, lazy
from pinfeed.testing.sim_streams import SimMemory
from pinfeed.training.large_batch.whole_steps import recomputed
from pinfeed.training.offload.offload import Offload
from pinfeed.training.offload.saved_tensors import (
    Geometry,
    Storages,
    with_lazy_flags,
)

CORNERS = corners({"compute": (20, 60, 150), "read": (2, 6, 20), "write": (2, 6, 20)})


class SimStorages(Storages):
    """Storages of a simulated device: its tensors report ``meta``, their memory is the device's."""

    def is_dense(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, SimTensor)

    def owner(self, tensor: Any) -> SimMemory:
        return tensor.memory

    def nbytes(self, owner: SimMemory) -> int:
        return len(owner.contents)

    def bytes_in(self, tensor: Any, cut: range) -> SimTensor:
        raw = torch.empty(0, dtype=torch.uint8).set_(
            tensor.raw.untyped_storage(), cut.start, (len(cut),), (1,)
        )
        return SimTensor(tensor.sim, tensor.memory, raw)

    def rebuild(self, piece: Any, geometry: Geometry) -> torch.Tensor:
        first = piece.raw.storage_offset() // geometry.dtype.itemsize + geometry.offset
        raw = torch.empty(0, dtype=geometry.dtype).set_(
            piece.raw.untyped_storage(), first, geometry.shape, geometry.strides
        )
        return with_lazy_flags(SimTensor(piece.sim, piece.memory, raw), geometry)

    def version_probe(self, tensor: torch.Tensor) -> torch.Tensor:
        probe: Any = tensor.detach()
        del probe.memory, probe.raw, probe._array
        return probe


class SimOffload(Offload):
    storages = SimStorages


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


class Model(nn.Module):
    """A step with views, a skip connection, a change in place and a tied weight.

    All storages have one size, so that freed memory is used again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(8, 8) / 4 for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = y = x @ self.weights[0]
        for weight in (*self.weights, self.weights[1]):
            y = (y @ weight).tanh()
            a, b = y.chunk(2, 1)
            y = torch.cat((a * b, (a + b).relu_()), 1)
        return (y * first).exp() * y.t()


class Run:
    """Steps with all that a loop may do in between, on a simulated device or plainly on the CPU.

    Args:
        n_steps: Number of steps.
        does: What the steps do in turn: ``plain``, ``drop`` the graph without a backward pass,
            ``retain`` it for a second one, ``part`` for one through the beginning only, ``two``
            graphs at a time.
        streams: Streams in which the steps run in turn; each step waits for the one before.
    """

    def __init__(
        self,
        n_steps: int = 3,
        does: tuple[str, ...] = ("plain",),
        streams: tuple[str, ...] = ("compute",),
    ) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.inputs = [torch.randn(8, 8) for _ in range(n_steps)]
        self.does = does
        self.streams = streams
        self.found: list[torch.Tensor] = []

    def plainly(self) -> list[torch.Tensor]:
        for i, x in enumerate(self.inputs):
            self.backward(i, self.model(x), self.model(x + 1) if self.doing(i) == "two" else None)
        return self.found

    def offloaded(self, device: SimTorchDevice, **kwargs: Any) -> list[torch.Tensor]:
        with device.factories():
            self.model.to(META)
            inputs = [x.to(META) for x in self.inputs]
            with SimOffload(device, threshold=0, **kwargs) as offload:
                for i, x in enumerate(inputs):
                    if len(self.streams) > 1:
                        switch(device, self.streams[i % len(self.streams)])
                    with offload.step(self.model):
                        y = self.model(x)
                        self.temporaries()
                        other = self.model(x + 1) if self.doing(i) == "two" else None
                    self.temporaries()
                    self.backward(i, y, other)
                    del y, other
                    assert offload.stats.host_bytes == 0
                    self.temporaries()
                assert offload.stats.blocks_bytes <= kwargs.get("host_limit", 1 << 60)
            later = self.temporaries(7.0)
            self.found = [device.host(tensor) for tensor in self.found]
            later = [device.host(tensor) for tensor in later]
            device.drain()
        assert all(bool((tensor == 7).all()) for tensor in later), (
            "memory written after the loop had ended"
        )
        return self.found

    def doing(self, i: int) -> str:
        return self.does[i % len(self.does)]

    def backward(self, i: int, y: torch.Tensor, other: torch.Tensor | None) -> None:
        doing, weights = self.doing(i), list(self.model.parameters())
        if doing == "drop":
            return
        loss = y.sum() if other is None else (y * other).sum()
        if doing in ("retain", "part"):
            self.found += torch.autograd.grad(
                loss, weights[2 if doing == "part" else 0 :], retain_graph=True
            )
        self.found += torch.autograd.grad(loss, weights)

    @staticmethod
    def temporaries(value: float = -2.0) -> list[torch.Tensor]:
        """Allocate temporary tensors, as a model does, in memory that is free."""
        if not isinstance(torch.empty(0, device=META), SimTensor):
            return []
        return [torch.full(shape, value, device=META) for shape in [(8, 8)] * 12] + [
            torch.full((256,), int(value) % 256, dtype=torch.uint8, device=META) for _ in range(12)
        ]


OPTIONS: list[dict[str, Any]] = [
    {"device_limit": device_limit, "host_limit": host_limit}
    for device_limit in (1, 600, MiB(1))
    for host_limit in (MiB(1), KiB(32))
]
DOES = ("plain", "drop", "retain", "two", "part", "plain")


def check(device: SimTorchDevice, options: dict[str, Any], *args: Any) -> None:
    got, want = Run(*args).offloaded(device, **options), Run(*args).plainly()
    assert len(got) == len(want)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("number", "options"), list(enumerate(OPTIONS)), ids=str)
def test_every_action_of_a_loop(number: int, options: dict[str, Any]) -> None:
    """Each schedule meets every window and every limit, with one stream and with two."""
    streams = ("compute", "second")
    schedules = ((lazy, favour("write")), (favour("read"), favour("compute")))[
        (number // 2 + number) % 2
    ]
    for i, choose in enumerate(schedules):
        check(
            SimTorchDevice(choose), options, len(DOES), DOES, streams[: 1 + (number // 2 + i) % 2]
        )


@pytest.mark.sweep(3)
@pytest.mark.parametrize("i", [1, 2])
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[2]], ids=str)
def test_a_loop_that_changes_its_stream_once(options: dict[str, Any], i: int) -> None:
    streams = ("compute",) * i + ("second",) * (3 - i)
    for choose in (lazy, favour("read"), favour("compute")):
        check(SimTorchDevice(choose), options, 3, ("plain", "retain", "plain"), streams)


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "corner",
    [
        pytest.param(corner, marks=[pytest.mark.stress] if i % 3 else [])
        for i, corner in enumerate(CORNERS)
    ],
)
def test_corner_schedules(corner: str) -> None:
    rng = random.Random(corner)
    check(SimTorchDevice(CORNERS[corner]()), rng.choice(OPTIONS), 3, tuple(rng.sample(DOES, 3)))


@pytest.mark.parametrize("choose", [lazy, favour("write"), favour("read"), favour("compute")])
def test_recomputed_parts_on_any_schedule(choose: Any) -> None:
    """Only the inputs of parts are moved; each part has two layers."""

    def steps(device: SimTorchDevice | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = (layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh()))
        model = nn.Sequential(*layers)
        inputs = [torch.randn(8, 8) for _ in range(3)]
        found = []
        if device is None:
            for x in inputs:
                found += torch.autograd.grad(model(x).exp().sum(), list(model.parameters()))
            return found
        with device.factories():
            model.to(META)
            inputs = [x.to(META) for x in inputs]
            with SimOffload(device, threshold=0, host_limit=KiB(64), device_limit=1) as offload:
                for x in inputs:
                    with recomputed(model), offload.step(model, x):
                        loss = model(x).exp().sum()
                    Run.temporaries()
                    found += torch.autograd.grad(loss, list(model.parameters()))
                assert 0 < offload.stats.n_storages <= 3 * len(inputs)
            found = [device.host(tensor) for tensor in found]
            device.drain()
        return found

    assert all(map(torch.equal, steps(SimTorchDevice(choose)), steps(None)))


def random_run(seed: int) -> None:
    rng = random.Random(seed)
    does = tuple(rng.choice(DOES) for _ in range(3))
    check(
        SimTorchDevice(randomly(seed)),
        rng.choice(OPTIONS),
        3,
        does,
        rng.choice([("compute",), ("compute", "second"), ("compute", "second", "second")]),
    )


@pytest.mark.sweep(4)
@pytest.mark.parametrize("seed", range(12))
def test_random_schedules(seed: int) -> None:
    random_run(seed)


@pytest.mark.stress
@pytest.mark.parametrize("start", range(1000, 2000, 100))
def test_many_random_schedules(start: int) -> None:
    for seed in range(start, start + 100):
        random_run(seed)


def test_the_device_holds_no_more_than_the_limit() -> None:
    def peak(device_limit: int | None) -> int:
        device = SimTorchDevice(lazy)
        with (
            device.factories(),
            SimOffload(
                device, threshold=0, host_limit=MiB(1), device_limit=device_limit or 1
            ) as offload,
        ):
            y = x = torch.randn(1000, requires_grad=True).to(META).requires_grad_()
            with offload.step() if device_limit else torch.enable_grad():
                for _ in range(20):
                    y = y.tanh()
            y.sum().backward()
            if device_limit:
                assert offload.stats.n_missed == 0
            del x, y
        return device.peak_bytes

    plain, least = peak(None), peak(1)
    assert plain >= 20 * 4000
    assert least <= 7 * 4000
    assert least < peak(4 * 4000) <= least + 4 * 4000


def test_computation_waits_for_copies_only_at_the_limit() -> None:
    """The links copy nothing, and computation continues until the limit is reached."""
    device = SimTorchDevice(favour("compute"))
    values = torch.randn(64)
    with (
        device.factories(),
        SimOffload(device, threshold=0, host_limit=KiB(64), device_limit=4 * 256) as offload,
    ):
        for n_free in (5, 4):
            y = x = values.to(META).requires_grad_()
            computed = []
            with offload.step():
                for _ in range(10):
                    y = y.tanh()
                    computed.append(device.current_stream().record())
            # The first step sends its first tensor when the sixth one is saved.
            assert [one.passed for one in computed] == [True] * n_free + [False] * (10 - n_free)
            assert offload.stats.n_missed == 0
            got = torch.autograd.grad(y.sum(), x)[0]
            got = device.host(got)
            del x, y
            device.drain()
    y = x = values.clone().requires_grad_()
    for _ in range(10):
        y = y.tanh()
    assert torch.equal(got, torch.autograd.grad(y.sum(), x)[0])


def in_two_streams(device: SimTorchDevice) -> None:
    """Steps in independent streams use the same blocks on the host, one after the other."""
    torch.manual_seed(0)
    values = [torch.randn(64) for _ in range(4)]
    want = [
        torch.autograd.grad((y := x.clone().requires_grad_()).exp().tanh().sum(), y)[0]
        for x in values
    ]
    found = []
    with (
        device.factories(),
        SimOffload(device, threshold=0, host_limit=KiB(64), device_limit=1) as offload,
    ):
        inputs = [x.to(META).requires_grad_() for x in values]
        device.drain()
        for i, x in enumerate(inputs):
            device.switch(f"stream {i}")
            with offload.step():
                y = x.exp().tanh()
            found += torch.autograd.grad(y.sum(), x)
            del y
        device.drain()
    assert all(torch.equal(got.raw, one) for got, one in zip(found, want, strict=True))


def elsewhere(device: SimTorchDevice) -> None:
    """A stream may unpack what another one saved if it waited for the values, and no longer."""
    torch.manual_seed(0)
    x = torch.randn(64)
    with device.factories():
        for stream in ("one", "another"):
            with SimOffload(device, threshold=0, host_limit=KiB(64), device_limit=1) as offload:
                moved = x.to(META).requires_grad_()
                with offload.step():
                    y = moved.exp()
                    node, computed = y.grad_fn, device.current_stream().record()
                    # The first result is dropped here.
                    y = y.tanh()
                Run.temporaries()
                if stream == "one":
                    # Unpacking this result prefetches the first one.
                    assert y.grad_fn._saved_result is not None
                del y
                device.switch(stream)
                device.current_stream().wait(computed)
                got = node._saved_result * 1
                device.drain()
            assert torch.equal(got.raw, x.exp())
            device.switch("compute")


def passed(device: SimTorchDevice) -> None:
    """Memory of a piece that was prefetched is reused when the graph is dropped."""
    with (
        device.factories(),
        SimOffload(device, threshold=0, host_limit=KiB(64), device_limit=1) as offload,
    ):
        x = torch.randn(64).to(META).requires_grad_()
        with offload.step():
            y = x.exp().tanh()
        assert y.grad_fn._saved_result is not None
        del y
        with offload.step():
            # Offload notices here that the graph was dropped.
            pass
        later = [torch.full((64,), 3.0, device=META) for _ in range(4)]
        device.drain()
        assert all(bool((tensor.raw == 3).all()) for tensor in later)


def closed(device: SimTorchDevice) -> None:
    """Graphs may be dropped before and after close(), while their copies still run."""
    with device.factories():
        x = torch.randn(64).to(META).requires_grad_()
        for touched, kept, after in itertools.product((False, True), repeat=3):
            with SimOffload(device, threshold=0, host_limit=KiB(64), device_limit=1) as offload:
                with offload.step():
                    y = x.exp().tanh().exp().tanh()
                if touched:
                    # This starts the copy back of the result before.
                    assert y.grad_fn._saved_result is not None
                if not kept:
                    del y
            if kept and after:
                # This copies the result before the last one back.
                assert y.grad_fn.next_functions[0][0]._saved_result is not None
            y = None
            device.drain()


def at_once(device: SimTorchDevice) -> None:
    check(device, OPTIONS[0], 3, ("plain",))


def ahead(device: SimTorchDevice) -> None:
    check(device, OPTIONS[2], 4, ("plain", "part", "drop", "plain"))


def foreign(device: SimTorchDevice) -> None:
    """A saved tensor may be allocated for another stream, which continues."""
    torch.manual_seed(0)
    values = torch.randn(64)
    with (
        device.factories(),
        SimOffload(device, threshold=0, host_limit=KiB(64), device_limit=1) as offload,
    ):
        x = values.to(META).requires_grad_()
        switch(device, "other")
        y = x * 2
        switch(device, "compute")
        with offload.step():
            z = y.sin()  # saves y
            del y
            # This saves another tensor and frees y.
            w = z.exp()
        device.switch("other")
        later = [torch.full((64,), 3.0, device=META) for _ in range(4)]
        device.switch("compute")
        got = torch.autograd.grad(w.sum(), x)[0]
        got = device.host(got)
        device.drain()
        assert all(bool((tensor.raw == 3).all()) for tensor in later)
    x = values.clone().requires_grad_()
    assert torch.equal(got, torch.autograd.grad((x * 2).sin().exp().sum(), x)[0])


def saved_twice(device: SimTorchDevice) -> None:
    """Two streams save one tensor; the stream that allocated it continues first."""
    torch.manual_seed(0)
    values = torch.randn(64)
    with (
        device.factories(),
        SimOffload(device, threshold=0, host_limit=KiB(64), device_limit=1) as offload,
    ):
        x = values.to(META).requires_grad_()
        with offload.step():
            y = x * 2
            a = y.sin()
            switch(device, "other")
            # This saves the same piece.
            b = y.cos()
            device.switch("compute")
            del y
            # This saves another tensor and frees the piece.
            a = a.exp()
        later = [torch.full((64,), 3.0, device=META) for _ in range(4)]
        switch(device, "other")
        switch(device, "compute")
        got = device.host(torch.autograd.grad((a * b).sum(), x)[0])
        device.drain()
        assert all(bool((tensor.raw == 3).all()) for tensor in later)
    x = values.clone().requires_grad_()
    assert torch.equal(got, torch.autograd.grad(((x * 2).sin().exp() * (x * 2).cos()).sum(), x)[0])


def all_of_it(device: SimTorchDevice) -> None:
    check(device, OPTIONS[1], 3, DOES[:3], ("compute", "second"))


SCENES = [
    closed,
    passed,
    in_two_streams,
    elsewhere,
    foreign,
    saved_twice,
    at_once,
    ahead,
    all_of_it,
]
WORST = (
    "fast ",
    "fast read+pinfeed-read",
    "fast write",
    "fast compute",
    "fast compute+read+pinfeed-read",
    "compute stalls after 20, late ",
)


def worst() -> Iterator[Any]:
    yield from (CORNERS[corner]() for corner in CORNERS if corner in WORST)
    yield from (
        favour("compute", "write"),
        favour("compute", "second", "stream 1"),
        favour("stream 1", "stream 3", "write"),
    )
    yield from (favour("compute", "one", "another"), favour("compute", "one", "another", "read"))
    yield from (favour("other"), favour("other", "compute"))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_every_scene(scene: Any) -> None:
    for choose in worst():
        scene(SimTorchDevice(choose))


def synchronisations() -> list[tuple[str, int]]:
    """Return every call site of wait and sync."""
    sites: set[tuple[str, int]] = set()
    for scene in SCENES:
        device = SimTorchDevice(lazy)
        scene(device)
        sites |= {site for site in device.sites if "tests" not in Path(site[0]).parts}
    return sorted(sites)


def test_every_synchronisation_is_needed() -> None:
    """A device that ignores one wait gives wrong results or uses freed memory on some schedule."""
    sites = synchronisations()
    elsewhere = [site for site in sites if not site[0].endswith("offload_transfer.py")]
    assert not elsewhere, "a wait or sync outside of offload_transfer.py"
    needless = [
        f"{linecache.getline(*site).strip()} ({site})"
        for site in sites
        if not any(
            fails(scene, SimTorchDevice(choose, deaf_to=site))
            for scene in SCENES
            for choose in worst()
        )
    ]
    assert not needless


@pytest.mark.parametrize("scene", [foreign, saved_twice], ids=lambda scene: scene.__name__)
def test_memory_of_another_stream_must_be_shared(scene: Any) -> None:
    """The allocator does not know of copies to the host, and would reuse memory too early."""

    class Forgetful(SimTorchDevice):
        def share(self, tensor: Any, stream: Any) -> None:
            pass

    assert any(fails(scene, Forgetful(choose)) for choose in worst())


def fails(scene: Any, device: SimTorchDevice) -> bool:
    try:
        scene(device)
    except (AssertionError, RuntimeError, IndexError):
        return True
    return False
