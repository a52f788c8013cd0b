"""Image networks of the second zoo, with other convolutions than those of the first zoo."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional


def pair(n_in: int, n_out: int) -> nn.Module:
    halves = ((n_in, n_out), (n_out, n_out))
    return nn.Sequential(
        *(
            x
            for a, b in halves
            for x in (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
        ),
    )


class TransposedUNet(nn.Module):
    """The U-Net of Ronneberger et al. (arXiv 1505.04597), with batch norms."""

    def __init__(self, n: int = 24) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [pair(3, n), pair(n, 2 * n), pair(2 * n, 4 * n), pair(4 * n, 8 * n)],
        )
        widths = (8 * n, 4 * n, 2 * n, n)
        steps = list(itertools.pairwise(widths))
        self.widen = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in steps)
        self.up = nn.ModuleList(pair(a, b) for a, b in steps)
        self.head = nn.Conv2d(n, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = []
        for stage in self.down[:-1]:
            x = stage(x)
            seen.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.down[-1](x)
        for widen, stage in zip(self.widen, self.up, strict=True):
            x = stage(torch.cat([widen(x), seen.pop()], 1))
        return self.head(x)


class GAN(nn.Module):
    """Generator and discriminator of DCGAN (arXiv 1511.06434), both trained in one step."""

    def __init__(self, n: int = 48) -> None:
        super().__init__()
        ups = [
            layer
            for a, b in ((8, 4), (4, 2), (2, 1))
            for layer in (
                nn.ConvTranspose2d(a * n, b * n, 4, 2, 1, bias=False),
                nn.BatchNorm2d(b * n),
                nn.ReLU(True),
            )
        ]
        first = [
            nn.ConvTranspose2d(100, 8 * n, 4, bias=False),
            nn.BatchNorm2d(8 * n),
            nn.ReLU(True),
        ]
        self.generator = nn.Sequential(
            *first,
            *ups,
            nn.ConvTranspose2d(n, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )
        downs = [
            layer
            for a, b in ((1, 2), (2, 4), (4, 8))
            for layer in (
                nn.Conv2d(a * n, b * n, 4, 2, 1, bias=False),
                nn.BatchNorm2d(b * n),
                nn.LeakyReLU(0.2, True),
            )
        ]
        stem = [nn.Conv2d(3, n, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True)]
        self.critic = nn.Sequential(*stem, *downs, nn.Conv2d(8 * n, 1, 4, bias=False), nn.Flatten())

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        noise = torch.randn(len(images), 100, 1, 1, device=images.device)
        made = self.generator(noise)
        return self.critic(images), self.critic(made.detach()), self.critic(made)


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


class ConvNeXtBlock(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.across = nn.Conv2d(n, n, 7, padding=3, groups=n)
        self.norm = nn.LayerNorm(n)
        self.wide = nn.Sequential(nn.Linear(n, 4 * n), nn.GELU(), nn.Linear(4 * n, n))
        self.scale = nn.Parameter(torch.full((n,), 1e-6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.wide(self.norm(self.across(x).permute(0, 2, 3, 1)))
        return x + (self.scale * y).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """A ConvNeXt, as in Liu et al. (arXiv 2201.03545), with three stages."""

    def __init__(self) -> None:
        super().__init__()
        stem = [nn.Conv2d(3, 64, 4, 4), ConvNeXtBlock(64), ConvNeXtBlock(64)]
        second = [nn.Conv2d(64, 128, 2, 2), ConvNeXtBlock(128), ConvNeXtBlock(128)]
        third = [nn.Conv2d(128, 256, 2, 2), ConvNeXtBlock(256), ConvNeXtBlock(256)]
        self.body = nn.Sequential(*stem, *second, *third)
        self.head = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Inverted(nn.Module):
    """A block of MobileNetV2, or of EfficientNet where channels are weighed."""

    def __init__(
        self,
        n_in: int,
        n_out: int,
        stride: int,
        size: int,
        kind: type[nn.Module],
        weighed: bool,
    ) -> None:
        super().__init__()
        n = 4 * n_in
        self.widen = nn.Sequential(nn.Conv2d(n_in, n, 1, bias=False), nn.BatchNorm2d(n), kind())
        across = nn.Conv2d(n, n, size, stride, size // 2, groups=n, bias=False)
        self.across = nn.Sequential(across, nn.BatchNorm2d(n), kind())
        small = (
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(n, n_in // 4, 1),
            kind(),
            nn.Conv2d(n_in // 4, n, 1),
            nn.Sigmoid(),
        )
        self.weigh = nn.Sequential(*small) if weighed else None
        self.narrow = nn.Sequential(nn.Conv2d(n, n_out, 1, bias=False), nn.BatchNorm2d(n_out))
        self.is_residual = stride == 1 and n_in == n_out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.across(self.widen(x))
        if self.weigh is not None:
            y = y * self.weigh(y)
        y = self.narrow(y)
        return x + y if self.is_residual else y


def _inverted(kind: type[nn.Module], size: int, *, weighed: bool) -> nn.Module:
    stem = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), kind()]
    sizes = ((16, 24, 2), (24, 24, 1), (24, 40, 2), (40, 40, 1), (40, 80, 2), (80, 80, 1))
    body = [Inverted(a, b, stride, size, kind, weighed) for a, b, stride in sizes]
    return nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(80, 100))


def mobilenet() -> nn.Module:
    return _inverted(nn.ReLU6, 3, weighed=False)


def efficientnet() -> nn.Module:
    return _inverted(nn.SiLU, 5, weighed=True)


class Dense(nn.Module):
    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(n_in),
            nn.ReLU(),
            nn.Conv2d(n_in, 4 * n, 1, bias=False),
            nn.BatchNorm2d(4 * n),
            nn.ReLU(),
            nn.Conv2d(4 * n, n, 3, padding=1, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.body(x)], 1)


def densenet(n: int = 16) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 2 * n, 3, padding=1, bias=False)]
    width = 2 * n
    for _ in range(3):
        layers += [Dense(width + i * n, n) for i in range(4)]
        width = width + 4 * n
        layers += [
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width // 2, 1, bias=False),
            nn.AvgPool2d(2),
        ]
        width = width // 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 100))


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    for n_layers, (a, b) in zip(
        (1, 1, 2, 2),
        itertools.pairwise((3, 64, 128, 256, 512)),
        strict=True,
    ):
        for i in range(n_layers):
            layers += [nn.Conv2d(b if i else a, b, 3, padding=1), nn.ReLU(inplace=True)]
        layers.append(nn.MaxPool2d(2))
    head = (
        nn.Flatten(),
        nn.Linear(512 * 16, 1024),
        nn.ReLU(True),
        nn.Dropout(),
        nn.Linear(1024, 100),
    )
    return nn.Sequential(*layers, *head)


class Grouped(nn.Module):
    """A bottleneck of ResNeXt, whose convolution has 8 groups."""

    def __init__(self, n_in: int, n: int, stride: int) -> None:
        super().__init__()
        parts = (
            nn.Conv2d(n_in, n, 1, bias=False),
            nn.Conv2d(n, n, 3, stride, 1, groups=8, bias=False),
        )
        body = [
            layer for conv in parts for layer in (conv, nn.BatchNorm2d(n), nn.ReLU(inplace=True))
        ]
        self.body = nn.Sequential(*body, nn.Conv2d(n, 2 * n, 1, bias=False), nn.BatchNorm2d(2 * n))
        same = n_in == 2 * n and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(n_in, 2 * n, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.skip(x))


def resnext() -> nn.Module:
    stem = [
        nn.Conv2d(3, 32, 7, 2, 3, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    body = [Grouped(32, 64, 1), Grouped(128, 64, 1), Grouped(128, 128, 2), Grouped(256, 128, 1)]
    return nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 100))


class Segmentation(nn.Module):
    """Dilated convolutions side by side, widened bilinearly, as in DeepLab."""

    def __init__(self, n: int = 32) -> None:
        super().__init__()
        stem = ((3, n, 2), (n, 2 * n, 2), (2 * n, 2 * n, 1))
        self.stem = nn.Sequential(
            *(
                x
                for a, b, s in stem
                for x in (nn.Conv2d(a, b, 3, s, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
            ),
        )
        self.sides = nn.ModuleList(nn.Conv2d(2 * n, n, 3, padding=d, dilation=d) for d in (1, 3, 6))
        self.head = nn.Conv2d(3 * n, 21, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stem(x)
        seen = self.head(torch.cat([functional.relu(side(y)) for side in self.sides], 1))
        return functional.interpolate(seen, x.shape[2:], mode="bilinear", align_corners=False)


class Residual(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(n, n, 3, padding=1),
            nn.PReLU(),
            nn.Conv2d(n, n, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


def superresolution(n: int = 48) -> nn.Module:
    blocks = [Residual(n) for _ in range(4)]
    return nn.Sequential(
        nn.Conv2d(3, n, 5, padding=2),
        *blocks,
        nn.Conv2d(n, 12, 3, padding=1),
        nn.PixelShuffle(2),
    )


def convnet_3d() -> nn.Module:
    pairs = itertools.pairwise((3, 24, 48, 96))
    stages = [
        layer
        for a, b in pairs
        for layer in (nn.Conv3d(a, b, 3, padding=1), nn.BatchNorm3d(b), nn.ReLU(), nn.MaxPool3d(2))
    ]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(96, 20))


def vit(n: int = 192) -> nn.Module:
    """A transformer of patches of 8 x 8 whose attention has no dropout."""
    layer = nn.TransformerEncoderLayer(n, 6, 4 * n, 0.0, "gelu", batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return nn.Sequential(_Patches(n), encoder, _Mean(), nn.Linear(n, 100))


class _Patches(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.inner = nn.Conv2d(3, n, 8, 8)
        self.places = nn.Parameter(torch.zeros(144, n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).flatten(2).transpose(1, 2) + self.places


class _Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)
