"""Models of the tests of Offload."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pinfeed.training.offload.offload import Offload

# Clock ticks of a delay: about 10 ms, a thousand times as long as a small copy.
LATE = 20_000_000


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
    """A model with a skip connection over all inner layers."""

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
    """Parts, overlaps, strides, other dtypes and conjugates of the same storages.

    Gates are changed in place, one after the other.
    """

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
    """Return losses, gradients and all other state of a model after three steps."""
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


def alive(storage: Any) -> Callable[[], bool]:
    there = weakref.ref(storage)
    return lambda: there() is not None


def chain(x: torch.Tensor, n: int) -> tuple[torch.Tensor, list[Callable[[], bool]]]:
    """Apply ``n`` operations that save their results; return also whether these are alive."""
    lives = []
    for _ in range(n):
        x = x.tanh()
        lives.append(alive(x.untyped_storage()))
    return x, lives
