"""TD3's replay buffer, whose rows change while the agent learns from random ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import pinfeed
from benchmarks.programs.program import DEVICE, OURS, SEED, Program, Step

N_STATES = 17
N_ACTIONS = 6
WIDTHS = (N_STATES, N_ACTIONS, N_STATES, 1, 1)
"""Columns of states, actions, next states, rewards, and whether the episode continues."""
NAMES = ("state", "action", "next_state", "reward", "not_done")
DISCOUNT = 0.99


@dataclass(frozen=True)
class Size:
    """Sizes of the buffer and of a batch."""

    max_size: int
    n_filled: int
    batch_size: int
    n_batches: int
    n_steps: int


SIZES = {
    "full": Size(1_000_000, 200_000, 256, 5000, 500),
    "quick": Size(100_000, 20_000, 256, 1000, 100),
    "tiny": Size(50, 45, 16, 10, 3),
}


def prepare(folder: Path, size: Size) -> None:
    """Write the transitions that the agent will observe."""
    rng = np.random.default_rng(0)
    n = size.n_filled + size.n_batches
    transitions = rng.standard_normal((n, sum(WIDTHS)))
    transitions[:, -1] = transitions[:, -1] > -2
    np.save(folder / "transitions.npy", transitions)


class ReplayBuffer:
    """The latest transitions.

    Args:
        max_size: Number of transitions.
    """

    def __init__(self, max_size: int) -> None:
        self.arrays = tuple(np.zeros((max_size, width)) for width in WIDTHS)
        self.max_size = max_size
        self.size = 0
        self.next = 0
        self.rng = np.random.default_rng(SEED)

    def add(self, transition: tuple[Any, ...]) -> None:
        """Store a transition in place of the oldest one."""
        for array, values in zip(self.arrays, transition, strict=True):
            array[self.next] = values
        self.next = (self.next + 1) % self.max_size
        self.size = min(self.size + 1, self.max_size)

    def fill(self, transitions: Iterator[tuple[Any, ...]], n: int) -> None:
        """Store the first transitions, as random actions make them before the training."""
        for _ in range(n):
            self.add(next(transitions))

    def sample(self, batch_size: int) -> tuple[torch.Tensor, ...]:
        """Return random transitions as float32."""
        rows = self.rng.integers(self.size, size=batch_size)
        return tuple(torch.FloatTensor(array[rows]).to(DEVICE) for array in self.arrays)


def observe(folder: Path) -> Iterator[tuple[Any, ...]]:
    """Yield the transitions of an environment."""
    transitions = np.load(folder / "transitions.npy")
    parts = np.split(transitions, np.cumsum(WIDTHS)[:-1], axis=1)
    return zip(*parts, strict=True)


def original(folder: Path, size: Size, step: Step) -> None:
    """Sample a batch, and observe a transition."""
    observed = observe(folder)
    buffer = ReplayBuffer(size.max_size)
    buffer.fill(observed, size.n_filled)
    for transition in observed:
        step(*buffer.sample(size.batch_size))
        buffer.add(transition)


def moved(folder: Path, size: Size, step: Step) -> None:
    """Draw and gather the rows when the loop requests them, because the loop changes them."""
    observed = (dict(zip(NAMES, transition, strict=True)) for transition in observe(folder))
    parts = {name: ((width,), "float32") for name, width in zip(NAMES, WIDTHS, strict=True)}
    buffer = pinfeed.ReplayBuffer(size.max_size, parts, generator=np.random.default_rng(SEED))
    for _ in range(size.n_filled):
        buffer.add(**next(observed))
    with buffer.batches(size.batch_size, n=size.n_batches, device=DEVICE) as batches:
        for batch, transition in zip(batches, observed, strict=True):
            step(*batch.values())
            buffer.add(**transition)


def make_step(_: Size) -> Step:
    """Return a training step of two critics with Adam, without TD3's delayed copies."""
    torch.manual_seed(0)
    n_inputs = N_STATES + N_ACTIONS
    critics = [
        nn.Sequential(
            nn.Linear(n_inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
        )
        for _ in range(2)
    ]
    parameters = [weights for critic in critics for weights in critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-4)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        state, action, next_state, reward, not_done = batch
        with torch.no_grad():
            future = torch.cat([next_state, action], 1)
            target = torch.minimum(*(critic(future) for critic in critics))
            target = reward + not_done * DISCOUNT * target
        now = torch.cat([state, action], 1)
        losses = [nn.functional.mse_loss(critic(now), target) for critic in critics]
        loss = torch.stack(losses).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


PROGRAM = Program(
    title="Replay buffer of TD3",
    sizes=SIZES,
    prepare=prepare,
    ways={"sample": original, OURS: moved},
    make_step=make_step,
    original=(ReplayBuffer, original),
    moved=(moved,),
)
