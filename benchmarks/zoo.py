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

_SMALL_VOCABULARY = 2000


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


class VAE(nn.Module):
    def __init__(self, n: int = 32) -> None:
        super().__init__()
        widths = (3, n, 2 * n, 4 * n)
        self.encoder = nn.Sequential(
            *(
                x
                for a, b in itertools.pairwise(widths)
                for x in (nn.Conv2d(a, b, 3, 2, 1), nn.ReLU())
            ),
            nn.Flatten(),
        )
        self.both = nn.Linear(4 * n * 64, 128)
        self.widen = nn.Linear(64, 4 * n * 64)
        self.decoder = nn.Sequential(
            nn.Unflatten(1, (4 * n, 8, 8)),
            nn.ConvTranspose2d(4 * n, 2 * n, 3, 2, 1, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * n, n, 3, 2, 1, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(n, 3, 3, 2, 1, 1),
        )

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mean, log_variance = self.both(self.encoder(images)).chunk(2, 1)
        drawn = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(self.widen(drawn)), mean, log_variance


class Bert(nn.Module):
    """An encoder with a padding mask and the default dropout."""

    def __init__(self, n: int = 192, length: int = 128) -> None:
        super().__init__()
        self.words = nn.Embedding(_SMALL_VOCABULARY, n)
        self.places = nn.Parameter(torch.zeros(length, n))
        layer = nn.TransformerEncoderLayer(n, 6, 4 * n, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(n, _SMALL_VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        seen = self.encoder(self.words(ids) + self.places, src_key_padding_mask=ids == 1)
        return self.head(seen).transpose(1, 2)


class Translator(nn.Module):
    """An encoder and a decoder. Half of the words are the source, the others the target."""

    def __init__(self, n: int = 192) -> None:
        super().__init__()
        self.words = nn.Embedding(_SMALL_VOCABULARY, n)
        self.inner = nn.Transformer(n, 6, 2, 2, 4 * n, batch_first=True)
        self.head = nn.Linear(n, _SMALL_VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        source, target = self.words(ids).chunk(2, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=ids.device)
        return self.head(self.inner(source, target, tgt_mask=mask, tgt_is_causal=True)).transpose(
            1, 2
        )


class Recurrent(nn.Module):
    """A language model of one or several recurrent layers."""

    def __init__(
        self, kind: type[nn.RNNBase], n: int, n_layers: int, *, both_ways: bool = False
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(_SMALL_VOCABULARY, n)
        self.inner = kind(n, n, n_layers, batch_first=True, bidirectional=both_ways)
        self.head = nn.Linear(n * (1 + both_ways), _SMALL_VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.words(ids))[0]).transpose(1, 2)


class Recommender(nn.Module):
    """Bags of embeddings whose products are classified, as in DLRM."""

    def __init__(self, n: int = 32) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(20_000, n, mode="sum") for _ in range(8))
        self.top = nn.Sequential(nn.Linear(28, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        parts = [bag(one) for bag, one in zip(self.bags, ids.unbind(1), strict=True)]
        vectors = torch.stack(parts, 1)
        rows, columns = torch.triu_indices(8, 8, 1, device=ids.device)
        return self.top((vectors @ vectors.transpose(1, 2))[:, rows, columns])


class GraphConvolution(nn.Module):
    """Message passing along the edges of a graph that all samples share."""

    def __init__(self, n_nodes: int = 256, n_edges: int = 1024, n: int = 64) -> None:
        super().__init__()
        edges = torch.arange(2 * n_edges).reshape(2, -1) * 7 % n_nodes
        self.register_buffer("edges", edges)
        self.layers = nn.ModuleList(nn.Linear(n, n) for _ in range(3))
        self.head = nn.Linear(n, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            messages = layer(x)[:, self.edges[0]]
            x = functional.relu(x + torch.zeros_like(x).index_add(1, self.edges[1], messages))
        return self.head(x.mean(1))


def _vae_loss(outputs: tuple[torch.Tensor, ...], images: torch.Tensor) -> torch.Tensor:
    made, mean, log_variance = outputs
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum()
    return functional.binary_cross_entropy_with_logits(made, images, reduction="sum") + divergence


_LOGITS = functional.binary_cross_entropy_with_logits
_CLASS = ((), "int64", functional.cross_entropy)
_WORDS = ((256,), "int64", (256,), "int64", functional.cross_entropy)
ZOO: dict[str, Case] = {
    "MLP": Case(mlp, (1024,), "float32", *_CLASS, (64, 1024, 8192)),
    "CNN with BatchNorm": Case(cnn, (3, 64, 64), "float32", *_CLASS, (8, 64, 256)),
    "ResNet-18": Case(resnet, (3, 224, 224), "float32", *_CLASS, (2, 8, 16)),
    "UNet": Case(UNet, (3, 128, 128), "float32", (1, 128, 128), "float32", _LOGITS, (1, 4, 16)),
    "LSTM": Case(Last, (64, 128), "float32", *_CLASS, (16, 64)),
    "GPT": Case(GPT, *_WORDS, (1, 4, 16)),
    "GPT with dropout": Case(lambda: GPT(dropout=0.1), *_WORDS, (4,)),
    "GPT, checkpointed": Case(lambda: GPT(checkpointed=True), *_WORDS, (4, 16)),
    "embeddings": Case(embeddings, (8,), "int64", (1,), "float32", _LOGITS, (64, 4096)),
}
_SHORT_WORDS = ((128,), "int64", (128,), "int64", functional.cross_entropy)
_IMAGE = (3, 64, 64)
MORE: dict[str, Case] = {
    "VAE": Case(VAE, _IMAGE, "float32", _IMAGE, "float32", _vae_loss, (8, 64)),
    "BERT": Case(Bert, *_SHORT_WORDS, (2, 16)),
    "encoder-decoder": Case(
        Translator, (128,), "int64", (64,), "int64", functional.cross_entropy, (2, 16)
    ),
    "LSTM, language": Case(lambda: Recurrent(nn.LSTM, 256, 2), *_SHORT_WORDS, (4, 32)),
    "GRU, both ways": Case(
        lambda: Recurrent(nn.GRU, 192, 1, both_ways=True), *_SHORT_WORDS, (4, 32)
    ),
    "recommender": Case(Recommender, (8, 20), "int64", (1,), "float32", _LOGITS, (64, 4096)),
    "graph": Case(GraphConvolution, (256, 64), "float32", *_CLASS, (8, 64)),
}
"""Architectures with other layers than those of ``ZOO``."""
