"""Models of common kinds, small enough for two cores, with samples, losses and batch sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    input_dtype: str
    output_shape: tuple[int, ...]
    output_dtype: str
    loss: Callable[[Any, Any], torch.Tensor]
    batch_sizes: tuple[int, ...]

    @property
    def shapes(self) -> dict[str, Any]:
        return {
            name: getattr(self, name)
            for name in ("input_shape", "input_dtype", "output_shape", "output_dtype", "loss")
        }


def mlp() -> nn.Module:
    hidden = [layer for _ in range(2) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    return nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), *hidden, nn.Linear(2048, 10))


def cnn() -> nn.Module:
    def stage(n_in: int, n_out: int) -> list[nn.Module]:
        return [
            nn.Conv2d(n_in, n_out, 3, padding=1),
            nn.BatchNorm2d(n_out),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]

    return nn.Sequential(
        *stage(3, 32), *stage(32, 64), *stage(64, 128), nn.Flatten(), nn.Linear(128 * 64, 100)
    )


class Residual(nn.Module):
    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(n_out),
            nn.ReLU(inplace=True),
            nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(n_out),
        )
        same = n_in == n_out and stride == 1
        self.skip = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.skip(x), inplace=True)


def resnet() -> nn.Module:
    """ResNet-18 (He et al., arXiv 1512.03385)."""
    stem = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    widths = [64, 64, 128, 256, 512]
    pairs = list(itertools.pairwise(widths))
    body = [
        block
        for i, (n_in, n) in enumerate(pairs)
        for block in (Residual(n_in, n, 1 if i == 0 else 2), Residual(n, n, 1))
    ]
    return nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


class UNet(nn.Module):
    def __init__(self, n: int = 32) -> None:
        super().__init__()

        def pair(n_in: int, n_out: int) -> nn.Module:
            halves = ((n_in, n_out), (n_out, n_out))
            return nn.Sequential(
                *(
                    x
                    for a, b in halves
                    for x in (nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(8, b), nn.SiLU())
                )
            )

        self.down = nn.ModuleList([pair(3, n), pair(n, 2 * n), pair(2 * n, 4 * n)])
        self.up = nn.ModuleList([pair(6 * n, 2 * n), pair(3 * n, n)])
        self.head = nn.Conv2d(n, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.down[0](x)
        b = self.down[1](functional.max_pool2d(a, 2))
        c = self.down[2](functional.max_pool2d(b, 2))
        y = self.up[0](torch.cat([functional.interpolate(c, scale_factor=2), b], 1))
        return self.head(self.up[1](torch.cat([functional.interpolate(y, scale_factor=2), a], 1)))


class Last(nn.Module):
    """A classifier of the last output of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(128, 512, 2, batch_first=True)
        self.head = nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x)[0][:, -1])


class Block(nn.Module):
    def __init__(self, n: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.dropout = nn.Dropout(dropout)
        self.before = nn.LayerNorm(n)
        self.after = nn.LayerNorm(n)
        self.qkv = nn.Linear(n, 3 * n)
        self.out = nn.Linear(n, n)
        self.wide = nn.Sequential(nn.Linear(n, 4 * n), nn.GELU(), nn.Linear(4 * n, n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(2, (self.n_heads, -1)).transpose(1, 2)
            for part in self.qkv(self.before(x)).chunk(3, 2)
        )
        seen = (
            functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )
        x = x + self.dropout(self.out(seen))
        return x + self.dropout(self.wide(self.after(x)))


class GPT(nn.Module):
    def __init__(
        self,
        *,
        checkpointed: bool = False,
        dropout: float = 0.0,
        n_words: int = 8192,
        n: int = 384,
        length: int = 256,
    ) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.words = nn.Embedding(n_words, n)
        self.places = nn.Embedding(length, n)
        self.blocks = nn.ModuleList(Block(n, 6, dropout) for _ in range(6))
        self.head = nn.Sequential(nn.LayerNorm(n), nn.Linear(n, n_words, bias=False))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x).transpose(1, 2)


def embeddings() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(500_000, 64), nn.Flatten(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)
    )


_CLASS = ((), "int64", functional.cross_entropy)
_WORDS = ((256,), "int64", (256,), "int64", functional.cross_entropy)
ZOO: dict[str, Case] = {
    "MLP": Case(mlp, (1024,), "float32", *_CLASS, (64, 1024, 8192)),
    "CNN with BatchNorm": Case(cnn, (3, 64, 64), "float32", *_CLASS, (8, 64, 256)),
    "ResNet-18": Case(resnet, (3, 224, 224), "float32", *_CLASS, (2, 8, 16)),
    "UNet": Case(
        UNet,
        (3, 128, 128),
        "float32",
        (1, 128, 128),
        "float32",
        functional.binary_cross_entropy_with_logits,
        (1, 4, 16),
    ),
    "LSTM": Case(Last, (64, 128), "float32", *_CLASS, (16, 64)),
    "GPT": Case(GPT, *_WORDS, (1, 4, 16)),
    "GPT with dropout": Case(lambda: GPT(dropout=0.1), *_WORDS, (4,)),
    "GPT, checkpointed": Case(lambda: GPT(checkpointed=True), *_WORDS, (4, 16)),
    "embeddings": Case(
        embeddings,
        (8,),
        "int64",
        (1,),
        "float32",
        functional.binary_cross_entropy_with_logits,
        (64, 4096),
    ),
}
