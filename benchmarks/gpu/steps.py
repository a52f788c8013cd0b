"""Training steps during which rows are copied: matrix products, ResNet-18, an embedding model."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.gpu.bench import wait
from benchmarks.rowcells import RowCell, start
from benchmarks.rowsteps import touched
from benchmarks.zoo import resnet
from pinfeed import HostEmbedding, PinnedStore, RowOptimizer
from pinfeed.training.row_loop.train_rows import RowLoop, train_rows

IMAGE = (3, 224, 224)
N_FIELDS = 32
"""Embeddings of one sample."""

Step = Callable[[Any], object]


class Products:
    """Matrix products of random numbers; zeros would draw less power and run faster.

    Args:
        device: ``cuda`` or ``cpu``.
        n: Rows and columns of the matrices on a GPU.
    """

    def __init__(self, device: str, n: int) -> None:
        self.n = n if device == "cuda" else 256
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._a, self._b = (torch.randn(self.n, self.n, device=device).to(dtype) for _ in range(2))
        self._c = torch.empty_like(self._a)

    def __call__(self, n_times: int = 1) -> None:
        for _ in range(n_times):
            torch.mm(self._a, self._b, out=self._c)


def best_s(products: Products, device: str, n: int = 20) -> float:
    """Return the mean seconds of one product in a sequence of ``n``."""
    products(n)
    wait(device)
    begin = time.perf_counter()
    products(n)
    wait(device)
    return (time.perf_counter() - begin) / n


def random_images(n: int, *, pin: bool) -> PinnedStore:
    """Create images of random bytes."""
    store = PinnedStore.empty((n, *IMAGE), "uint8", pin=pin)
    some = np.random.default_rng(0).integers(256, size=(min(n, 128), *IMAGE), dtype=np.uint8)
    for first in range(0, n, len(some)):
        store.array[first : first + len(some)] = some[: n - first]
    return store


def resnet_step(device: str, batch_size: int) -> Step:
    """Return a training step of ResNet-18 on a batch of images, with bfloat16 autocast."""
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    model = resnet().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    labels = torch.randint(1000, (batch_size,), device=device)

    def step(images: torch.Tensor) -> None:
        x = images.to(memory_format=torch.channels_last).float().div_(255)
        with torch.autocast(device, torch.bfloat16):
            loss = functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class EmbeddingModel:
    """A table of embeddings in host memory, trained with Adam, and a network on the device.

    Args:
        cell: The table and its batches; a batch has ``N_FIELDS`` ids for each sample.
        device: ``cuda`` or ``cpu``.
        n_hidden: Number of hidden layers of the network.
    """

    def __init__(self, cell: RowCell, device: str, n_hidden: int) -> None:
        self._device = device
        torch.manual_seed(0)
        width = N_FIELDS * cell.dim
        layers = [layer for _ in range(n_hidden) for layer in (nn.Linear(width, width), nn.ReLU())]
        self._network = nn.Sequential(*layers, nn.Linear(width, 1)).to(device)
        self._optimizer = torch.optim.SGD(self._network.parameters(), lr=1e-3)
        pinned = PinnedStore(start(cell), pin=device == "cuda")
        self._table = HostEmbedding(cell.n_rows, cell.dim, store=pinned, name="table")
        self._rows = RowOptimizer(torch.optim.Adam, [self._table], state=touched, lr=0.01)

    def loop(self, ids: list[torch.Tensor], depth: int) -> RowLoop:
        """Return a loop over batches of ids, with the rows that they look up."""
        tables = {self._table: lambda batch: batch}
        return train_rows(ids, tables, optimizer=self._rows, depth=depth, device=self._device)

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        """Train the rows and the network on a batch, and return the loss."""
        return self._train(self._table(batch), self._rows)

    def step_alone(self, ids: torch.Tensor) -> Callable[[], object]:
        """Return the step on rows that stay on the device."""
        rows, where = ids.unique(return_inverse=True)
        weight = nn.Parameter(torch.from_numpy(self._table.store.array[rows]).to(self._device))
        where = where.to(self._device)
        optimizer = torch.optim.Adam([weight], lr=0.01)
        return lambda: self._train(functional.embedding(where, weight), optimizer)

    def _train(self, looked_up: torch.Tensor, optimizer: Any) -> torch.Tensor:
        with torch.autocast(self._device, torch.bfloat16):
            loss = (
                self._network(looked_up.reshape(-1, self._network[0].in_features)).square().mean()
            )
        loss.backward()
        for one in (optimizer, self._optimizer):
            one.step()
            one.zero_grad()
        # A graph that is kept alive would keep the size of the weight.
        return loss.detach()
