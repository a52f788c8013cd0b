"""CleanRL's DQN on Atari, whose replay buffer is that of Stable-Baselines3."""

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

BATCH_SIZE = 32
TRAIN_FREQUENCY = 4
N_ACTIONS = 4
DISCOUNT = 0.99
EPISODE_STEPS = 300
"""Mean number of steps of an episode."""


@dataclass(frozen=True)
class Size:
    """Sizes of the buffer, of the frames, and of the training."""

    capacity: int
    learning_starts: int
    n_distinct: int
    height: int
    n_batches: int
    n_steps: int


SIZES = {
    "full": Size(50_000, 50_000, 5000, 84, 1000, 30),
    "quick": Size(10_000, 10_000, 2000, 84, 300, 12),
    "tiny": Size(60, 40, 50, 36, 30, 3),
}


def prepare(folder: Path, size: Size) -> None:
    """Write frames, and the steps with which episodes end."""
    rng = np.random.default_rng(0)
    shape = (size.n_distinct, size.height, size.height)
    np.save(folder / "frames.npy", rng.integers(0, 256, shape, np.uint8))
    n = size.learning_starts + TRAIN_FREQUENCY * (size.n_batches + 1)
    np.save(folder / "ends.npy", rng.random(n) < 1 / min(EPISODE_STEPS, size.capacity // 6))


def observe(folder: Path) -> Iterator[tuple[Any, ...]]:
    """Yield observations of four frames, next observations, actions, rewards and ends."""
    frames = np.load(folder / "frames.npy")
    ends = np.load(folder / "ends.npy")
    # As a vector environment does, all have an axis for one environment.
    obs = np.repeat(frames[None, :1], 4, axis=1)
    for number, is_end in enumerate(ends):
        frame = frames[None, (number + 1) % len(frames), None]
        next_obs = np.concatenate([obs[:, 1:], frame], axis=1)
        action = np.array([number % N_ACTIONS])
        reward = np.array([float(number % 3)])
        yield obs, next_obs, action, reward, np.array([is_end])
        obs = np.repeat(frame, 4, axis=1) if is_end else next_obs


class ReplayBuffer:
    """The latest transitions, as Stable-Baselines3 keeps them.

    Args:
        capacity: Number of transitions.
        shape: Shape of an observation.
    """

    def __init__(self, capacity: int, shape: tuple[int, ...]) -> None:
        self.observations = np.zeros((capacity, 1, *shape), np.uint8)
        self.next_observations = np.zeros((capacity, 1, *shape), np.uint8)
        self.actions = np.zeros((capacity, 1, 1), np.int64)
        self.rewards = np.zeros((capacity, 1), np.float32)
        self.dones = np.zeros((capacity, 1), np.float32)
        self.capacity = capacity
        self.position = 0
        self.is_full = False

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any) -> None:
        """Store a transition in place of the oldest one."""
        self.observations[self.position] = np.array(obs)
        self.next_observations[self.position] = np.array(next_obs)
        self.actions[self.position] = np.array(action).reshape(1, 1)
        self.rewards[self.position] = np.array(reward)
        self.dones[self.position] = np.array(done)
        self.position += 1
        if self.position == self.capacity:
            self.is_full = True
            self.position = 0

    def sample(self, batch_size: int) -> list[torch.Tensor]:
        """Return random transitions."""
        most = self.capacity if self.is_full else self.position
        rows = np.random.randint(0, most, size=batch_size)  # noqa: NPY002
        envs = np.random.randint(0, 1, size=batch_size)  # noqa: NPY002
        found = (
            self.observations[rows, envs, :],
            self.actions[rows, envs, :],
            self.next_observations[rows, envs, :],
            self.dones[rows, envs].reshape(-1, 1),
            self.rewards[rows, envs].reshape(-1, 1),
        )
        return [torch.tensor(array, device=DEVICE) for array in found]


def original(folder: Path, size: Size, step: Step) -> None:
    """Store every transition, and train after every fourth one."""
    np.random.seed(SEED)  # noqa: NPY002
    buffer = ReplayBuffer(size.capacity, (4, size.height, size.height))
    for number, transition in enumerate(observe(folder)):
        buffer.add(*transition)
        if number > size.learning_starts and number % TRAIN_FREQUENCY == 0:
            step(*buffer.sample(BATCH_SIZE))


def moved(folder: Path, size: Size, step: Step) -> None:
    """Store every frame once, and draw each batch when the loop requests it."""
    image = ((4, size.height, size.height), "uint8")
    scalar = ((1,), "float32")
    parts = {"obs": image, "action": ((1,), "int64"), "next_obs": image}
    buffer = pinfeed.ReplayBuffer(
        size.capacity,
        parts | {"done": scalar, "reward": scalar},
        next_of={"next_obs": "obs"},
        stacked="obs",
        generator=np.random.RandomState(SEED),
    )
    batches = iter(buffer.batches(BATCH_SIZE, device=DEVICE))
    for number, (obs, next_obs, *others) in enumerate(observe(folder)):
        action, reward, done = (value[:, None] for value in others)
        buffer.add(obs=obs, next_obs=next_obs, action=action, reward=reward, done=done)
        if number > size.learning_starts and number % TRAIN_FREQUENCY == 0:
            step(*next(batches).values())


def make_step(size: Size) -> Step:
    """Return a training step of the network of DQN with Adam."""
    torch.manual_seed(0)

    def network() -> nn.Module:
        layers: list[nn.Module] = [
            nn.Conv2d(4, 32, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=1, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        ]
        n_features = nn.Sequential(*layers)(torch.zeros(1, 4, size.height, size.height)).shape[1]
        head = [nn.Linear(n_features, 512), nn.ReLU(), nn.Linear(512, N_ACTIONS)]
        return nn.Sequential(*layers, *head)

    q_network = network()
    target_network = network()
    target_network.load_state_dict(q_network.state_dict())
    optimizer = torch.optim.Adam(q_network.parameters(), lr=1e-4)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        obs, action, next_obs, done, reward = batch
        with torch.no_grad():
            future = target_network(next_obs / 255).max(dim=1).values
            target = reward.flatten() + DISCOUNT * future * (1 - done.flatten())
        value = q_network(obs / 255).gather(1, action).squeeze()
        loss = nn.functional.mse_loss(target, value)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


PROGRAM = Program(
    title="DQN of CleanRL on Atari",
    sizes=SIZES,
    prepare=prepare,
    ways={"SB3's buffer": original, OURS: moved},
    make_step=make_step,
    original=(ReplayBuffer, original),
    moved=(moved,),
)
