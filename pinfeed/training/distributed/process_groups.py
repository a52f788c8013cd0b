"""RankGroup: the ranks that share tables, and their channels over ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from pinfeed.errors import ArgumentError, RankError, described
from pinfeed.training.distributed.lockstep import Channel, Lockstep


class RankGroup:
    """The ranks that share tables, from the view of one rank.

    The consumer thread and the reader threads have separate channels. Neither waits for the other
    or receives its bytes.

    Args:
        loop: Channel of the consumer thread.
        readers: Channel of the reader threads.
    """

    def __init__(self, loop: Channel, readers: Channel) -> None:
        self.rank = loop.rank
        self.size = loop.size
        self.loop_lockstep = Lockstep(loop)
        self.reader_lockstep = Lockstep(readers)
        self.is_looping = False
        """Whether a loop over sharded tables is running."""


class ProcessGroupChannel:
    """A channel over process groups.

    Args:
        host_group: Group for tensors on the host. Nothing else uses it.
        device_group: The user's group, for tensors on the device. It is used in the same thread and
            in the same order as the program uses it.
    """

    def __init__(self, host_group: Any, device_group: Any) -> None:
        self._host_group = host_group
        self._device_group = device_group
        self.rank = distributed.get_rank(host_group)
        self.size = distributed.get_world_size(host_group)

    def all_to_all(
        self, sent: torch.Tensor, n_sent: Sequence[int], n_received: Sequence[int]
    ) -> torch.Tensor:
        received = sent.new_empty((sum(n_received), sent.shape[1]))
        group = self._host_group if sent.device.type == "cpu" else self._device_group
        distributed.all_to_all_single(received, sent, list(n_received), list(n_sent), group=group)
        return received


_rank_groups: dict[Any, tuple[RankGroup, Sequence[Any]]] = {}
"""For each process group, its ranks and the process groups that were made for their channels.

All tables of a process group share the channels and use them in turns. All ranks therefore create
the channels at the same time.
"""


def rank_group_of(process_group: Any) -> RankGroup:
    """Return the ranks of a process group.

    All ranks make the first call for a process group together. Exchanges have the timeout of the
    process group.

    Args:
        process_group: The process group; None for the default one.

    Raises:
        ArgumentError: If torch.distributed is not initialised, or this process is not in the group.
        RankError: If another rank did not make the first call within the group's timeout.
    """
    if isinstance(process_group, RankGroup):
        return process_group
    if not distributed.is_available() or not distributed.is_initialized():
        raise ArgumentError(
            "a sharded table needs the ranks of a job; expected "
            "torch.distributed.init_process_group() before it (torchrun starts the processes and "
            "sets the environment variables that the call reads), or a HostEmbedding for one "
            "process"
        )
    group = distributed.group.WORLD if process_group is None else process_group
    if distributed.get_rank(group) < 0:
        raise ArgumentError(
            f"rank {distributed.get_rank()} is not in the process_group of the sharded table; "
            "expected only ranks of the group to create it"
        )
    _destroy_orphans()
    if group not in _rank_groups:
        ranks = distributed.get_process_group_ranks(group)
        loop, readers = (_gloo_group_like(group, ranks) for _ in range(2))
        channels = ProcessGroupChannel(loop, group), ProcessGroupChannel(readers, None)
        _rank_groups[group] = (RankGroup(*channels), (loop, readers))
    return _rank_groups[group][0]


def _destroy_orphans() -> None:
    """Destroy pinfeed's process groups for a group that its owner has destroyed.

    This ends their threads and closes their connections.
    """
    for known in [*_rank_groups]:
        if not _is_registered(known):
            for made in filter(_is_registered, _rank_groups.pop(known)[1]):
                distributed.destroy_process_group(made)


def _gloo_group_like(group: Any, ranks: list[int]) -> Any:
    """Create a gloo process group with the ranks and the timeout of another group."""
    timeout = _timeout_of(group)
    try:
        return distributed.new_group(
            ranks, timeout=timeout, backend="gloo", use_local_synchronization=True
        )
    except RuntimeError as error:
        raise RankError(
            f"rank {distributed.get_rank(group)} of {len(ranks)} made a sharded table, but another "
            f"rank did not within the timeout of the process group ({timeout or 'the default'}); "
            f"expected all ranks to make it: {described(error)}"
        ) from error


def _timeout_of(group: Any) -> timedelta | None:
    """Return the time that an exchange of a group waits for a rank.

    torch has no public function for this. A group for several devices has the same timeout for all.

    Returns:
        The timeout, or None, which is torch's default, for a backend that does not report it.
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
