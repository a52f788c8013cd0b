"""Ranks as threads of one process, with channels in memory between them."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pinfeed.training.distributed.rank_loop import RankGroup

TIMEOUT_S = 20


class Hub:
    """Exchanges between threads; each ends when all ranks have entered it.

    Args:
        size: Number of ranks.
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
        # No rank may send the next rows before all have received these.
        self.wait()
        assert [len(part) for part in found] == list(n_received), (
            "a rank expected another number of rows"
        )
        return received

    def wait(self) -> None:
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise RuntimeError("a rank did not come") from None


class HubChannel:
    """The channel of one rank over a hub."""

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
    """Ranks that run as threads.

    Args:
        size: Number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._hubs = [Hub(size) for _ in range(2)]
        self.groups = [
            RankGroup(*(HubChannel(hub, rank) for hub in self._hubs)) for rank in range(size)
        ]

    def run(self, program: Callable[[int], Any]) -> list[Any]:
        """Run a program on all ranks; return the result of each, or the error that it raised."""
        results: list[Any] = [None] * len(self.groups)

        def run_on(rank: int) -> None:
            try:
                results[rank] = program(rank)
            except Exception as error:
                results[rank] = error

        threads = [
            threading.Thread(target=run_on, args=(rank,)) for rank in range(len(self.groups))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results
