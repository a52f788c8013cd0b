"""Shards of tokens: the loaders of two training scripts, token for token, in a few lines each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import pinfeed

B, T = 2, 8
"""Sequences of a batch of one rank, and tokens of a sequence."""
LENGTHS = (100, 333, 35, 64)
"""Tokens of each shard; one is too short for a step of three ranks."""
HEADER = 1024
"""Bytes before the tokens of a .bin file."""
N_STEPS = 40


@pytest.fixture
def shards(tmp_path: Path) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(50_257, size=n, dtype=np.uint16) for n in LENGTHS]
    for i, shard in enumerate(tokens):
        np.save(tmp_path / f"shard-{i}.npy", shard)
        header = np.zeros(HEADER // 4, np.int32)
        (tmp_path / f"shard-{i}.bin").write_bytes(header.tobytes() + shard.tobytes())
    return tokens


def lite(shards: list[np.ndarray], rank: int, world_size: int) -> Iterator[torch.Tensor]:
    """Yield runs as a loader that moves on when a shard has no step of all ranks left."""
    step = B * T * world_size
    for tokens in itertools.cycle(shards):
        position = B * T * rank
        for _ in range((len(tokens) - 1) // step):
            yield torch.from_numpy(tokens[position : position + B * T + 1].astype(np.int64))
            position += step


@pytest.mark.parametrize("kind", ["npy", "bin"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_runs_of_ranks_equal_those_of_the_original(
    shards: list[np.ndarray], tmp_path: Path, kind: str, world_size: int
) -> None:
    raw = {} if kind == "npy" else {"dtype": "uint16", "offset": HEADER}
    for rank in range(world_size):
        runs = pinfeed.NpyStore.windows(
            tmp_path / f"shard-*.{kind}",
            length=B * T + 1,
            step=B * T * world_size,
            start=B * T * rank,
            span=B * T * world_size + 1,
            **raw,
        )
        with runs, pinfeed.Feeder(runs, batch_size=1, device="cpu") as feeder:
            batches = pinfeed.endless(feeder)
            expected = lite(shards, rank, world_size)
            for batch, run in zip(itertools.islice(batches, N_STEPS), expected, strict=False):
                assert torch.equal(batch[0].long(), run)


def test_a_resumed_run_goes_to_the_same_token(shards: list[np.ndarray], tmp_path: Path) -> None:
    def batches() -> pinfeed.feeders.endless.Endless[torch.Tensor]:
        runs = pinfeed.NpyStore.windows(tmp_path / "shard-*.npy", length=B * T + 1, step=B * T)
        return pinfeed.endless(pinfeed.Feeder(runs, batch_size=1, device="cpu"))

    expected = [batch.tolist() for batch in itertools.islice(batches(), N_STEPS)]
    for n in range(0, N_STEPS, 7):
        first = batches()
        assert [batch.tolist() for batch in itertools.islice(first, n)] == expected[:n]
        second = batches()
        second.load_state_dict(first.state_dict())
        assert [next(second).tolist() for _ in range(N_STEPS - n)] == expected[n:]
