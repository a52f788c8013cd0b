"""Steps whose saved tensors wait on the host are the plain steps, bit for bit, whatever the device's schedule; memory is bounded."""

import contextlib
import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from pinfeed import GiB, KiB, MiB
from pinfeed.errors import ArgumentError, ClosedError
from pinfeed.training.offload.offload import Offload

# Clock ticks: about 10 ms, a thousand times what a small copy takes.
LATE = 20_000_000
ALL = {"threshold": 0, "host_limit": MiB(64), "window": 1}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch's own threads only wait for each other over tensors as small as these; and sums come in one order."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


# ---- models --------------------------------------------------------------------------------------
class Block(nn.Module):
    """Convolutions, BatchNorm that is used twice, an in-place ReLU, a residual, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.again = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu_(self.norm(self.conv(x)))
        y = y + self.drop(functional.relu(self.norm(self.again(y)), inplace=True))
        return y.mean((2, 3))


class UNet(nn.Module):
    """A skip over everything in between."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 3, 2, 1)
        self.mid = nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.ConvTranspose2d(4, 3, 2, 2)
        self.end = nn.Conv2d(6, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.down(x))
        y = self.up(torch.sigmoid(self.mid(y)))
        return self.end(
            torch.cat((x, y.exp() * y), 1).to(memory_format=torch.channels_last)
        ).flatten(1)


class Attention(nn.Module):
    """Views of one storage, tied weights, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.qkv = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q, k, v = (
            t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        p = functional.dropout((q @ k.mT / 8**0.5).softmax(-1), 0.2)
        return self.out(
            x
            + (p @ v).transpose(1, 2).flatten(2)
            + functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 8, 2, bidirectional=True)
        self.gru = nn.GRU(16, 8)
        self.cell = nn.LSTMCell(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.gru(self.lstm(x)[0])
        state = None
        for t in range(len(y)):
            state = self.cell(y[t], state)
        assert state is not None
        return state[0] * state[1]


class Views(nn.Module):
    """Parts, overlaps, strides, other dtypes and conjugates of the same storages; gates changed in place one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 24) / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        a, b, c, d = y.mul(0.5).unsafe_chunk(4, 1)
        gates = a.sigmoid_() * b.sigmoid_() + c.tanh_() * d.sigmoid_()
        windows = y.exp().as_strided((4, 5), (1, 3), 2)
        complex_ = torch.view_as_complex(torch.view_as_real(torch.fft.fft(y)))
        z = (complex_ * complex_.conj()).imag + torch.view_as_real(
            complex_.conj().resolve_conj().conj() * complex_
        ).sum(-1)
        wide = y[:1].expand(6, -1) * y[1:2]
        small = [y[i : i + 1, :2].exp() * y[i, i].sin() for i in range(4)]
        return torch.cat(
            [
                t.flatten()
                for t in (
                    gates,
                    windows * windows.flip(0),
                    z,
                    wide.exp(),
                    *small,
                    (y.t() * y.t()[0]).cos(),
                )
            ]
        )


class Twice(torch.autograd.Function):
    """Asks for its saved tensors more than once; they are an input, an output and neither."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        ctx.save_for_backward(x, y, x.detach() * 2)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return (
            grad * ctx.saved_tensors[1]
            + ctx.saved_tensors[0] * ctx.saved_tensors[2]
            - ctx.saved_tensors[0] * ctx.saved_tensors[2]
        )


class Odd(nn.Module):
    """Checkpoints, autocast, a function of the user's own, bool masks, a sparse tensor, float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 8)
        self.register_buffer("scale", torch.rand(8) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = Twice.apply(self.first(x)) * self.scale
        y = checkpoint(
            lambda t: functional.dropout(torch.tanh(self.second(t)), 0.4), y, use_reentrant=False
        )
        with torch.autocast(x.device.type, torch.bfloat16):
            z = self.second(y) * self.second(y)
        sparse = torch.eye(len(x), device=x.device).to_sparse()
        y = torch.sparse.mm(sparse, y.masked_fill(y > 0.9, 0) + z.float())
        return y.double().logsumexp(0).float() * torch.where(y > 0, y, y * 2)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "conv": (Block, lambda: torch.randn(4, 3, 8, 8)),
    "unet": (UNet, lambda: torch.randn(2, 3, 8, 8)),
    "attention": (Attention, lambda: torch.randint(0, 11, (3, 7))),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(16, 4, 32, 0.1, batch_first=True),
        lambda: torch.randn(2, 5, 16),
    ),
    "recurrent": (Recurrent, lambda: torch.randn(6, 3, 5)),
    "views": (Views, lambda: torch.randn(6, 12)),
    "odd": (Odd, lambda: torch.randn(5, 6)),
}


def made(name: str) -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    model, inputs = MODELS[name]
    return model(), [inputs() for _ in range(3)]


def trained(
    name: str, offload: Offload | None, device: str = "cpu", late: Sequence[Any] = ()
) -> list[torch.Tensor]:
    """Losses, gradients and what else a model has after three steps."""
    model, inputs = made(name)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for x in inputs:
        x = x.to(device)
        for stream in late:
            with torch.cuda.stream(stream.raw):
                torch.cuda._sleep(LATE)
        if offload is None:
            loss = model(x).square().mean()
        else:
            with offload.step(model):
                loss = model(x).square().mean()
            for stream in late:
                with torch.cuda.stream(stream.raw):
                    torch.cuda._sleep(LATE)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return [*found, *model.state_dict().values()]


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want)
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        assert one.dtype == other.dtype
        assert torch.equal(one, other), f"tensor {i}"


@pytest.mark.parametrize("limit", [0, KiB(24), MiB(64)])
@pytest.mark.parametrize("window", [1, KiB(8), MiB(1)])
@pytest.mark.parametrize("name", MODELS)
def test_every_bit_is_that_of_the_plain_steps(name: str, window: int, limit: int) -> None:
    with Offload("cpu", host_limit=limit, threshold=0, window=window) as offload:
        assert_same(trained(name, offload), trained(name, None))
        stats = offload.stats
        assert stats.blocks_bytes <= limit
        assert (stats.kept_bytes > 0) == (limit < MiB(64))
        assert (stats.offloaded_bytes > 0) == (limit > 0)
        assert stats.host_bytes == 0


# ---- what goes -----------------------------------------------------------------------------------
def alive(storage: Any) -> Callable[[], bool]:
    there = weakref.ref(storage)
    return lambda: there() is not None


def chain(x: torch.Tensor, n: int) -> tuple[torch.Tensor, list[Callable[[], bool]]]:
    """``n`` operations of which each saves its result, and whether these are alive."""
    lives = []
    for _ in range(n):
        x = x.tanh()
        lives.append(alive(x.untyped_storage()))
    return x, lives


def test_storages_are_released_and_come_back() -> None:
    x = torch.randn(100, 100, requires_grad=True)
    with Offload("cpu", **ALL) as offload:
        with offload.step():
            y, lives = chain(x, 5)
        assert [there() for there in lives] == [False] * 4 + [True]
        assert offload.stats.n_storages == 5
        assert offload.stats.offloaded_bytes == 5 * 40_000
        y.sum().backward()
        assert offload.stats.restored_bytes == 5 * 40_000
        assert offload.stats.n_missed == 1
    got = x.grad
    x.grad = None
    chain(x, 5)[0].sum().backward()
    assert torch.equal(got, x.grad)


def test_a_storage_goes_once_and_comes_back_once() -> None:
    x = torch.randn(8, 24, requires_grad=True)
    with Offload("cpu", **ALL) as offload:
        with offload.step():
            y = x.exp()  # saves y
            a, b, c = y.chunk(3, 1)
            loss = (y * y).sum() + (a * b.sin()).sum() + (c.t() * a.t()).sum()
        stats = offload.stats
        # y, and the sine.
        assert stats.n_storages == 2
        assert stats.n_tensors == 8
        loss.backward()
        assert offload.stats.restored_bytes == stats.offloaded_bytes == 8 * 24 * 4 + 8 * 8 * 4


def test_a_storage_changed_in_between_goes_again() -> None:
    x = torch.randn(50, requires_grad=True)

    def loss_of() -> torch.Tensor:
        scale = torch.full((50,), 2.0)
        y = x * scale.clone()
        first = (y * torch.ones(50).add_(1)).sum()
        z = x.exp() + 0
        kept = z * 3
        # z itself was not saved.
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


def test_what_stays() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.PReLU(64))
    x = torch.randn(32, 64)
    with Offload("cpu", host_limit=MiB(64), threshold=0) as offload:
        with offload.step(model, x):
            model[0](x).sum()
            (model[0].weight.t()[:2] * 2.0).exp_()
            x[1:].sum(0) * model[0].weight
        # What exp_ gave, and the sum.
        assert offload.stats.offloaded_bytes == (2 + 1) * 64 * 4
    with Offload("cpu", host_limit=MiB(64)) as offload:
        with offload.step(model):
            model(x)  # 8 KiB each
        assert offload.stats.n_storages == 0
        with offload.step(model):
            nn.Parameter(torch.randn(300, 300)).exp()[0].mul(2)
            model(x)
        assert offload.stats.offloaded_bytes == 300 * 300 * 4


def test_a_small_part_of_much_goes_alone() -> None:
    data, weight = torch.randn(1000, 8), nn.Parameter(torch.randn(8, 8))
    with Offload("cpu", **ALL) as offload:
        with offload.step():
            loss = (data[300:310] @ weight).sum()
        assert offload.stats.offloaded_bytes <= 10 * 32 + 512
        loss.backward()
        assert torch.equal(
            weight.grad, torch.autograd.grad((data[300:310] @ weight).sum(), weight)[0]
        )


# ---- the host ------------------------------------------------------------------------------------
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
    with Offload("cpu", threshold=0, host_limit=MiB(9)) as offload:
        for n in (1 << 20, 1 << 19, 1 << 20, 3 << 18):
            with offload.step():
                y = chain(x[:n] * 1.0, 4)[0]
            assert offload.stats.blocks_bytes <= MiB(9)
            assert (
                offload.stats.host_bytes == MiB(9) // (n * 4) * n * 4 if n < 1 << 20 else 2 * n * 4
            )
            y.sum().backward()
            assert offload.stats.host_bytes == 0
        assert offload.stats.peak_host_bytes <= MiB(9)
        assert offload.stats.kept_bytes > 0


def test_a_refused_lock_keeps_the_rest_on_the_device(caplog: pytest.LogCaptureFixture) -> None:
    from pinfeed.devices import HostDevice
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
        assert offload.stats.kept_bytes == 4 * 20_000
        assert "the driver refused" in caplog.text
        y.sum().backward()
    assert device.n == 3
    assert torch.equal(x.grad, torch.autograd.grad(chain(x, 6)[0].sum(), x)[0])


def test_a_graph_without_a_backward_pass_gives_all_back() -> None:
    x = torch.randn(5000, requires_grad=True)
    with Offload("cpu", **ALL) as offload:
        with offload.step():
            y = chain(x, 3)[0]
        assert offload.stats.host_bytes == 3 * 20480
        del y
        assert offload.stats.host_bytes == 0
        with pytest.raises(ZeroDivisionError), offload.step():
            chain(x, 3)[0].sum().div(1 // 0)
        gc.collect()
        assert offload.stats.host_bytes == 0
        assert offload.stats.n_blocks_made == 3


@pytest.mark.parametrize(
    "sizes",
    [{"threshold": KiB(64)}, {"threshold": 0, "host_limit": 0}, ALL],
    ids=["small", "no room", "moved"],
)
def test_what_is_saved_keeps_no_graph_alive(sizes: dict[str, int]) -> None:
    """An output that its own node saves must not be a cycle, which only the garbage collector would find."""
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


# ---- graphs --------------------------------------------------------------------------------------
@pytest.mark.parametrize("window", [1, KiB(40), MiB(1)])
def test_retained_graphs(window: int) -> None:
    x = torch.randn(5000, requires_grad=True)
    with Offload("cpu", **ALL | {"window": window}) as offload:
        with offload.step():
            y, lives = chain(x, 6)
        want = torch.autograd.grad(chain(x, 6)[0].sum(), x)[0]
        for _ in range(3):
            got = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
            assert torch.equal(got, want)
        assert window > 1 or not any(there() for there in lives[:-1])
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
    with Offload("cpu", **ALL | {"window": KiB(60)}) as offload:
        with offload.step():
            found = heads()
        for i in (1, 3, 0, 2):
            assert torch.equal(torch.autograd.grad(found[i], x, retain_graph=True)[0], want[i])
        assert offload.stats.n_missed < 16
        del found
        assert offload.stats.host_bytes == 0


def test_another_graph_does_not_keep_the_window() -> None:
    x = torch.randn(5000, requires_grad=True)
    with Offload("cpu", **ALL | {"window": KiB(60)}) as offload:
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
    with Offload("cpu", **ALL | {"window": KiB(1)}) as offload:
        with offload.step(model):
            loss = penalty(x)
        got = torch.autograd.grad(loss, tuple(model.parameters()), allow_unused=True)
        del loss
        assert offload.stats.host_bytes == 0
        with offload.step(model):
            y = model(x.clone().requires_grad_()).sum()
        # After the step
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
    with Offload("cpu", **ALL | {"window": KiB(30)}) as offload:

        def run(x: torch.Tensor) -> None:
            try:
                for _ in range(10):
                    with offload.step():
                        y = chain(x, 8)[0]
                    (got,) = torch.autograd.grad(y.sum(), x)
                    assert torch.equal(got, torch.autograd.grad(chain(x, 8)[0].sum(), x)[0])
            except BaseException as error:  # told below
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


@pytest.mark.parametrize("sizes", [{"host_limit": -1}, {"window": 0}, {"threshold": -GiB(1)}])
def test_sizes_that_cannot_be(sizes: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(sizes))):
        Offload("cpu", **sizes)


def test_a_copied_model_is_another_one() -> None:
    model = nn.Linear(200, 200)
    other, x = copy.deepcopy(model), torch.randn(200, 200)
    with Offload("cpu", **ALL) as offload:
        with offload.step(model):
            other(model(x)).sum()
        # x, and what came between; the weights of both are leaves.
        assert offload.stats.n_storages == 2


# ---- CUDA ----------------------------------------------------------------------------------------
@pytest.fixture
def same_kernels() -> Iterator[None]:
    """Have torch choose kernels that add up in one order, where it has them.

    For cuBLAS, conftest.py does the same.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with (
            torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True),
            sdpa_kernel(SDPBackend.MATH),
        ):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.usefixtures("same_kernels")
@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")
@pytest.mark.parametrize("late", ["none", "compute", "write", "read", "all"])
@pytest.mark.parametrize("window", [1, KiB(8), MiB(1)])
@pytest.mark.parametrize("name", MODELS)
def test_every_bit_on_cuda(name: str, window: int, late: str) -> None:
    with Offload("cuda", host_limit=MiB(64), threshold=0, window=window) as offload:
        transfer = offload._transfer
        streams = {
            "compute": offload.device.current_stream(),
            "write": transfer._write,
            "read": transfer._read,
        }
        got = trained(
            name,
            offload,
            "cuda",
            [stream for key, stream in streams.items() if late in (key, "all")],
        )
        assert_same(got, trained(name, None, "cuda"))
        assert offload.stats.offloaded_bytes > 0
        assert offload.stats.host_bytes == 0


@pytest.mark.gpu
def test_the_peak_on_cuda() -> None:
    """Of 64 results of 16 MiB, a few are on the device at a time; and the second step makes no block."""
    x = torch.randn(4 << 20, device="cuda", requires_grad=True)

    def peak(offload: Offload | None) -> int:
        x.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with offload.step() if offload else contextlib.nullcontext():
            y = chain(x, 64)[0].sum()
        y.backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    plain = peak(None)
    want = x.grad
    with Offload("cuda", host_limit=MiB(64 * 16), window=MiB(64)) as offload:
        for _ in range(3):
            assert peak(offload) < plain / 4
            assert torch.equal(x.grad, want)
            assert offload.stats.n_blocks_made == 64
            assert offload.stats.kept_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("late", ["none", "compute", "write", "other"])
def test_memory_of_another_stream_on_cuda(late: str) -> None:
    """A tensor that another stream made is saved, dropped, and its memory is taken again by that stream while it is copied."""
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    want = torch.autograd.grad((x * 2).sin().exp().sum(), x)[0]
    other = torch.cuda.Stream()
    with Offload("cuda", host_limit=MiB(128), threshold=0, window=1) as offload:
        for _ in range(3):
            streams = {
                "compute": torch.cuda.current_stream(),
                "write": offload._transfer._write.raw,
                "other": other,
            }
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                y = x * 2
            torch.cuda.current_stream().wait_stream(other)
            if late != "none":
                with torch.cuda.stream(streams[late]):
                    torch.cuda._sleep(LATE)
            with offload.step():
                z = y.sin()
                del y
                z = z.exp()
            with torch.cuda.stream(other):
                again = [torch.full_like(x, 3.0) for _ in range(4)]
            got = torch.autograd.grad(z.sum(), x)[0]
            torch.cuda.current_stream().wait_stream(other)
            assert torch.equal(got, want)
            assert all(bool((tensor == 3).all()) for tensor in again)


@pytest.mark.gpu
def test_the_host_does_not_wait_on_cuda() -> None:
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    with Offload("cuda", host_limit=MiB(128), window=MiB(8)) as offload:
        for _ in range(2):
            # Blocks are page-locked in the first step.
            torch.cuda.synchronize()
            with torch.cuda.stream(offload._transfer._write.raw):
                torch.cuda._sleep(100 * LATE)
            behind = offload._transfer._write.record()
            with offload.step():
                y = chain(x, 16)[0]
            waited = behind.is_done()
            y.sum().backward()
        assert not waited
