"""RankGroup: the ranks that share tables; RankLoop: the ranks that loop together over them."""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from pinfeed.errors import ArgumentError, ClosedError, RankError, described
from pinfeed.pipeline.row_cache import RowCache
from pinfeed.pipeline.schedule import PrefetchSchedule
from pinfeed.training.distributed.lockstep import Channel, Lockstep, RankStep
from pinfeed.training.distributed.row_exchange import ChangingRows, Counts, RankLink, RowExchange

if TYPE_CHECKING:
    from pinfeed.training.row_loop.loop_table import LoopTable


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


class Exchanged(NamedTuple):
    """Bytes that this rank has sent to other ranks; all 0 for tables that are not sharded."""

    ids: int = 0
    """Ids that the batches look up: 8 bytes for each row that another rank owns."""
    rows: int = 0
    """Rows that were sent in the background."""
    late_rows: int = 0
    """Rows that were sent at the start of their step, because an earlier step could change them."""
    gradients: int = 0
    """Gradients of rows that other ranks own."""
    control_bytes: int = 0
    """Messages in which ranks agree on each exchange, and a byte for each id: late row or not."""


class RankLoop:
    """The ranks that loop together over sharded tables.

    The consumer thread calls the methods, except ``exchange``, ``end_batches`` and ``link``, which
    reader threads call.

    Args:
        tables: The tables of the loop.
        schedule: Prefetch schedule of the loop.
        verify: Whether the loop is verified.

    Raises:
        ArgumentError: If some of the tables are not sharded, or they are sharded over different
            process groups.
    """

    def __init__(
        self, tables: Sequence[LoopTable], schedule: PrefetchSchedule, *, verify: bool
    ) -> None:
        sharded = [used.sharded for used in tables if used.sharded is not None]
        group = sharded[0].rank_group
        if len(sharded) < len(tables) or any(table.rank_group is not group for table in sharded):
            kinds = [
                f"{used.name} ({'sharded' if used.sharded else 'not sharded'})" for used in tables
            ]
            raise ArgumentError(
                f"tables: {', '.join(kinds)}; expected either all tables sharded over the same "
                "process_group, or no sharded table"
            )
        self.rank = group.rank
        self.size = group.size
        self._group = group
        self._tables = tables
        self._sharded = sharded
        self._max_unseen_writes = schedule.max_unseen_writes
        # Without reader threads, the consumer thread also exchanges rows. Both kinds of steps then
        # use the same lockstep, to detect a rank that takes another step.
        self._lockstep = group.reader_lockstep if schedule.depth else group.loop_lockstep
        # Bytes that were sent before this loop was made.
        self._sent_before = group.loop_lockstep.sent + group.reader_lockstep.sent
        texts = []
        for used, table in zip(tables, sharded, strict=True):
            kinds = [f"{store.dtype} {tuple(store.row_shape)}" for store in used.stores]
            texts.append(f"{used.name}: {used.n_rows} rows, {', '.join(kinds)}, mean={table.mean}")
        # This text must be the same on all ranks.
        self._description = "; ".join([*texts, f"depth={schedule.depth}, verify={verify}"])

    @property
    def exchanged(self) -> Exchanged:
        """Bytes sent to other ranks since this object was made."""
        group = self._group
        sent = group.loop_lockstep.sent + group.reader_lockstep.sent - self._sent_before
        return Exchanged(*(sent[name.replace("_", " ")] for name in Exchanged._fields))

    def report_failure(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that reports errors to other ranks before a loop begins."""
        return self._group.loop_lockstep.report_failure()

    @contextlib.contextmanager
    def claim(self) -> Iterator[None]:
        """Reserve the ranks for a loop while its reader threads exist.

        Raises:
            ClosedError: If another loop of these ranks is running.
        """
        group = self._group
        thread = threading.get_ident()
        if group.is_looping:
            raise ClosedError(
                "a loop over sharded tables of these ranks is running, and ranks exchange rows for "
                "one loop at a time; end it first"
            )
        group.is_looping = True
        try:
            yield
        finally:
            try:
                if threading.get_ident() == thread:
                    self._lockstep.leave(RankStep.LEFT, "it was left")
            finally:
                group.is_looping = False

    @contextlib.contextmanager
    def in_lockstep(self) -> Iterator[None]:
        """Run a loop on all ranks. Its reader threads exist throughout.

        Raises:
            RankError: If another rank has failed, or takes another step.
        """
        lockstep = self._group.loop_lockstep
        thread = threading.get_ident()
        checksum = zlib.crc32(self._description.encode())
        lockstep.agree(RankStep.BEGIN, checksum, reason=self._description)
        for each in (lockstep, self._lockstep):
            each.begin(len(self._tables))
        try:
            yield
            lockstep.agree(RankStep.END)
            lockstep.end()
        except BaseException as error:
            # If the garbage collector ends the loop in another thread, the other ranks notice it
            # only after their timeout.
            if threading.get_ident() == thread:
                is_break = isinstance(error, GeneratorExit)
                reason = "break, or an error in its training step" if is_break else repr(error)
                lockstep.leave(RankStep.LEFT, reason)
            raise

    def exchange(self, caches: Sequence[RowCache | None]) -> RowExchange:
        """Return the exchange of an epoch, with the caches of its tables."""
        n_recent = self._max_unseen_writes
        # Without an optimizer, the loop does not change the rows.
        changing = [
            ChangingRows(used.stores[0], cache, n_recent, is_trained=used.optimizer is not None)
            for used, cache in zip(self._tables, caches, strict=True)
        ]
        partitions = [table.owners for table in self._sharded]
        return RowExchange(self._lockstep, partitions, changing)

    def end_batches(self, number: int) -> None:
        """Agree that the loaders of all ranks have ended before batch ``number``.

        Raises:
            RankError: If another rank has such a batch, has failed, or has left.
        """
        self._lockstep.agree(RankStep.NO_BATCH, number)
        if self._lockstep is not self._group.loop_lockstep:
            self._lockstep.end()

    def link(self, number: int, table: int, counts: Counts) -> RankLink:
        """Return the exchange of one table's rows in a batch.

        Args:
            number: Number of the batch.
            table: Number of the table in the loop.
            counts: Numbers of rows by rank.
        """
        lockstep = self._group.loop_lockstep
        return RankLink(lockstep, (number, table), counts, self._sharded[table].mean)
