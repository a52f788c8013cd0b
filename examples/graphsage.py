"""Graph neural networks: the features of sampled nodes, from a file larger than the memory limit.

A DataLoader samples two hops of neighbours of the seeds in each batch. ``fetch`` reads rows for the
ids of a batch: the features of its nodes, and the labels of its seeds. Both are on the device when
the loop receives the batch, and the plan keeps the limit. The losses are those of a loop that has
all features in memory. A batch may be any object: pass PyG's class ``Data`` to ``main`` as
``make_batch``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import pinfeed

N_CLASSES = 8
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class TwoHops:
    """Collate function: the nodes of a batch, and the edges between their positions.

    Args:
        neighbours: Neighbours of each node, shape (n_nodes, n_neighbours).
        fanout: Neighbours of a node that are drawn, with replacement.
    """

    def __init__(self, neighbours: torch.Tensor, fanout: int = 5) -> None:
        self.neighbours = neighbours
        self.fanout = fanout

    def __call__(self, seeds: list[int]) -> dict[str, torch.Tensor]:
        # A prefetched batch must draw the same numbers as one that is made in the loop.
        generator = torch.Generator().manual_seed(seeds[0])
        sources, targets = [torch.tensor(seeds)], []
        for _ in range(2):
            near = self.neighbours[sources[-1]]
            drawn = torch.randint(near.shape[1], (len(near), self.fanout), generator=generator)
            targets.append(sources[-1].repeat_interleave(self.fanout))
            sources.append(near.gather(1, drawn).flatten())
        n_id, place = torch.cat([*sources, *targets]).unique(return_inverse=True)
        seed_at, source, target = place.split([len(seeds), *[sum(map(len, targets))] * 2])
        edges = torch.stack([source, target])
        return {"n_id": n_id, "edges": edges, "seeds": sources[0], "seed_at": seed_at}


class GraphSAGE(nn.Module):
    """Two layers that add a node's features and the mean of its neighbours'."""

    def __init__(self, n_features: int) -> None:
        super().__init__()
        self.own = nn.ModuleList([nn.Linear(n_features, 32), nn.Linear(32, N_CLASSES)])
        self.near = nn.ModuleList([nn.Linear(n_features, 32), nn.Linear(32, N_CLASSES)])

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        n_near = torch.bincount(target, minlength=len(x)).clamp(min=1)[:, None]
        for own, near in zip(self.own, self.near, strict=True):
            means = torch.zeros_like(x).index_add_(0, target, x[source]) / n_near
            x = (own(x) + near(means)).tanh()
        return x


def train(batches: Iterable[Any], n_features: int) -> list[float]:
    """Return the loss of each batch: a pair of what the loader made and what was fetched."""
    torch.manual_seed(0)
    model = GraphSAGE(n_features).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for batch, rows in batches:
        out = model(rows["x"], batch["edges"])[batch["seed_at"]]
        loss = nn.functional.cross_entropy(out, rows["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(
    n_nodes: int = 200_000,
    n_features: int = 128,
    limit: float = 64,
    make_batch: Callable[..., Any] = dict,
) -> None:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "features.npy"
        np.save(path, rng.standard_normal((n_nodes, n_features), np.float32))
        labels = torch.from_numpy(rng.integers(N_CLASSES, size=n_nodes))
        sampler = TwoHops(torch.from_numpy(rng.integers(n_nodes, size=(n_nodes, 12))))
        seeds: Any = range(0, n_nodes, max(1, n_nodes // 4000))

        # The original loop: all features are in memory.
        features = torch.from_numpy(np.load(path))
        plain = (
            (
                {name: part.to(DEVICE) for name, part in batch.items()},
                {"x": features[batch["n_id"]].to(DEVICE), "y": labels[batch["seeds"]].to(DEVICE)},
            )
            for batch in DataLoader(seeds, batch_size=128, collate_fn=sampler)
        )
        expected = train(plain, n_features)

        loader = DataLoader(
            seeds, batch_size=128, collate_fn=lambda some: make_batch(**sampler(some))
        )
        # "n_id" is a key of the batch. A function of the batch works as well.
        fetch = {"x": (path, "n_id"), "y": (labels, lambda batch: batch["seeds"])}
        config = pinfeed.Config(cpu_memory_limit=pinfeed.MiB(limit))
        with pinfeed.wrap_loader(loader, fetch=fetch, config=config, device=DEVICE) as batches:
            losses = train(batches, n_features)
        # The batches are equal bit for bit. A GPU, or several threads, add the neighbours of a node
        # in any order, so the last digits of a loss differ between two runs of either loop.
        np.testing.assert_allclose(losses, expected, rtol=1e-5 if DEVICE.type == "cpu" else 1e-3)
        size = path.stat().st_size >> 20
        print(
            f"{len(expected)} losses, equal to those of the plain loop, from {size} MiB of features"
        )


if __name__ == "__main__":
    main()
