"""wrap_dataset(): the samples that are in memory at a time, which the plan counts."""

import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from pinfeed import Config, MiB, wrap_dataset

N_BATCH = 16


class Alive:
    """Dataset that counts its samples in memory."""

    def __init__(self) -> None:
        self.most = 0
        self._now = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> np.ndarray:
        sample = np.full(100, index, np.float32)
        weakref.finalize(sample, self._count, -1)
        self._count(1)
        return sample

    def _count(self, change: int) -> None:
        with self._lock:
            self._now += change
            self.most = max(self.most, self._now)


class AliveBatches(Alive):
    """The same in one call per batch."""

    def __getitems__(self, indices: list[int]) -> list[np.ndarray]:
        return [self[i] for i in indices]


def stacked(samples: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.stack(samples))


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("make", "collate"), [(Alive, None), (Alive, stacked), (AliveBatches, None)]
)
def test_the_plan_counts_the_samples_in_memory(
    make: type[Alive], collate: Any, threads: int, depth: int
) -> None:
    dataset = make()
    with wrap_dataset(
        dataset,
        batch_size=N_BATCH,
        threads=threads,
        collate_fn=collate,
        depth=depth,
        device="cpu",
    ) as feeder:
        for _ in range(2):
            assert len(list(feeder)) == 10
        (planned,) = (one for one in feeder.plan.items if one.what == "samples that are being made")
    assert planned.nbytes == 400
    assert dataset.most <= planned.count
    if make is Alive and collate is None:
        # Threads do not run ahead of the memory of a batch.
        assert planned.count <= 3 * threads
    else:
        assert planned.count >= N_BATCH


def test_a_limit_leaves_memory_for_the_samples_of_collate_fn() -> None:
    sizes = []
    for collate in (None, stacked):
        config = Config(cpu_memory_limit=MiB(8))
        with wrap_dataset(
            range(4000),
            lambda i: np.full(1000, i, np.float32),
            threads=2,
            collate_fn=collate,
            config=config,
            device="cpu",
        ) as feeder:
            sizes.append(feeder.plan.batch_size)
            assert feeder.plan.host_bytes <= MiB(8)
    assert sizes[1] < 0.7 * sizes[0]


def test_samples_count_if_their_batch_is_smaller() -> None:
    def first(samples: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.stack([sample[:1] for sample in samples]))

    with wrap_dataset(
        range(100),
        lambda i: np.zeros(1000),
        batch_size=10,
        threads=1,
        collate_fn=first,
        device="cpu",
    ) as feeder:
        items = {item.what: item for item in feeder.plan.items}
    assert items["samples that are being made"].nbytes == 8000
