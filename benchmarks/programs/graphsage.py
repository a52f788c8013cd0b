"""GraphSAGE on sampled neighbours: the features of a batch's nodes are rows of a large file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import pinfeed
from benchmarks.programs.program import DEVICE, OURS, SEED, Program, Step

N_CLASSES = 16


@dataclass(frozen=True)
class Size:
    """Sizes of the graph, of its features and of a batch."""

    n_nodes: int
    n_features: int
    batch_size: int
    memory_limit: float
    n_batches: int
    n_steps: int


SIZES = {
    "full": Size(400_000, 256, 256, pinfeed.MiB(128), 100, 60),
    "quick": Size(300_000, 128, 256, pinfeed.MiB(128), 40, 20),
    "tiny": Size(1000, 16, 64, pinfeed.MiB(128), 4, 3),
}


def prepare(folder: Path, size: Size) -> None:
    """Write the features, the labels and the neighbours of all nodes (in CSR form)."""
    rng = np.random.default_rng(0)
    shape = (size.n_nodes, size.n_features)
    features = np.lib.format.open_memmap(folder / "features.npy", "w+", np.float32, shape)
    for begin in range(0, size.n_nodes, 10_000):
        piece = features[begin : begin + 10_000]
        rng.standard_normal(out=piece, dtype=np.float32)
    features.flush()
    np.save(folder / "labels.npy", rng.integers(N_CLASSES, size=size.n_nodes))
    degrees = rng.integers(1, 30, size.n_nodes)
    offsets = np.concatenate([[0], degrees.cumsum()])
    np.save(folder / "offsets.npy", offsets)
    np.save(folder / "neighbours.npy", rng.integers(size.n_nodes, size=offsets[-1]))


class TwoHops:
    """Collate function that samples neighbours of the seeds, and neighbours of these.

    Args:
        folder: Folder with the graph.
        fanouts: Neighbours of a node that are drawn, with replacement, in each hop.
    """

    def __init__(self, folder: Path, fanouts: tuple[int, int] = (10, 5)) -> None:
        self.offsets = torch.from_numpy(np.load(folder / "offsets.npy"))
        self.neighbours = torch.from_numpy(np.load(folder / "neighbours.npy"))
        self.fanouts = fanouts

    def __call__(self, seeds: list[int]) -> dict[str, torch.Tensor]:
        """Return the nodes of the batch, edges between their positions, and the seeds."""
        generator = torch.Generator().manual_seed(seeds[0])
        reached = [torch.tensor(seeds)]
        targets = []
        for fanout in self.fanouts:
            begin = self.offsets[reached[-1]]
            degree = self.offsets[reached[-1] + 1] - begin
            drawn = torch.rand(len(begin), fanout, generator=generator) * degree[:, None]
            targets.append(reached[-1].repeat_interleave(fanout))
            reached.append(self.neighbours[begin[:, None] + drawn.long()].flatten())
        n_id, place = torch.cat([*reached, *targets]).unique(return_inverse=True)
        n_seeds, n_edges = len(seeds), sum(map(len, targets))
        edges = torch.stack([place[n_seeds : n_seeds + n_edges], place[n_seeds + n_edges :]])
        return {"n_id": n_id, "edges": edges, "seeds": reached[0], "seed_at": place[:n_seeds]}


def make_loader(folder: Path, size: Size) -> DataLoader[Any]:
    """Return the loader of the sampled batches, the same for both programs."""
    generator = torch.Generator().manual_seed(SEED)
    nodes: Any = range(size.n_nodes)
    return DataLoader(
        nodes, size.batch_size, shuffle=True, generator=generator, collate_fn=TwoHops(folder)
    )


def original(folder: Path, size: Size, step: Step) -> None:
    """Index the features of each batch in the loop."""
    loader = make_loader(folder, size)
    features = np.load(folder / "features.npy", mmap_mode="r")
    labels = np.load(folder / "labels.npy")
    for batch in loader:
        x = torch.from_numpy(features[batch["n_id"]]).to(DEVICE)
        y = torch.from_numpy(labels[batch["seeds"]]).to(DEVICE)
        edges = batch["edges"].to(DEVICE)
        seed_at = batch["seed_at"].to(DEVICE)
        step(x, edges, seed_at, y)


def moved(folder: Path, size: Size, step: Step) -> None:
    """Pass ``fetch``, which prefetches the features of each batch."""
    loader = make_loader(folder, size)
    fetch = {"x": (folder / "features.npy", "n_id"), "y": (folder / "labels.npy", "seeds")}
    for batch, got in pinfeed.wrap_loader(loader, fetch=fetch, device=DEVICE):
        step(got["x"], batch["edges"], batch["seed_at"], got["y"])


def limited(folder: Path, size: Size, step: Step) -> None:
    """Pass ``fetch`` for a file that is larger than the memory limit."""
    loader = make_loader(folder, size)
    fetch = {"x": (folder / "features.npy", "n_id"), "y": (folder / "labels.npy", "seeds")}
    config = pinfeed.Config(cpu_memory_limit=size.memory_limit)
    for batch, got in pinfeed.wrap_loader(loader, fetch=fetch, config=config, device=DEVICE):
        step(got["x"], batch["edges"], batch["seed_at"], got["y"])


class GraphSAGE(nn.Module):
    """Two layers that add a node's features and the mean of its neighbours'."""

    def __init__(self, n_features: int, n_hidden: int = 64) -> None:
        super().__init__()
        sizes = [n_features, n_hidden, N_CLASSES]
        self.own = nn.ModuleList(map(nn.Linear, sizes, sizes[1:]))
        self.near = nn.ModuleList(map(nn.Linear, sizes, sizes[1:]))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        n_near = torch.zeros(len(x), 1).index_add_(0, target, torch.ones(len(target), 1))
        for number, (own, near) in enumerate(zip(self.own, self.near, strict=True)):
            x = x if number == 0 else x.relu()
            # A linear layer of the mean is the mean of the linear layer, and has shorter rows.
            messages = near(x)
            added = torch.zeros_like(messages).index_add_(0, target, messages[source])
            x = own(x) + added / n_near.clamp(min=1)
        return x


def make_step(size: Size) -> Step:
    """Return a training step of GraphSAGE with Adam."""
    torch.manual_seed(SEED)
    model = GraphSAGE(size.n_features)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(
        x: torch.Tensor, edges: torch.Tensor, seed_at: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x, edges)[seed_at], y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


PROGRAM = Program(
    title="GraphSAGE, two hops",
    sizes=SIZES,
    prepare=prepare,
    ways={
        "features[n_id] of a memory map": original,
        OURS: moved,
        f"{OURS}, limit of 128 MiB": limited,
    },
    make_step=make_step,
    original=(original,),
    moved=(moved,),
)
