"""Lines over torch.distributed, and the peers at their ends."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from pinfeed.errors import ArgumentError, RankError, described
from pinfeed.training.distributed.lockstep import Channel, Lockstep


class RankGroup:
    """The ranks that share tables, as one of them sees them.

    Args:
        loop: What the loop's thread exchanges.
        ahead: What the readers' threads exchange meanwhile, so that neither waits for the other,
            nor takes what is the other's.
    """

    def __init__(self, loop: Channel, ahead: Channel) -> None:
        self.rank = loop.rank
        self.size = loop.size
        self.loop = Lockstep(loop)
        self.ahead = Lockstep(ahead)
        self.looping = False
        """Whether a loop over sharded tables runs."""


class ProcessGroupChannel:
    """A line over process groups.

    Args:
        host: For tensors on the host; nobody else uses it.
        device: For others; the user's own, used in the thread and at the places where the user's
            program uses it.
    """

    def __init__(self, host: Any, device: Any) -> None:
        self._host = host
        self._device = device
        self.rank = distributed.get_rank(host)
        self.size = distributed.get_world_size(host)

    def all_to_all(
        self, sent: torch.Tensor, n_sent: Sequence[int], n_received: Sequence[int]
    ) -> torch.Tensor:
        received = sent.new_empty((sum(n_received), sent.shape[1]))
        group = self._host if sent.device.type == "cpu" else self._device
        distributed.all_to_all_single(received, sent, list(n_received), list(n_sent), group=group)
        return received


_peers: dict[Any, tuple[RankGroup, Sequence[Any]]] = {}
"""Of each process group, with the groups that were made for them: its tables take turns on the same lines, and all ranks know when those
are made."""


def peers_of(process_group: Any) -> RankGroup:
    """The peers of a process group, None for the default one; all ranks ask for the first time together.

    Exchanges wait for another rank as long as those of the process group do.

    Raises:
        ArgumentError: If torch.distributed is not initialised, or this process is not in the group.
        RankError: If another rank did not ask within the group's timeout.
    """
    if isinstance(process_group, RankGroup):
        return process_group
    if not distributed.is_available() or not distributed.is_initialized():
        raise ArgumentError(
            "a sharded table needs the ranks of a job; expected torch.distributed.init_process_group() before it (torchrun starts the "
            "processes and sets what that reads), or a HostEmbedding for one process"
        )
    group = distributed.group.WORLD if process_group is None else process_group
    if distributed.get_rank(group) < 0:
        raise ArgumentError(
            f"rank {distributed.get_rank()} is not in the process_group that the sharded table was given"
        )
    for known in [*_peers]:
        if not _is_registered(known):
            # Destroyed by its owner: with it go those that were made beside it, their threads and
            # connections.
            for made in filter(_is_registered, _peers.pop(known)[1]):
                distributed.destroy_process_group(made)
    if group not in _peers:
        ranks = distributed.get_process_group_ranks(group)
        loop, ahead = (_beside(group, ranks) for _ in range(2))
        _peers[group] = (
            RankGroup(ProcessGroupChannel(loop, group), ProcessGroupChannel(ahead, None)),
            (loop, ahead),
        )
    return _peers[group][0]


def _beside(group: Any, ranks: list[int]) -> Any:
    """A group of gloo of the same ranks as another one, and with its timeout."""
    timeout = _timeout_of(group)
    try:
        return distributed.new_group(
            ranks, timeout=timeout, backend="gloo", use_local_synchronization=True
        )
    except RuntimeError as error:
        raise RankError(
            f"rank {distributed.get_rank(group)} of {len(ranks)} made a sharded table, and not all others did so within the "
            f"timeout of their process group ({timeout or 'the default one'}); expected all ranks to make it: {described(error)}"
        ) from error


def _timeout_of(group: Any) -> timedelta | None:
    """Return the time that an exchange of a group waits for a rank; None, torch's default, for a backend that does not tell.

    torch has no public function for this. Groups that were made for several devices have one
    timeout for all of them.
    """
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(device), "options", None)
        if isinstance(found := getattr(options, "_timeout", None), timedelta):
            return found
    return None


def _is_registered(group: Any) -> bool:
    try:
        distributed.get_group_rank(group, distributed.get_rank())
    except ValueError:
        return False
    return True
