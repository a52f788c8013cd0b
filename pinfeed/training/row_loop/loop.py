"""train_rows(): a loop over a loader's batches in which the rows of tables come and go with them."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from types import GeneratorType, NoneType
from typing import Any, cast

import torch

from pinfeed.errors import ArgumentError, ClosedError
from pinfeed.feeders.dataloader import HINTS, LoaderFeeder
from pinfeed.memory.limits import check_depth, check_route, safe_repr
from pinfeed.pipeline.abandoned import is_abandoned
from pinfeed.pipeline.epochs import is_suspended
from pinfeed.pipeline.prefetcher import LentBatch, PrefetchSchedule
from pinfeed.pipeline.store_tree import aliases
from pinfeed.training import rng_state
from pinfeed.training.distributed.source import ShardedSource, ShardedTableSpec
from pinfeed.training.distributed.table import ShardedEmbedding
from pinfeed.training.embeddings.batch_rows import BatchRows
from pinfeed.training.embeddings.optimizer import RowOptimizer
from pinfeed.training.embeddings.source import (
    DeviceBatch,
    Exchanged,
    IdsOf,
    TableRowSource,
    TableSpec,
)
from pinfeed.training.embeddings.table import HostEmbedding
from pinfeed.training.row_loop.verify import Shadow
from pinfeed.validation.arguments import check_flag, explain_arguments

# And half of the cores: the loop and the writer have work of their own.
_MAX_READERS = 4

logger = logging.getLogger("pinfeed")


@explain_arguments(HINTS)
def train_rows(
    loader: Any,
    tables: Mapping[HostEmbedding, Any],
    *,
    optimizer: RowOptimizer | Iterable[RowOptimizer] = (),
    depth: int = 2,
    device: Any = "auto",
    route: str | None = None,
    verify: bool = False,
    progress: bool = False,
    timeline: bool = False,
) -> RowLoop:
    """The batches of ``loader`` on the device, and in the loop's body the rows of the tables that they look up.

    A few batches ahead, background threads ask for a batch, collect the ids that it looks up, each
    once, and bring these rows of the tables, with their optimizer state, to the device. Rows that
    an earlier batch changes meanwhile are brought up to date there. When the next batch is asked
    for, or the loop is left, the rows of the batch go back, in the background, after what was
    queued in the stream that is current then; all have landed when the loop has ended. Losses,
    tables and state are those of ``depth=0``, the synchronous loop, bit for bit.

        users = pinfeed.HostEmbedding(50_000_000, 128)
        optimizer = pinfeed.RowOptimizer(torch.optim.Adam, [users], lr=1e-3)
        for batch in pinfeed.train_rows(loader, {users: lambda batch: batch["user"]}, optimizer=optimizer):
            loss = model(users(batch["user"]), batch).mean()
            loss.backward(); optimizer.step(); optimizer.zero_grad()

    Where tables are sharded, all ranks loop at once, each over batches of its own, equally many.

    Args:
        loader: As for ``wrap_loader``: a DataLoader, or any iterable of batches, on the host.
        tables: For each table a function that is given a batch, on the host, and returns the ids
            that the loop will look up: integers in a tensor or array of any shape, or several of
            these in a tuple, list or dict. Or the key of the batch under which they are. It is
            called in a background thread, one batch at a time, in order.
        optimizer: The ``RowOptimizer`` s that will step in the loop; their state travels along.
        depth: Batches ahead of the loop, at most 1,024; 0 is the synchronous loop.
        device: As for ``Feeder``.
        route: As for ``Feeder``.
        verify: Keep a copy of every row that was lent, run the synchronous loop on it beside this
            one, and raise VerificationError at the first difference. It waits for the device at
            every batch.
        progress: Show a progress bar.
        timeline: Record what takes time in every batch.

    Raises:
        ArgumentError: No tables, tables that share rows, some that are sharded and some that are
            not, or an optimizer that is no RowOptimizer.
        UnknownArgument: There is no such argument. The message says where it goes instead.
        DeviceError: There is no such device.
    """
    return RowLoop(
        loader,
        tables,
        optimizer,
        depth=depth,
        device=device,
        route=route,
        verify=verify,
        progress=progress,
        timeline=timeline,
    )


class RowLoop(LoaderFeeder):
    """What ``train_rows`` returns: one loop after the other over the loader, each an epoch."""

    def __init__(
        self,
        loader: Any,
        tables: Mapping[HostEmbedding, Any],
        optimizer: RowOptimizer | Iterable[RowOptimizer],
        *,
        depth: int,
        device: Any,
        route: str | None,
        verify: bool,
        progress: bool,
        timeline: bool,
    ) -> None:
        depth = check_depth(depth)
        for name, flag in (("verify", verify), ("progress", progress), ("timeline", timeline)):
            check_flag(flag, name)
        optimizers = _check(tables, optimizer)
        self._tables = [_Lent(table, optimizers.get(table)) for table in tables]
        specs = [
            TableSpec(
                lent.table.name,
                _ids_of(lent.table, tables[lent.table]),
                lent.stores,
                lent.table.num_embeddings,
            )
            for lent in self._tables
        ]
        every = {
            f"{lent.table.name}.{name}": store
            for lent in self._tables
            for name, store in zip(lent.names, lent.stores, strict=True)
        }
        if shared := aliases(list(every), list(every.values())):
            raise ArgumentError(
                f"{shared} have rows in common; give tables that are one as one HostEmbedding, looked up several times"
            )
        schedule = PrefetchSchedule(
            depth, n_readers=max(1, min(depth + 1, len(os.sched_getaffinity(0)) // 2, _MAX_READERS))
        )
        self._rows = _source(loader, self._tables, specs, schedule, verify)
        super().__init__(
            self._rows,
            device=device,
            schedule=schedule,
            progress=progress,
            timeline=timeline,
            n_spare=(len(every) + len(specs) + 4) * (2 * depth + 2),
            stores=list(every.values()),
            route=check_route(route),
        )
        self._verify = verify
        self._shadow: Shadow | None = None
        self._loan: LentBatch | None = None
        # The loop's, while one runs.
        self._thread: int | None = None
        # As the epoch began.
        self._random: dict[str, Any] = {}
        # The epoch of the last set_epoch.
        self._told: int | None = None
        # A state that was loaded, taken when all batches of its epoch had been lent.
        self._whole: Mapping[str, Any] | None = None
        self._outer: weakref.ref[GeneratorType[Any, None, None]] | None = None

    @safe_repr
    def __repr__(self) -> str:
        tables = [
            f"{lent.table.name} ({lent.table.num_embeddings:,}, {lent.table.embedding_dim})"
            for lent in self._tables
        ]
        loader = type(self._loader).__name__
        return f"<RowLoop: a {loader}, with rows of {', '.join(tables)}; batches on {self.device}, {self._loop}>"

    def __iter__(self) -> Iterator[Any]:
        """The loader's next epoch, on the device, with the rows of the tables.

        Raises:
            ClosedError: This is closed, or another loop over it or over one of its tables runs.
            StoreError: If a table or its optimizer's state is in a file that was there already, and
                was not resumed.
        """
        with self._rows.report_failure():
            for lent in self._tables:
                lent.require_resumed()
        for lent in self._tables:
            # And again when it begins: two may be made before either does.
            lent.table.require_idle()
        loans = cast(
            "Generator[LentBatch, None, None]", self._loop.run(lambda loan: loan, begin=self._begin)
        )
        generator = cast("GeneratorType[Any, None, None]", self._lend(loans))
        self._outer = weakref.ref(generator)
        return generator

    @property
    def route(self) -> str:
        """How the rows come and go, and why; nothing where there is no choice."""
        return self._route

    @property
    def exchanged(self) -> Exchanged:
        """What was sent to other ranks so far, in bytes, for sharded tables."""
        return self._rows.exchanged

    @property
    def epoch(self) -> int:
        """Number of the epoch that runs, or of the one that the next loop is."""
        return self._loop.epoch

    def set_epoch(self, number: int) -> None:
        """Let the next loop be epoch ``number``, and tell the loader's sampler and dataset, as ``wrap_loader`` does."""
        super().set_epoch(number)
        self._told = number
        if self._whole is not None and number != self._whole["epoch"] + 1:
            self._whole = None

    def state_dict(self) -> dict[str, Any]:
        """Where the loop is, as plain values and tensors: in the loop's body, the batch of that body counts as done.

        The rows are not in it: ``pinfeed.checkpoint`` saves them beside it.
        """
        if self._whole is not None:
            return dict(self._whole)
        return {**self._loop.state(), "told": self._told, "random": self._random}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next loop go on where the state was taken: with the very next batch, if the loader draws from generators that are here.

        The loader begins the epoch again, with the generators as they were then, and the batches
        that were done are dropped.

        Raises:
            ArgumentError: It is not such a state, or of a loop over other tables.
        """
        if not {"told", "random"} <= set(state):
            raise ArgumentError(
                "not a state of a loop over train_rows; expected what state_dict() returned"
            )
        if state["told"] is not None:
            self.set_epoch(state["told"])
        self._loop.load_state(state)
        self._random = dict(state["random"])
        self._whole = dict(state) if state["batch"] and not self._loop.start else None

    def land(self) -> None:
        """Bring every change so far, those of the batch that is lent as well, into the stores.

        Raises:
            ClosedError: A loop runs in another thread.
            Exception: That of a write-back that failed, as it was.
        """
        if self._thread not in (None, threading.get_ident()):
            raise ClosedError(
                "rows were asked for in a thread that is not the one of the loop over train_rows which lends them; ask in the loop's body "
                "(the functions that give the ids of a batch run in a background thread)"
            )
        if self._loan is not None:
            self._write_back(self._loan, copied=True, check=True)
        self._loop.land()

    @property
    def is_running(self) -> bool:
        """Whether a loop runs: it has been begun, and neither been left nor come to its end."""
        generator = self._outer() if self._outer is not None else None
        return generator is not None and generator.gi_frame is not None

    def release_tables(self) -> None:
        """Give the tables back, if the loop has ended and interrupts kept it from doing so, or if nobody can go on with it.

        Raises:
            Exception: If a write-back has failed, its error, as it was.
        """
        if self.is_running and not self._is_abandoned():
            return
        if self._outer is not None and (generator := self._outer()) is not None:
            generator.close()
        for lent in self._tables:
            if lent.table._lender is self:
                lent.end()
        self._forget()
        self._loop.land()

    def close(self) -> None:
        """End a loop that runs, and land its changes.

        The loader, tables and optimizers stay as they are. Idempotent.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(super().close)
            generator = self._outer() if self._outer is not None else None
            # As Loop.close() does: what does not end here raises ClosedError when it is asked for a
            # batch.
            if (
                generator is not None
                and is_suspended(generator)
                and self._thread in (None, threading.get_ident())
            ):
                generator.close()

    def _is_abandoned(self) -> bool:
        return self._outer is not None and is_abandoned(self._outer)

    def _begin(self) -> None:
        if self._whole is not None:
            self._go_on(self._whole["batch"], to_the_end=True)
            self._whole = None
        if self._loop.start:
            self._go_on(self._loop.start)
        else:
            self._random = self._captured()
            self._source.begin()
        if self._verify:
            self._shadow = Shadow(
                [(lent.table.name, lent.names, lent.stores) for lent in self._tables]
            )

    def _captured(self) -> dict[str, Any]:
        """What the loader may draw from, now."""
        return {
            **rng_state.capture(),
            "loader": [one.get_state() for one in rng_state.generators(self._loader)],
        }

    def _go_on(self, start: int, *, to_the_end: bool = False) -> None:
        """Begin the epoch as it was begun, and drop what was done of it; or all of it, for what the loader draws at its end."""
        for generator, state in zip(
            rng_state.generators(self._loader), self._random["loader"], strict=True
        ):
            generator.set_state(state)
        with rng_state.replayed(self._random):
            self._source.begin()
            self._source.skip(start)
            if to_the_end:
                self._source.finish()

    def _lend(self, loans: Generator[LentBatch, None, None]) -> Iterator[Any]:
        with contextlib.ExitStack() as stack:
            stack.callback(self._forget)
            for lent in self._tables:
                lent.begin(self)
                stack.callback(lent.end)
            stack.enter_context(self._rows.claim_ranks())
            stack.enter_context(contextlib.closing(loans))
            stack.enter_context(self._rows.in_lockstep())
            self._thread = threading.get_ident()
            for loan in loans:
                data = self._bind(loan)
                left = True
                try:
                    yield data
                    left = False
                    for lent in self._tables:
                        lent.warn_of_unused_gradients()
                finally:
                    # Left by break or by an error, what the optimizer has done counts, as it does
                    # in the plain loop.
                    del data
                    try:
                        self._write_back(loan, copied=False, check=not left)
                    finally:
                        self._unbind()
            if self._shadow is not None:
                self._shadow.check_stores()

    def _bind(self, loan: LentBatch) -> Any:
        """Lend the rows to the tables and their optimizers, and the loader's batch to the loop."""
        batch: DeviceBatch = loan.take()
        if self._shadow is not None:
            self._shadow.check(loan.number, [(fed.rows, fed.tensors) for fed in batch.tables])
        blocks = batch.batch_rows([lent.trainable for lent in self._tables])
        if self._shadow is not None:
            batch.check(loan.number)
        for lent, fed, block in zip(self._tables, batch.tables, blocks, strict=True):
            lent.bind(block, fed.tensors[1:])
        self._loan = loan
        return batch.data

    def _unbind(self) -> None:
        self._loan = None
        for lent in self._tables:
            lent.unbind()

    def _forget(self) -> None:
        self._loan = self._shadow = self._thread = None

    def _write_back(self, loan: LentBatch, *, copied: bool, check: bool) -> None:
        values = [lent.changed() for lent in self._tables]
        if any(tensors is not None for tensors in values) or self._rows.writes_always:
            if self._shadow is not None:
                self._shadow.write(
                    [
                        (group.rows, tensors)
                        for group, tensors in zip(loan.groups, values, strict=True)
                    ]
                )
            loan.write(values, copied=copied, check=check)


class _Lent:
    """A table of the loop, and the optimizer that steps on it."""

    def __init__(self, table: HostEmbedding, optimizer: RowOptimizer | None) -> None:
        self.table = table
        self.optimizer = optimizer
        self.trainable = table.trainable
        self._is_warned = False
        state = optimizer.tables[table] if optimizer is not None else None
        self.names = [
            "weight",
            *([row.key for row in state.layout.rows] if state is not None else []),
        ]
        self.stores = [table.store, *(state.stores if state is not None else [])]

    def require_resumed(self) -> None:
        """Check that the rows and their state are those of this run."""
        self.table.require_resumed()
        if self.optimizer is not None:
            self.optimizer.require_resumed()

    def begin(self, loop: RowLoop) -> None:
        """The loop begins; no other one may lend the table's rows now."""
        self.table._take(loop)
        self.trainable = self.table.trainable

    def end(self) -> None:
        """The loop has ended."""
        self.unbind()
        self.table._release()

    def bind(self, block: BatchRows, state: list[torch.Tensor]) -> None:
        """Lend rows to the table, with their state to its optimizer."""
        self.table._batch_rows = block
        if self.optimizer is not None:
            self.optimizer.bind(self.table, block.owned, state, block.weight)

    def warn_of_unused_gradients(self) -> None:
        """Say once that rows of a batch whose body has ended have gradients and stay as they are."""
        block = self.table.block
        if self._is_warned or block.touched:
            return
        if self.optimizer is None and block.weight.grad is not None:
            self._is_warned = True
            logger.warning(
                "%s has gradients, and train_rows no optimizer of it: its rows stay as they are, unless the loop changes them by hand; "
                "give optimizer=pinfeed.RowOptimizer(...)",
                self.table.name,
            )
        if self.optimizer is not None and self.optimizer.tables[self.table].has_unused_gradients:
            self._is_warned = True
            logger.warning(
                "%s has gradients, and the body of the loop ended without a step of its optimizer: its rows stay as they are, and the "
                "gradients go with the batch; call step() of the RowOptimizer in each batch (a GradScaler that leaves out a step is right)",
                self.table.name,
            )

    def unbind(self) -> None:
        """The rows have gone."""
        self.table._batch_rows = None
        if self.optimizer is not None:
            self.optimizer.release(self.table)

    def changed(self) -> list[torch.Tensor | None] | None:
        """Values for the stores: weights and state after a step; the weights alone without one, for they may be changed by hand too."""
        block = self.table.block
        touched = block.touched
        state = (
            self.optimizer.changed(self.table)
            if self.optimizer is not None and self.trainable
            else None
        )
        if state is None and not touched:
            # Through weight.data, which is not counted.
            by_hand = self.trainable and self.table.training and self.table.store.writable
            if not by_hand:
                return None
        if not self.trainable and not self.table.store.writable:
            # max_norm: every look-up does it again.
            return None
        kept: Sequence[torch.Tensor | None] = (
            state if state is not None else [None] * (len(self.stores) - 1)
        )
        return [
            None if tensor is None else tensor.detach().contiguous()
            for tensor in (block.owned, *kept)
        ]


def _check(
    tables: Any, optimizer: RowOptimizer | Iterable[RowOptimizer]
) -> dict[HostEmbedding, RowOptimizer]:
    """The optimizer of each table that has one."""
    if (
        not isinstance(tables, Mapping)
        or not tables
        or not all(isinstance(table, HostEmbedding) for table in tables)
    ):
        kinds = (
            ", ".join(sorted({type(table).__name__ for table in tables}))
            if isinstance(tables, Mapping)
            else type(tables).__name__
        )
        raise ArgumentError(
            f"tables: got {kinds or 'none'}; expected {{table: ids_of_batch}}, with one HostEmbedding or several"
        )
    if isinstance(optimizer, type) or not isinstance(
        optimizer, (torch.optim.Optimizer, Iterable, NoneType)
    ):
        raise ArgumentError(
            f"optimizer={optimizer!r}: expected a RowOptimizer, or several: pinfeed.RowOptimizer(torch.optim.Adam, [table])"
        )
    optimizers = (
        [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())
    )
    found: dict[HostEmbedding, RowOptimizer] = {}
    for one in optimizers:
        if not isinstance(one, RowOptimizer):
            raise ArgumentError(
                f"optimizer: got {type(one).__name__}; expected RowOptimizers (dense parameters are stepped by the loop alone)"
            )
        for table in one.tables:
            if table in found:
                raise ArgumentError(f"{table.name} is trained by two optimizers; expected one")
            found[table] = one
    return found


def _source(
    loader: Any,
    tables: Sequence[_Lent],
    specs: Sequence[TableSpec],
    schedule: PrefetchSchedule,
    verify: bool,
) -> TableRowSource:
    """The loader's batches with rows of tables that are here, or of tables that are shared.

    Raises:
        ArgumentError: Some are, and some are not; or they are shared among different ranks.
    """
    shared = [lent.table for lent in tables if isinstance(lent.table, ShardedEmbedding)]
    if not shared:
        return TableRowSource(loader, specs)
    if len(shared) < len(tables) or any(
        table.rank_group is not shared[0].rank_group for table in shared
    ):
        kinds = ", ".join(
            f"{lent.table.name} ({'sharded' if isinstance(lent.table, ShardedEmbedding) else 'not sharded'})"
            for lent in tables
        )
        raise ArgumentError(
            f"tables: {kinds}; expected all of them sharded, over the same process_group, or none"
        )
    sharded = [
        ShardedTableSpec(spec, lent.optimizer is not None, table.mean)
        for spec, lent, table in zip(specs, tables, shared, strict=True)
    ]
    return ShardedSource(loader, sharded, shared[0].rank_group, schedule, verify)


def _ids_of(table: HostEmbedding, value: Any) -> IdsOf:
    if callable(value):
        found: IdsOf = value
        return found

    def at_key(batch: Any) -> Any:
        try:
            return batch[value]
        except (LookupError, TypeError) as error:
            has = (
                f"keys {', '.join(map(repr, batch))}"
                if isinstance(batch, Mapping)
                else f"{type(batch).__name__}"
            )
            raise ArgumentError(
                f"{table.name}: ids at {value!r} of a batch that has {has}; expected the key of its ids"
            ) from error

    return at_key
