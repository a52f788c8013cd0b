"""Offload on the CPU: equal bits, memory that moves and stays, and graphs of every kind."""

import contextlib
import copy
import gc
import threading
from typing import Any

import pytest
import torch
from support.offload_models import MODELS, assert_same, chain, made, trained
from torch import nn
from torch.utils.checkpoint import checkpoint

from pinfeed import GiB, KiB, MiB
from pinfeed.errors import ArgumentError, ClosedError
from pinfeed.training.offload.offload import Offload

ALL = {"threshold": 0, "host_limit": MiB(64), "device_limit": 0}
"""Sizes with which all saved tensors are moved, except for the last one."""


@pytest.mark.sweep(4)
@pytest.mark.parametrize("limit", [0, KiB(16), MiB(64)])
@pytest.mark.parametrize("device_limit", [0, KiB(2), MiB(1)])
@pytest.mark.parametrize("name", MODELS)
def test_every_bit_is_that_of_the_plain_steps(name: str, device_limit: int, limit: int) -> None:
    with Offload("cpu", host_limit=limit, threshold=0, device_limit=device_limit) as offload:
        assert_same(trained(name, offload), trained(name, None))
        stats = offload.stats
        assert stats.blocks_bytes <= limit
        if device_limit == MiB(1):
            assert stats.kept_bytes == stats.offloaded_bytes == 0
        elif not device_limit:
            assert (stats.kept_bytes > 0) == (limit < MiB(64))
            assert (stats.offloaded_bytes > 0) == (limit > 0)
        assert stats.host_bytes == 0


def test_storages_are_released_and_copied_back() -> None:
    x = torch.randn(100, 100, requires_grad=True)
    with Offload("cpu", **ALL) as offload:
        with offload.step():
            y, lives = chain(x, 5)
        assert [there() for there in lives] == [False] * 4 + [True]
        assert offload.stats.n_storages == 4
        assert offload.stats.offloaded_bytes == 4 * 40_000
        y.sum().backward()
        assert offload.stats.restored_bytes == 4 * 40_000
        assert offload.stats.n_missed == 0
    got = x.grad
    x.grad = None
    chain(x, 5)[0].sum().backward()
    assert torch.equal(got, x.grad)


def test_a_storage_is_copied_once_in_each_direction() -> None:
    x = torch.randn(8, 24, requires_grad=True)
    with Offload("cpu", **ALL | {"device_limit": KiB(1)}) as offload:
        with offload.step():
            y = x.exp()  # saves y
            a, b, c = y.chunk(3, 1)
            loss = (y * y).sum() + (a * b.sin()).sum() + (c.t() * a.t()).sum()
            loss = loss + (y.sum() / x.new_full((512,), 3).requires_grad_().exp()).sum()
        stats = offload.stats
        # The storages are those of y and of the sine; those of the last operations stay.
        assert stats.n_storages == 2
        loss.backward()
        assert offload.stats.restored_bytes == stats.offloaded_bytes == 8 * 24 * 4 + 8 * 8 * 4


def test_a_storage_that_changed_in_between_is_copied_again() -> None:
    x = torch.randn(50, requires_grad=True)

    def loss_of() -> torch.Tensor:
        scale = torch.full((50,), 2.0)
        y = x * scale.clone()
        first = (y * torch.ones(50).add_(1)).sum()
        z = x.exp() + 0
        kept = z * 3
        # The change in place is allowed, because z itself was not saved.
        z.mul_(2)
        return first + (z * kept).sum()

    with Offload("cpu", **ALL) as offload:
        with offload.step():
            loss = loss_of()
        loss.backward()
    got = x.grad
    x.grad = None
    loss_of().backward()
    assert torch.equal(got, x.grad)


def test_storages_that_stay_on_the_device() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.PReLU(64))
    x = torch.randn(32, 64)
    with Offload("cpu", **ALL) as offload:
        with offload.step(model, x):
            outputs = [
                model[0](x).sum(),
                (model[0].weight.t()[:2] * 2.0).exp_(),
                x[1:].sum(0) * model[0].weight,
                torch.ones(1, requires_grad=True).exp(),
            ]
        # The results of exp_ and of the sum are offloaded; the last result stays.
        assert offload.stats.offloaded_bytes == (2 + 1) * 64 * 4
        del outputs
    with Offload("cpu", host_limit=MiB(64), device_limit=0) as offload:
        with offload.step(model):
            y = model(x)  # 8 KiB each
        assert offload.stats.n_storages == 0
        with offload.step(model):
            large = nn.Parameter(torch.randn(300, 300)).exp()
            larger = large.exp()
            y = model(x)
        assert offload.stats.offloaded_bytes == 300 * 300 * 4
        del y, larger


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_casts_of_parameters_stay_on_the_device(kind: torch.dtype) -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(32, 64)
    found = []
    with Offload("cpu", **ALL) as offload:
        for context in (offload.step(model, x), contextlib.nullcontext()):
            model.zero_grad()
            with context:
                if kind is torch.bfloat16:
                    with torch.autocast("cpu", kind):
                        y = model(x).exp().exp()
                else:
                    weights = [layer.weight.to(kind) for layer in model]
                    y = ((x.to(kind) @ weights[0].t()) @ weights[1].t()).exp().exp()
            y.sum().backward()
            found.append([p.grad for p in model.parameters() if p.grad is not None])
    # Two activations and the first exponential; the weights are twice as large.
    assert offload.stats.n_storages == 3
    assert offload.stats.offloaded_bytes <= 3 * 32 * 64 * kind.itemsize
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("n_limit", [0, 1, 3, 9])
def test_the_tensors_saved_last_stay_on_the_device(n_limit: int) -> None:
    """In later steps, the tensors that have to leave are sent as soon as they are saved."""
    x = torch.randn(5000, requires_grad=True)
    with Offload("cpu", **ALL | {"device_limit": n_limit * 20_000}) as offload:
        for n_step in range(3):
            before = offload.stats.n_storages
            n_sent = []
            with offload.step():
                y = x
                for _ in range(8):
                    y = y.tanh()
                    n_sent.append(offload.stats.n_storages - before)
            last = max(0, 8 - 1 - n_limit)
            late = 0 if n_step else 1 + n_limit
            assert n_sent == [min(last, max(0, i - late)) for i in range(1, 9)]
            y.sum().backward()
            del y
        assert offload.stats.n_missed == 0
        assert offload.stats.n_blocks_made == last


def test_what_the_loss_saves_stays_even_beyond_the_limit() -> None:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1000)), torch.randn(64, 8)
    targets = torch.arange(64)
    with Offload("cpu", **ALL | {"device_limit": KiB(1)}) as offload:
        for _ in range(2):
            with offload.step(model, x, targets):
                loss = nn.functional.cross_entropy(model(x), targets)
            loss.backward()
        # The result of tanh, but not the logarithms of the probabilities.
        assert offload.stats.offloaded_bytes == 2 * 64 * 16 * 4


def test_a_small_part_of_a_storage_is_copied_alone() -> None:
    data, weight = torch.randn(1000, 8), nn.Parameter(torch.randn(8, 8))
    with Offload("cpu", **ALL) as offload:
        with offload.step():
            loss = (data[300:310] @ weight).sum()
        assert offload.stats.offloaded_bytes <= 10 * 32 + 512
        loss.backward()
        assert torch.equal(
            weight.grad, torch.autograd.grad((data[300:310] @ weight).sum(), weight)[0]
        )


def test_the_second_step_makes_no_block() -> None:
    with Offload("cpu", **ALL) as offload:
        found = []
        for name in ("conv", "attention", "recurrent"):
            model, inputs = made(name)
            for x in inputs:
                with offload.step(model):
                    loss = model(x).square().sum()
                loss.backward()
                del loss
                found.append(offload.stats.n_blocks_made)
        assert found[0] == found[1] == found[2] < found[3] == found[4] == found[5]
        assert found[6] == found[7] == found[8]
        assert offload.stats.host_bytes == 0


def test_blocks_of_other_sizes_make_way() -> None:
    x = torch.randn(1 << 20, requires_grad=True)
    with Offload("cpu", **ALL | {"host_limit": MiB(9)}) as offload:
        for n in (1 << 20, 1 << 19, 1 << 20, 3 << 18):
            with offload.step():
                y = chain(x[:n] * 1.0, 5)[0]
            assert offload.stats.blocks_bytes <= MiB(9)
            assert (
                offload.stats.host_bytes == MiB(9) // (n * 4) * n * 4 if n < 1 << 20 else 2 * n * 4
            )
            y.sum().backward()
            assert offload.stats.host_bytes == 0
        assert offload.stats.peak_host_bytes <= MiB(9)
        assert offload.stats.kept_bytes > 0


def test_a_refused_lock_keeps_the_rest_on_the_device(caplog: pytest.LogCaptureFixture) -> None:
    from pinfeed.devices.cpu import HostDevice
    from pinfeed.errors import DeviceError

    class Refusing(HostDevice):
        n = 0

        def staging(self, nbytes: int) -> Any:
            self.n += 1
            if self.n > 2:
                raise DeviceError("the driver refused")
            return super().staging(nbytes)

    device = Refusing(n_spare=0)
    x = torch.randn(5000, requires_grad=True)
    with Offload(device, **ALL) as offload:
        with offload.step():
            y, lives = chain(x, 6)
        assert [there() for there in lives] == [False, False, True, True, True, True]
        # The last tensor would stay anyway.
        assert offload.stats.kept_bytes == 3 * 20_000
        assert "the driver refused" in caplog.text
        y.sum().backward()
    assert device.n == 3
    assert torch.equal(x.grad, torch.autograd.grad(chain(x, 6)[0].sum(), x)[0])


def test_a_graph_without_a_backward_pass_gives_all_back() -> None:
    x = torch.randn(5000, requires_grad=True)
    with Offload("cpu", **ALL) as offload:
        with offload.step():
            y = chain(x, 4)[0]
        assert offload.stats.host_bytes == 3 * 20480
        del y
        assert offload.stats.host_bytes == 0
        with pytest.raises(ZeroDivisionError), offload.step():
            chain(x, 4)[0].sum().div(1 // 0)
        gc.collect()
        assert offload.stats.host_bytes == 0
        assert offload.stats.n_blocks_made == 3


@pytest.mark.parametrize(
    "sizes",
    [{"threshold": KiB(64)}, {"threshold": 0, "host_limit": 0}, ALL],
    ids=["small", "no room", "moved"],
)
def test_saved_tensors_keep_no_graph_alive(sizes: dict[str, int]) -> None:
    """An output that its own node saves must not form a reference cycle."""
    with Offload("cpu", **sizes) as offload:
        gc.disable()
        try:
            with offload.step():
                y, lives = chain(torch.randn(500, requires_grad=True), 3)
            del y
            with offload.step():
                pass
            assert not any(there() for there in lives)
        finally:
            gc.enable()


@pytest.mark.parametrize("device_limit", [1, KiB(40), MiB(1)])
def test_retained_graphs(device_limit: int) -> None:
    x = torch.randn(5000, requires_grad=True)
    with Offload("cpu", **ALL | {"device_limit": device_limit}) as offload:
        with offload.step():
            y, lives = chain(x, 6)
        want = torch.autograd.grad(chain(x, 6)[0].sum(), x)[0]
        for _ in range(3):
            got = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
            assert torch.equal(got, want)
        assert device_limit > 1 or not any(there() for there in lives[:-1])
        y.sum().backward()
        assert torch.equal(x.grad, want)
        del y
        assert offload.stats.host_bytes == 0


def test_parts_of_a_graph_in_any_order() -> None:
    x = torch.randn(5000, requires_grad=True)

    def heads() -> list[torch.Tensor]:
        y = chain(x, 4)[0]
        return [chain(y * i, 5)[0].sum() for i in range(1, 5)]

    want = [torch.autograd.grad(head, x)[0] for head in [heads()[i] for i in range(4)]]
    with Offload("cpu", **ALL | {"device_limit": KiB(60)}) as offload:
        with offload.step():
            found = heads()
        for i in (1, 3, 0, 2):
            assert torch.equal(torch.autograd.grad(found[i], x, retain_graph=True)[0], want[i])
        assert offload.stats.n_missed < 16
        del found
        assert offload.stats.host_bytes == 0


def test_another_graph_does_not_keep_the_window() -> None:
    x = torch.randn(5000, requires_grad=True)
    with Offload("cpu", **ALL | {"device_limit": KiB(60)}) as offload:
        with offload.step():
            first, second = chain(x, 12)[0], chain(x, 12)[0]
            chain(x, 4)
        for y in (first, second, first, second):
            before = offload.stats.n_missed
            torch.autograd.grad(y.sum(), x, retain_graph=True)
            assert offload.stats.n_missed <= before + 1


def test_gradients_of_gradients() -> None:
    model, x = (
        nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1), nn.Softplus()),
        torch.randn(9, 20),
    )

    def penalty(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return grad.square().sum() + model(x).mean()

    want = torch.autograd.grad(penalty(x), tuple(model.parameters()), allow_unused=True)
    with Offload("cpu", **ALL | {"device_limit": KiB(1)}) as offload:
        with offload.step(model):
            loss = penalty(x)
        got = torch.autograd.grad(loss, tuple(model.parameters()), allow_unused=True)
        del loss
        assert offload.stats.host_bytes == 0
        with offload.step(model):
            y = model(x.clone().requires_grad_()).sum()
        # This backward pass runs outside of step().
        first = torch.autograd.grad(y, tuple(model.parameters())[:1], create_graph=True)
        first[0].square().sum().backward()
    assert all(
        torch.equal(one, other) for one, other in zip(got, want, strict=True) if other is not None
    )


@pytest.mark.parametrize("where", ["moved", "kept"])
def test_a_change_in_place_is_an_error_as_in_torch(where: str) -> None:
    def loss_of(offload: Offload | None) -> torch.Tensor:
        x = torch.randn(500, requires_grad=True)
        if offload is None:
            y = x.exp()
        else:
            with offload.step():
                y = x.exp()
        with torch.no_grad():
            y[3:].mul_(2)
        return y.sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of(None).backward()
    with (
        Offload("cpu", threshold=0 if where == "moved" else KiB(64)) as offload,
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        loss_of(offload).backward()


def test_backward_passes_in_several_threads() -> None:
    x = [torch.randn(3000, requires_grad=True) for _ in range(4)]
    errors: list[BaseException] = []
    with Offload("cpu", **ALL | {"device_limit": KiB(30)}) as offload:

        def run(x: torch.Tensor) -> None:
            try:
                for _ in range(10):
                    with offload.step():
                        y = chain(x, 8)[0]
                    (got,) = torch.autograd.grad(y.sum(), x)
                    assert torch.equal(got, torch.autograd.grad(chain(x, 8)[0].sum(), x)[0])
            except BaseException as error:  # asserted below
                errors.append(error)

        threads = [threading.Thread(target=run, args=(one,)) for one in x]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        del threads
        assert offload.stats.host_bytes == 0


def test_a_graph_outlives_its_offload() -> None:
    x = torch.randn(5000, requires_grad=True)
    with Offload("cpu", **ALL) as offload, offload.step():
        y = chain(x, 3)[0]
    y.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(chain(x, 3)[0].sum(), x)[0])
    del y
    assert offload.stats.blocks_bytes == 0
    offload.close()
    with pytest.raises(ClosedError, match="closed"), offload.step():
        pass


@pytest.mark.parametrize(
    "sizes", [{"host_limit": -1}, {"device_limit": -1}, {"threshold": -GiB(1)}]
)
def test_invalid_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(sizes))):
        Offload("cpu", **sizes)


def test_a_copied_model_is_another_one() -> None:
    model = nn.Linear(200, 200)
    other, x = copy.deepcopy(model), torch.randn(200, 200)
    with Offload("cpu", **ALL) as offload:
        with offload.step(model):
            other(model(x)).exp()
        # The storages are those of x and of the intermediate result; all weights are leaves.
        assert offload.stats.n_storages == 2


def test_a_node_that_saves_several_tensors_misses_none() -> None:
    """A node asks for its first tensor first, after which the others would not be fetched again."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    x = torch.randn(4, 32, 64)
    with Offload("cpu", host_limit="1GiB", threshold="1KiB", device_limit="512KiB") as offload:
        with offload.step(model, x):
            loss = model(x).square().sum()
        loss.backward()
        assert offload.stats.n_storages > 50
        assert offload.stats.n_missed == 0


def test_only_the_inputs_of_checkpointed_blocks_are_moved() -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList([nn.TransformerEncoderLayer(64, 4, 128) for _ in range(4)])
    x = torch.randn(32, 4, 64)
    gradients = []
    for is_offloaded in (False, True):
        blocks.zero_grad()
        torch.manual_seed(1)
        with Offload("cpu", threshold="1KiB", host_limit="1GiB", device_limit=0) as offload:
            with offload.step(blocks, x) if is_offloaded else contextlib.nullcontext():
                out = x
                for block in blocks:
                    out = checkpoint(block, out, use_reentrant=False)
                loss = out.pow(3).sum()
            loss.backward()
            # The first block has the input, which stays; the loss has the output, saved last.
            assert offload.stats.n_storages == 3 * is_offloaded
        gradients.append([p.grad.clone() for p in blocks.parameters() if p.grad is not None])
    assert all(map(torch.equal, *gradients))
