"""Films for people: two tables whose rows are sharded over the processes of a job.

The dense part is in DistributedDataParallel. Each process draws its own shard of the ratings, and
may look up any row. Start it with torchrun in any number of processes. The tables and losses equal
those of one process, except for the order of additions:

    torchrun --nproc-per-node 2 examples/sharded_tables.py
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import pinfeed

Rating = dict[str, Any]


class Ratings(Dataset[Rating]):
    """Synthetic ratings: people have tastes, films have traits, and few films are popular."""

    def __init__(self, n_people: int, n_films: int, n: int) -> None:
        rng = np.random.default_rng(0)
        self.person = rng.integers(0, n_people, n)
        self.film = np.minimum(rng.zipf(1.2, n) - 1, n_films - 1)
        tastes, traits = rng.standard_normal((n_people, 4)), rng.standard_normal((n_films, 4))
        self.liked = ((tastes[self.person] * traits[self.film]).sum(1) > 0).astype("f4")

    def __len__(self) -> int:
        return len(self.liked)

    def __getitem__(self, i: int) -> Rating:
        return {"person": self.person[i], "film": self.film[i], "liked": self.liked[i]}


class Match(nn.Module):
    """A score of how well a person and a film match."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3 * dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, person: torch.Tensor, film: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat([person, film, person * film], dim=1)).squeeze(1)


def join_job() -> torch.device:
    """Join the process group of the job, and return the device of this process."""
    cuda = torch.cuda.is_available()
    distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    if not cuda:
        return torch.device("cpu")
    device = torch.device("cuda", distributed.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def train(
    batches: Any, people: Any, films: Any, match: nn.Module, optimizers: list[Any], n_epochs: int
) -> None:
    """Train the tables and the dense part, and print the loss of each epoch."""
    for epoch in range(n_epochs):
        start = time.perf_counter()
        losses = []
        # This sets the epoch of the sampler, too.
        batches.set_epoch(epoch)
        for batch in batches:
            score = match(people(batch["person"]), films(batch["film"]))
            loss = nn.functional.binary_cross_entropy_with_logits(score, batch["liked"])
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        distributed.all_reduce(mean)
        if distributed.get_rank() == 0:
            mean_loss = mean.item() / distributed.get_world_size()
            rate = len(losses) / (time.perf_counter() - start)
            print(f"epoch {epoch}: loss {mean_loss:.4f}, {rate:.0f} steps/s")


def main(arguments: argparse.Namespace) -> None:
    device = join_job()

    # With the same seed, the tables and the dense part begin with equal values on every rank.
    torch.manual_seed(0)
    people = pinfeed.ShardedEmbedding(arguments.people, arguments.dim, name="people")
    films = pinfeed.ShardedEmbedding(arguments.films, arguments.dim, name="films")
    match = DistributedDataParallel(Match(arguments.dim).to(device))
    rows = pinfeed.RowOptimizer(torch.optim.Adam, [people, films], lr=0.02)
    dense = torch.optim.Adam(match.parameters(), lr=0.003)

    ratings = Ratings(arguments.people, arguments.films, arguments.ratings)
    sampler: DistributedSampler[Rating] = DistributedSampler(ratings)
    loader = DataLoader(ratings, batch_size=arguments.batch_size, sampler=sampler)
    batches = pinfeed.train_rows(
        loader,
        {people: "person", films: "film"},
        optimizer=rows,
        depth=arguments.depth,
        device=device,
    )
    with batches:
        train(batches, people, films, match, [rows, dense], arguments.epochs)
    if distributed.get_rank() == 0:
        n_steps = len(loader) * arguments.epochs
        sent = ", ".join(
            f"{name.replace('_', ' ')} {nbytes / n_steps:.0f}"
            for name, nbytes in batches.exchanged._asdict().items()
        )
        print(
            f"{people.store.n_rows} of {arguments.people} people are on rank 0; "
            f"bytes sent per step: {sent}"
        )
    if arguments.save:
        pinfeed.checkpoint.save(
            arguments.save,
            people=people,
            films=films,
            rows=rows,
            dense=dense,
            match=match,
            batches=batches,
        )
    distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--people", type=int, default=20_000)
    parser.add_argument("--films", type=int, default=2_000)
    parser.add_argument("--ratings", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=512, help="of each process")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--save", help="a directory for a checkpoint at the end")
    main(parser.parse_args())
