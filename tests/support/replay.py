"""A plain replay buffer, and transitions of simulated environments, for comparison."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

Step = dict[str, Any]
"""Parts of a step, each of shape (n_envs, *shape)."""


class PlainReplay:
    """All steps in a list, from which batches are drawn as Stable-Baselines3 defines them.

    Args:
        n_steps: Number of steps that are kept.
        n_envs: Number of environments.
        seed: Seed of the draws.
        window: Number of steps of a window.
        gamma: Discount of the rewards in a window.
    """

    def __init__(
        self, n_steps: int, n_envs: int, seed: int, window: int = 1, gamma: float = 0.9
    ) -> None:
        self.steps: list[Step] = []
        self.n_steps = n_steps
        self.n_envs = n_envs
        self.random = np.random.RandomState(seed)
        self.window = window
        self.gamma = gamma
        self.powers = gamma ** np.arange(window + 1, dtype=np.float32)

    def add(self, **values: Any) -> None:
        self.steps.append({name: np.copy(value) for name, value in values.items()})

    def step_in(self, slot: int) -> int:
        """Return the latest step that was stored in a slot."""
        return max(step for step in range(len(self.steps)) if step % self.n_steps == slot)

    def sample(self, n: int) -> dict[str, Any]:
        slots = self.random.randint(0, min(len(self.steps), self.n_steps), size=n)
        envs = self.random.randint(0, self.n_envs, size=n)
        return self.batch(
            [(self.step_in(slot), env) for slot, env in zip(slots, envs, strict=True)]
        )

    def batch(self, drawn: list[tuple[int, int]]) -> dict[str, Any]:
        rows = [self.transition(step, env) for step, env in drawn]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def transition(self, step: int, env: int) -> dict[str, Any]:
        first = {name: value[env] for name, value in self.steps[step].items()}
        if self.window == 1:
            return first
        total = np.float32(0)
        for length in range(1, self.window + 1):
            last = {name: value[env] for name, value in self.steps[step + length - 1].items()}
            total += last["reward"] * self.powers[length - 1]
            is_over = last["done"] or last.get("truncated", False)
            if is_over or step + length == len(self.steps):
                break
        of_last = {"next_obs", "done", "truncated"} & first.keys()
        return (
            first
            | {name: last[name] for name in of_last}
            | {"reward": total, "discount": self.powers[length]}
        )


def batches_drawn_ahead(plain: PlainReplay, size: int, depth: int) -> Iterator[dict[str, Any]]:
    """Yield batches that were drawn ``depth`` requests before."""
    drawn: deque[dict[str, Any]] = deque()
    while True:
        while len(drawn) <= depth:
            drawn.append(plain.sample(size))
        yield drawn.popleft()


def steps_of(
    rng: np.random.Generator,
    parts: Mapping[str, tuple[tuple[int, ...], str]],
    n_envs: int,
    *,
    stacked: bool = False,
    p_end: float = 0.2,
) -> Iterator[Step]:
    """Yield steps of environments whose episodes end at random, some by a time limit."""

    def frames(shape: tuple[int, ...], dtype: str) -> Any:
        if dtype.startswith("float"):
            # Comparisons of values would join the two zeros, and would not join NaN.
            return rng.choice([0.0, -0.0, np.nan, 1.5], shape).astype(dtype)
        return rng.integers(0, 3, shape).astype(dtype)

    shape, dtype = parts["obs"]
    obs = frames((n_envs, *shape), dtype)
    while True:
        after = frames(obs.shape, dtype)
        if stacked:
            after[:, :-1] = obs[:, 1:]
        done = rng.random(n_envs) < p_end
        truncated = rng.random(n_envs) < p_end / 2
        step = {
            "obs": obs,
            "action": rng.integers(0, 9, n_envs),
            "reward": rng.normal(size=n_envs).astype("float32"),
            "done": done,
            "truncated": truncated,
            "next_obs": after,
        }
        yield {name: step[name] for name in parts}
        obs = after.copy()
        # Some programs reset an environment without a flag.
        reset = done | truncated | (rng.random(n_envs) < 0.05)
        first = frames(obs.shape, dtype)
        if stacked:
            first[:] = first[:, :1]
        obs[reset] = first[reset]
