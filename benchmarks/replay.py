"""Replay buffers of other libraries and of pinfeed: equal batches, then time and memory.

Run it from the root, with stable-baselines3, gymnasium, torchrl and tensordict installed (pip's
--no-deps keeps the torch of the project):

    python -m benchmarks.replay
    python -m benchmarks.replay --capacity 1000000 --only pinfeed

Every way runs in a process of its own. It fills its buffer with transitions of Atari's shape: four
stacked frames of 84 x 84 bytes, and episodes of 300 steps. Then it stores four transitions and
draws a batch, as DQN does. The batches of ways that draw alike must be equal bit for bit. The
figures are medians of the rounds, in which the ways take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import statistics
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch
from tabulate import tabulate

import pinfeed
from benchmarks.processes import new_process

SHAPE = (4, 84, 84)
EPISODE = 300
N_DISTINCT = 5000
TRAIN_FREQUENCY = 4
SEED = 1

Batch = tuple[torch.Tensor, ...]
"""Observations, actions, next observations, ends and rewards."""


class Steps:
    """Transitions of an environment, which take almost no time to make."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._frames = rng.integers(0, 256, (N_DISTINCT, *SHAPE[1:]), np.uint8)
        self._obs = np.repeat(self._frames[:1], 4, axis=0)
        self._number = 0

    def next(self) -> tuple[Any, Any, int, float, bool]:
        self._number += 1
        frame = self._frames[self._number % N_DISTINCT][None]
        obs = self._obs
        after = np.concatenate([obs[1:], frame])
        is_end = self._number % EPISODE == 0
        self._obs = np.repeat(frame, 4, axis=0) if is_end else after
        return obs, after, self._number % 4, float(self._number % 3), is_end


class StableBaselines:
    """The buffer of Stable-Baselines3 and CleanRL, which draws other rows if it saves memory."""

    def __init__(self, capacity: int, size: int, saves_memory: bool = False) -> None:
        from gymnasium import spaces
        from stable_baselines3.common.buffers import ReplayBuffer

        np.random.seed(SEED)  # noqa: NPY002
        self._size = size
        self._buffer = ReplayBuffer(
            capacity,
            spaces.Box(0, 255, SHAPE, np.uint8),
            spaces.Discrete(4),
            device="cpu",
            optimize_memory_usage=saves_memory,
            handle_timeout_termination=False,
        )

    def add(self, obs: Any, after: Any, action: int, reward: float, is_end: bool) -> None:
        arrays = (np.array([value]) for value in (action, reward, is_end))
        self._buffer.add(obs[None], after[None], *arrays, [{}])

    def sample(self) -> Batch:
        found = self._buffer.sample(self._size)
        others = (found.dones[:, 0], found.rewards[:, 0])
        return found.observations, found.actions[:, 0], found.next_observations, *others


class TorchRL:
    """The buffer of torchrl with its own random generator, and a thread if it prefetches."""

    def __init__(self, capacity: int, size: int, prefetch: int | None = None) -> None:
        from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

        torch.manual_seed(SEED)
        self._buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(capacity), batch_size=size, prefetch=prefetch
        )

    def add(self, obs: Any, after: Any, action: int, reward: float, is_end: bool) -> None:
        from tensordict import TensorDict

        parts = {
            "obs": torch.from_numpy(obs),
            "action": torch.tensor(action),
            "next_obs": torch.from_numpy(after),
            "done": torch.tensor(float(is_end)),
            "reward": torch.tensor(reward),
        }
        self._buffer.add(TensorDict(parts, []))

    def sample(self) -> Batch:
        found = self._buffer.sample()
        return tuple(found[name] for name in ("obs", "action", "next_obs", "done", "reward"))


class Pinfeed:
    """``pinfeed.ReplayBuffer``, with batches ahead or with priorities that draws change."""

    def __init__(
        self, capacity: int, size: int, depth: int = 0, alpha: float | None = None
    ) -> None:
        image = (SHAPE, "uint8")
        number = ((), "float32")
        parts = {"obs": image, "action": ((), "int64"), "next_obs": image}
        self._has_priorities = alpha is not None
        self._buffer = pinfeed.ReplayBuffer(
            capacity,
            parts | {"done": number, "reward": number},
            next_of={"next_obs": "obs"},
            stacked="obs",
            alpha=alpha,
            generator=np.random.RandomState(SEED),
        )
        self._batches = iter(self._buffer.batches(size, depth=depth, device="cpu"))

    def add(self, obs: Any, after: Any, action: int, reward: float, is_end: bool) -> None:
        self._buffer.add(obs=obs, next_obs=after, action=action, reward=reward, done=float(is_end))

    def sample(self) -> Batch:
        batch = tuple(next(self._batches).values())
        if self._has_priorities:
            *batch, _, numbers = batch
            rows = numbers.numpy() % self._buffer.capacity
            self._buffer.update_priorities(numbers, 0.5 + rows % 8 / 16)
        return tuple(batch)


WAYS: dict[str, tuple[str, Callable[[int, int], Any]]] = {
    "Stable-Baselines3, CleanRL": ("uniform", StableBaselines),
    "Stable-Baselines3, optimize_memory_usage": (
        "uniform, not the newest",
        partial(StableBaselines, saves_memory=True),
    ),
    "torchrl": ("uniform, torch's", TorchRL),
    "torchrl, prefetch=2": ("uniform, torch's, ahead", partial(TorchRL, prefetch=2)),
    "pinfeed": ("uniform", Pinfeed),
    "pinfeed, depth=2": ("uniform, 2 requests earlier", partial(Pinfeed, depth=2)),
    "pinfeed, prioritized": ("prioritized", partial(Pinfeed, alpha=1.0)),
}
"""How each buffer draws, and the function that makes it for a capacity and a batch size."""
_MODULES = {"Stable": "stable_baselines3", "torchrl": "torchrl"}
_open: dict[str, tuple[Any, Steps]] = {}


def fill(way: str, capacity: int, size: int) -> dict[str, float]:
    """Fill the buffer of a way, and a tenth more; return its memory and the time to add."""
    torch.set_num_threads(1)
    steps = Steps()
    before = psutil.Process().memory_full_info().uss
    buffer = WAYS[way][1](capacity, size)
    seconds = []
    for i in range(capacity + capacity // 10):
        step = steps.next()
        begin = time.perf_counter()
        buffer.add(*step)
        if i >= capacity:
            seconds.append(time.perf_counter() - begin)
    _open[way] = buffer, steps
    used = psutil.Process().memory_full_info().uss - before
    return {"add_us": 1e6 * statistics.median(seconds), "MiB": used / 2**20}


def check(way: str, n: int) -> list[int]:
    """Return checksums of batches, while transitions are stored."""
    buffer, steps = _open[way]
    return [
        zlib.crc32(b"".join(np.ascontiguousarray(part.numpy()).tobytes() for part in batch))
        for batch in _batches(buffer, steps, n)
    ]


def times(way: str, n: int) -> float:
    """Return the median time of a request of a batch, in microseconds."""
    buffer, steps = _open[way]
    seconds = []
    for _ in range(n):
        for _ in range(TRAIN_FREQUENCY):
            buffer.add(*steps.next())
        begin = time.perf_counter()
        buffer.sample()
        seconds.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(seconds)


def loop_time(way: str, n: int, step_s: float) -> float:
    """Return the time of a loop that stores, draws and computes, in microseconds per batch.

    Args:
        way: Name of the way.
        n: Number of batches.
        step_s: Seconds of a training step on another device, for which the thread sleeps.
    """
    buffer, steps = _open[way]
    begin = time.perf_counter()
    for _ in _batches(buffer, steps, n):
        time.sleep(step_s)
    return 1e6 * (time.perf_counter() - begin) / n


def _batches(buffer: Any, steps: Steps, n: int) -> Iterator[Batch]:
    for _ in range(n):
        for _ in range(TRAIN_FREQUENCY):
            buffer.add(*steps.next())
        yield buffer.sample()


def main() -> None:
    """Compare all ways that are installed, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--capacity", type=int, default=20_000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--only", default="", help="ways whose name contains this")
    given = parser.parse_args()
    missing = [key for key, name in _MODULES.items() if importlib.util.find_spec(name) is None]
    ways = [way for way in WAYS if given.only in way and not way.startswith(tuple(missing))]
    requests: dict[str, list[float]] = {way: [] for way in ways}
    loops: dict[str, list[float]] = {way: [] for way in ways}
    with contextlib.ExitStack() as stack:
        processes = {way: stack.enter_context(new_process()) for way in ways}
        sizes = (given.capacity, given.batch_size)
        filled = {way: one.submit(fill, way, *sizes).result() for way, one in processes.items()}
        sums: dict[str, list[int]] = {}
        for way, one in processes.items():
            found = one.submit(check, way, 50).result()
            assert sums.setdefault(WAYS[way][0], found) == found, f"{way} has other batches"
        for i in range(given.rounds):
            for way in ways if i % 2 else reversed(ways):
                one = processes[way]
                requests[way].append(one.submit(times, way, given.batches).result())
                step_s = given.step_ms / 1e3
                n = given.batches // 4
                loops[way].append(one.submit(loop_time, way, n, step_s).result())
    rows = [
        (
            way,
            WAYS[way][0],
            f"{filled[way]['add_us']:.0f}",
            f"{statistics.median(requests[way]):.0f}",
            f"{statistics.median(loops[way]):.0f}",
            f"{filled[way]['MiB']:,.0f}",
        )
        for way in ways
    ]
    head = ("buffer", "draws", "µs to add", "µs to request a batch", "µs of a loop", "MiB")
    print(tabulate(rows, head, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
