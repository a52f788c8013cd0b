"""Lines over torch.distributed, and the peers at their ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from ...errors import ArgumentError
from .meeting import Line, Meeting


class Peers:
    """The ranks that share tables, as one of them sees them.

    Args:
        loop: What the loop's thread exchanges.
        ahead: What the readers' threads exchange meanwhile, so that neither waits for the other, nor takes what is the other's.
    """

    def __init__(self, loop: Line, ahead: Line) -> None:
        self.rank, self.size = loop.rank, loop.size
        self.loop, self.ahead = Meeting(loop), Meeting(ahead)
        self.looping = False
        """Whether a loop over sharded tables runs."""


class GroupLine:
    """A line over process groups.

    Args:
        host: For tensors on the host; nobody else uses it.
        device: For others; the user's own, used in the thread and at the places where the user's program uses it.
    """

    def __init__(self, host: Any, device: Any) -> None:
        self._host, self._device = host, device
        self.rank, self.size = distributed.get_rank(host), distributed.get_world_size(host)

    def all_to_all(self, sent: torch.Tensor, n_sent: Sequence[int], n_received: Sequence[int]) -> torch.Tensor:
        received = sent.new_empty((sum(n_received), sent.shape[1]))
        group = self._host if sent.device.type == "cpu" else self._device
        distributed.all_to_all_single(received, sent, list(n_received), list(n_sent), group=group)
        return received


_peers: dict[Any, tuple[Peers, Sequence[Any]]] = {}
"""Of each process group, with the groups that were made for them: its tables take turns on the same lines, and all ranks know when those
are made."""


def peers_of(process_group: Any) -> Peers:
    """The peers of a process group, None for the default one; all ranks ask for the first time together.

    Raises:
        ArgumentError: torch.distributed is not initialised, or this process is not in the group.
    """
    if isinstance(process_group, Peers):
        return process_group
    if not distributed.is_available() or not distributed.is_initialized():
        raise ArgumentError(
            "a sharded table needs the ranks of a job; expected torch.distributed.init_process_group() before it (torchrun starts the "
            "processes and sets what that reads), or a HostEmbedding for one process"
        )
    group = distributed.group.WORLD if process_group is None else process_group
    if distributed.get_rank(group) < 0:
        raise ArgumentError(f"rank {distributed.get_rank()} is not in the process_group that the sharded table was given")
    for known in [*_peers]:
        if not _is_registered(known):  # destroyed by its owner: with it go those that were made beside it, their threads and connections
            for made in filter(_is_registered, _peers.pop(known)[1]):
                distributed.destroy_process_group(made)
    if group not in _peers:
        ranks = distributed.get_process_group_ranks(group)
        loop, ahead = (distributed.new_group(ranks, backend="gloo", use_local_synchronization=True) for _ in range(2))
        _peers[group] = Peers(GroupLine(loop, group), GroupLine(ahead, None)), (loop, ahead)
    return _peers[group][0]


def _is_registered(group: Any) -> bool:
    try:
        distributed.get_group_rank(group, distributed.get_rank())
    except ValueError:
        return False
    return True
