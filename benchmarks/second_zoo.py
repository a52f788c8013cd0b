"""A second zoo: architectures that combine the layers of the first zoo with others."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional

from benchmarks.second_zoo_images import (
    GAN,
    VAE,
    ConvNeXt,
    Segmentation,
    TransposedUNet,
    convnet_3d,
    densenet,
    efficientnet,
    mobilenet,
    resnext,
    superresolution,
    vgg,
    vit,
)
from benchmarks.zoo import Case

_N_WORDS = 2000


class Bert(nn.Module):
    """An encoder with a padding mask and the default dropout."""

    def __init__(self, n: int = 192, length: int = 128) -> None:
        super().__init__()
        self.words = nn.Embedding(_N_WORDS, n)
        self.places = nn.Parameter(torch.zeros(length, n))
        layer = nn.TransformerEncoderLayer(n, 6, 4 * n, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(n, _N_WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        seen = self.encoder(self.words(ids) + self.places, src_key_padding_mask=ids == 1)
        return self.head(seen).transpose(1, 2)


class Translator(nn.Module):
    """An encoder and a decoder. Half of the words are the source, the others the target."""

    def __init__(self, n: int = 192) -> None:
        super().__init__()
        self.words = nn.Embedding(_N_WORDS, n)
        self.inner = nn.Transformer(n, 6, 2, 2, 4 * n, batch_first=True)
        self.head = nn.Linear(n, _N_WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        source, target = self.words(ids).chunk(2, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=ids.device)
        return self.head(self.inner(source, target, tgt_mask=mask, tgt_is_causal=True)).transpose(
            1,
            2,
        )


class Mixer(nn.Module):
    def __init__(self, n: int = 256, n_places: int = 144) -> None:
        super().__init__()

        def wide(size: int) -> nn.Module:
            return nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))

        self.patches = nn.Conv2d(3, n, 8, 8)
        self.places = nn.ModuleList(wide(n_places) for _ in range(4))
        self.channels = nn.ModuleList(wide(n) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(n) for _ in range(8))
        self.head = nn.Linear(n, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for i, (places, channels) in enumerate(zip(self.places, self.channels, strict=True)):
            x = x + places(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * i + 1](x))
        return self.head(x.mean(1))


class Swin(nn.Module):
    """Attention in windows of 6 x 6, shifted in every other block, with a learned bias."""

    def __init__(self, n: int = 96, n_blocks: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, n, 4, 4)
        self.qkv = nn.ModuleList(nn.Linear(n, 3 * n) for _ in range(n_blocks))
        self.out = nn.ModuleList(nn.Linear(n, n) for _ in range(n_blocks))
        self.bias = nn.ParameterList(torch.zeros(3, 36, 36) for _ in range(n_blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(n) for _ in range(2 * n_blocks))

        def wide() -> nn.Module:
            return nn.Sequential(nn.Linear(n, 4 * n), nn.GELU(), nn.Linear(4 * n, n))

        self.wide = nn.ModuleList(wide() for _ in range(n_blocks))
        self.head = nn.Linear(n, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).permute(0, 2, 3, 1)
        for i in range(len(self.qkv)):
            x = x + self.attend(i, self.norms[2 * i](x))
            x = x + self.wide[i](self.norms[2 * i + 1](x))
        return self.head(x.mean((1, 2)))

    def attend(self, i: int, x: torch.Tensor) -> torch.Tensor:
        b, h, w, n = x.shape
        shift = 3 * (i % 2)
        x = x.roll((-shift, -shift), (1, 2)) if shift else x
        windows = x.reshape(b, h // 6, 6, w // 6, 6, n).transpose(2, 3).reshape(-1, 36, n)
        q, k, v = self.qkv[i](windows).reshape(-1, 36, 3, 3, n // 3).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(2, 3) / (n // 3) ** 0.5 + self.bias[i]).softmax(-1)
        seen = self.out[i]((scores @ v).transpose(1, 2).reshape(-1, 36, n))
        x = seen.reshape(b, h // 6, w // 6, 6, 6, n).transpose(2, 3).reshape(b, h, w, n)
        return x.roll((shift, shift), (1, 2)) if shift else x


class Recurrent(nn.Module):
    """A language model of one or several recurrent layers."""

    def __init__(
        self,
        kind: type[nn.RNNBase],
        n: int,
        n_layers: int,
        *,
        both_ways: bool = False,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(_N_WORDS, n)
        self.inner = kind(n, n, n_layers, batch_first=True, bidirectional=both_ways)
        self.head = nn.Linear(n * (1 + both_ways), _N_WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.words(ids))[0]).transpose(1, 2)


class WaveNet(nn.Module):
    """Dilated causal convolutions of sound, with gates and skips."""

    def __init__(self, n: int = 48) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, n, 1)
        self.dilations = [2**i for i in range(8)]
        self.gates = nn.ModuleList(nn.Conv1d(n, 2 * n, 2, dilation=d) for d in self.dilations)
        self.residuals = nn.ModuleList(nn.Conv1d(n, n, 1) for _ in self.dilations)
        self.skips = nn.ModuleList(nn.Conv1d(n, n, 1) for _ in self.dilations)
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(n, 64, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        skipped = torch.zeros((), device=x.device)
        for d, gate, residual, skip in zip(
            self.dilations,
            self.gates,
            self.residuals,
            self.skips,
            strict=True,
        ):
            inner, opened = gate(functional.pad(x, (d, 0))).chunk(2, 1)
            y = inner.tanh() * opened.sigmoid()
            skipped = skipped + skip(y)
            x = x + residual(y)
        return self.head(skipped)


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


class Contrastive(nn.Module):
    """A contrastive loss of two views of each sample through one network."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128)
        pairs = itertools.pairwise(widths)
        stages = [
            layer
            for a, b in pairs
            for layer in (
                nn.Conv2d(a, b, 3, 2, 1, bias=False),
                nn.BatchNorm2d(b),
                nn.LeakyReLU(0.1),
            )
        ]
        self.body = nn.Sequential(
            *stages,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(128, 64),
        )

    def forward(self, views: torch.Tensor) -> torch.Tensor:
        one, other = (functional.normalize(self.body(view), dim=1) for view in views.unbind(1))
        return one @ other.T / 0.1


def _vae_loss(outputs: tuple[torch.Tensor, ...], images: torch.Tensor) -> torch.Tensor:
    made, mean, log_variance = outputs
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum()
    return functional.binary_cross_entropy_with_logits(made, images, reduction="sum") + divergence


def _gan_loss(outputs: tuple[torch.Tensor, ...], targets: torch.Tensor) -> torch.Tensor:
    real, fake, fooled = outputs
    loss = functional.binary_cross_entropy_with_logits
    losses = (loss(real, targets), loss(fake, 1 - targets), loss(fooled, targets))
    return losses[0] + losses[1] + losses[2]


_CLASS = ((), "int64", functional.cross_entropy)
_WORDS = ((128,), "int64", (128,), "int64", functional.cross_entropy)
_BINARY = ((1,), "float32", functional.binary_cross_entropy_with_logits)
_IMAGE = (3, 96, 96)
SECOND_ZOO: dict[str, Case] = {
    "U-Net, transposed": Case(
        TransposedUNet,
        _IMAGE,
        "float32",
        (96, 96),
        "int64",
        functional.cross_entropy,
        (2, 8),
    ),
    "GAN": Case(GAN, (3, 64, 64), "float32", (1,), "float32", _gan_loss, (8, 32)),
    "VAE": Case(VAE, (3, 64, 64), "float32", (3, 64, 64), "float32", _vae_loss, (8, 64)),
    "ConvNeXt": Case(ConvNeXt, _IMAGE, "float32", *_CLASS, (2, 8)),
    "MobileNet": Case(mobilenet, (3, 128, 128), "float32", *_CLASS, (2, 16)),
    "EfficientNet": Case(efficientnet, (3, 128, 128), "float32", *_CLASS, (2, 16)),
    "DenseNet": Case(densenet, (3, 64, 64), "float32", *_CLASS, (4, 16)),
    "VGG": Case(vgg, (3, 64, 64), "float32", *_CLASS, (4, 32)),
    "ResNeXt": Case(resnext, _IMAGE, "float32", *_CLASS, (2, 16)),
    "segmentation": Case(
        Segmentation,
        _IMAGE,
        "float32",
        (96, 96),
        "int64",
        functional.cross_entropy,
        (2, 8),
    ),
    "super-resolution": Case(
        superresolution,
        (3, 48, 48),
        "float32",
        (3, 96, 96),
        "float32",
        functional.l1_loss,
        (2, 16),
    ),
    "3D CNN": Case(convnet_3d, (3, 8, 48, 48), "float32", *_CLASS, (1, 8)),
    "ViT": Case(vit, _IMAGE, "float32", *_CLASS, (4, 32)),
    "Swin": Case(Swin, _IMAGE, "float32", *_CLASS, (4, 16)),
    "MLP-Mixer": Case(Mixer, _IMAGE, "float32", *_CLASS, (4, 32)),
    "BERT": Case(Bert, *_WORDS, (2, 16)),
    "encoder-decoder": Case(
        Translator,
        (128,),
        "int64",
        (64,),
        "int64",
        functional.cross_entropy,
        (2, 16),
    ),
    "LSTM, language": Case(lambda: Recurrent(nn.LSTM, 256, 2), *_WORDS, (4, 32)),
    "GRU, both ways": Case(lambda: Recurrent(nn.GRU, 192, 1, both_ways=True), *_WORDS, (4, 32)),
    "WaveNet": Case(
        WaveNet,
        (1, 2048),
        "float32",
        (2048,),
        "int64",
        functional.cross_entropy,
        (2, 8),
    ),
    "recommender": Case(Recommender, (8, 20), "int64", *_BINARY, (64, 4096)),
    "graph": Case(GraphConvolution, (256, 64), "float32", *_CLASS, (8, 64)),
    "contrastive": Case(Contrastive, (2, *_IMAGE), "float32", *_CLASS, (8, 32)),
}
