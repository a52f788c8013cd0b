"""Ranks as threads of one process: the same lines between them, over memory."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pinfeed.training.distributed.process_groups import RankGroup

TIMEOUT_S = 20


class Hub:
    """A line between threads: an exchange ends when all ranks have come to it.

    Args:
        size: Ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self.sent: list[tuple[torch.Tensor, ...]] = [()] * size

    def exchange(
        self, rank: int, sent: torch.Tensor, n_sent: Sequence[int], n_received: Sequence[int]
    ) -> torch.Tensor:
        assert (len(n_sent), len(n_received)) == (self.size, self.size)
        assert sum(n_sent) == len(sent)
        self.sent[rank] = sent.split(list(n_sent))
        self.wait()
        found = [of_rank[rank] for of_rank in self.sent]
        received = torch.cat(found)
        # Before anybody sends the next.
        self.wait()
        assert [len(part) for part in found] == list(n_received), (
            "a rank was told another number of rows"
        )
        return received

    def wait(self) -> None:
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise RuntimeError("a rank did not come") from None


class HubLine:
    """A rank's end of it."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        self.rank = rank
        self.size = hub.size

    def all_to_all(
        self, sent: torch.Tensor, n_sent: Sequence[int], n_received: Sequence[int]
    ) -> torch.Tensor:
        assert (sent.dtype, sent.ndim) == (torch.uint8, 2)
        return self._hub.exchange(self.rank, sent, n_sent, n_received)


class RankThreads:
    """So many ranks.

    Args:
        size: Their number.
    """

    def __init__(self, size: int) -> None:
        self._hubs = [Hub(size) for _ in range(2)]
        self.peers = [
            RankGroup(*(HubLine(hub, rank) for hub in self._hubs)) for rank in range(size)
        ]

    def run(self, program: Callable[[int], Any]) -> list[Any]:
        """What the program returns on each rank, or the error that it raised there."""
        results: list[Any] = [None] * len(self.peers)

        def body(rank: int) -> None:
            try:
                results[rank] = program(rank)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(len(self.peers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results
