"""ShardedEmbedding: an embedding table whose rows are spread over the ranks of a job.

Its initial rows are drawn in chunks, and equal those of one draw for all rows.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from pinfeed.errors import ArgumentError, described
from pinfeed.rows.orders import Rows
from pinfeed.stores import Store
from pinfeed.tensors.argument_types import Ids, Source
from pinfeed.tensors.numpy_torch import TORCH, memory_of, to_numpy, to_torch
from pinfeed.training.distributed.lockstep import RankStep
from pinfeed.training.distributed.rank_loop import rank_group_of
from pinfeed.training.distributed.row_exchange import RowPartition
from pinfeed.training.embeddings.bag import HostEmbeddingBag
from pinfeed.training.embeddings.table import HostEmbedding
from pinfeed.training.embeddings.table_arguments import (
    Fill,
    Path,
    check_is_table,
    open_pretrained,
    zero_row,
)
from pinfeed.training.row_file import CHUNK_BYTES, row_chunks, write_rows
from pinfeed.validation.arguments import check_choice, check_flag

Gradients = Literal["mean", "sum"]

_REFUSED = {
    "max_norm": "would change rows of other ranks in a lookup",
    "scale_grad_by_freq": "needs the id counts of the batches of all ranks",
}


class ShardedEmbedding(HostEmbedding):
    """A ``HostEmbedding`` whose rows are spread over the ranks of a job.

    Row ``r`` and its optimizer state are on rank ``r % world_size``. Each rank loops over its own
    batches and may look up any row of the table, with the same ids as in a ``HostEmbedding``.
    Together, the ranks compute the same result as one process with their batches joined.

    All ranks do the following together, in the same order: create a table, loop over
    ``train_rows``, call ``read``, ``export`` and ``to_embedding``, and look up rows outside a loop.

    Examples:
        Under torchrun, ``init_process_group()`` needs no arguments. Here, the job is one process.

        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> users = pinfeed.ShardedEmbedding(1_000, 16, name="users")
        >>> users.read([3, 7]).shape
        torch.Size([2, 16])
        >>> torch.distributed.destroy_process_group()

    Args:
        num_embeddings: Number of rows of the whole table.
        embedding_dim: Length of a row.
        process_group: Process group of the ranks. None is all ranks of the job. The first table of
            a group creates two gloo process groups for the same ranks, with the timeout of the
            group.
        gradients: Reduction of a row's gradient over ranks. Use ``"mean"``, as in
            ``DistributedDataParallel``, if the loss of each rank is a mean over a batch of equal
            length. Use ``"sum"`` if the losses are sums.
        store: Location of this rank's rows: a Store with exactly these rows, a path, or None for
            host memory. The rank is added to the name of the file, so ``users.npy`` becomes
            ``users.0-of-4.npy``.
        options: As for ``HostEmbedding``, without ``max_norm`` and ``scale_grad_by_freq``. If all
            ranks seed torch's generator with the same number, the table has the same initial values
            as a ``HostEmbedding``. They are drawn in chunks of 16 MiB.

    Raises:
        ArgumentError: If torch.distributed is not initialised, this process is not in
            ``process_group``, or the table has fewer rows than ranks. Also if a rank cannot apply
            an option alone, or ``init`` needs the whole table.
        StoreError: As for ``HostEmbedding``.
        RankError: If another rank did not create the table within the timeout of the process group.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        process_group: ProcessGroup | None = None,
        gradients: Gradients = "mean",
        store: Store | Path | None = None,
        **options: Any,
    ) -> None:
        check_choice(gradients, "gradients", get_args(Gradients))
        for option, reason in _REFUSED.items():
            value = options.get(option)
            # max_norm=0 is a limit, too.
            if value is not None and value is not False:
                raise ArgumentError(
                    f"{option}={value!r} of a sharded table: it {reason}; "
                    "omit it, or use a HostEmbedding"
                )
        group = rank_group_of(process_group)
        self.rank_group = group
        self.mean = gradients == "mean"
        if isinstance(store, (str, os.PathLike)):
            path = pathlib.Path(store)
            store = path.with_name(f"{path.stem}.{group.rank}-of-{group.size}{path.suffix}")
        super().__init__(num_embeddings, embedding_dim, store=store, **options)

    @classmethod
    def from_pretrained(
        cls, embeddings: Source, *, freeze: bool = True, name: str | None = None, **options: Any
    ) -> Any:
        """Make a table from existing rows. Every rank copies its own rows.

        Args:
            embeddings: The whole table: a 2-d tensor or array, a path of a .npy file, or a Store.
                It is not changed.
            freeze: Whether the rows of the new table stay untrained.
            name: As for the class.
            options: As for the class.

        Raises:
            StoreError: If ``embeddings`` are not rows of floating point numbers.
            ArgumentError: If ``freeze`` is neither True nor False, or an option is invalid.
        """
        check_flag(freeze, "freeze")
        with contextlib.ExitStack() as stack:
            whole = open_pretrained(embeddings, freeze=True, pin=False)
            if whole is not embeddings:
                stack.callback(whole.close)
            check_is_table(whole)
            dtype = TORCH[np.dtype(whole.dtype)]
            dim = whole.row_shape[0]
            table = cls(whole.n_rows, dim, init="zeros", dtype=dtype, name=name, **options)
            # checkpoint.resume replaces the rows of an existing file.
            if not table.awaits_resume:
                table._copy_own_rows(whole)
        return table.requires_grad_(not freeze)

    @property
    def owners(self) -> RowPartition:
        """Assignment of rows to ranks."""
        return RowPartition(self.num_embeddings, self.rank_group.size)

    def read(self, ids: Ids) -> torch.Tensor:
        """Read rows with their present values, as ``HostEmbedding.read`` does.

        All ranks call this at once, each with its own ids, which may be empty.

        Raises:
            RowIndexError: If an id is out of range.
            ClosedError: As for ``HostEmbedding.read``.
            RankError: If another rank failed, or takes another step.
        """
        # In another thread than the loop's, this raises before the ranks exchange anything.
        self.flush_writes()
        with self.rank_group.loop_lockstep.report_failure():
            return super().read(ids)

    def export(self, path: Path) -> None:
        """Save the whole table atomically as one .npy file.

        All ranks call this at once, and rank 0 writes the file chunk by chunk. When the call
        returns, the file exists.

        Args:
            path: File to create or replace.

        Raises:
            OSError: If the file system refuses on rank 0.
            RankError: If another rank has failed.
        """
        self.flush_writes()
        lockstep = self.rank_group.loop_lockstep
        with lockstep.report_failure():
            self.require_resumed()
            if self.rank_group.rank == 0:
                super().export(path)
            else:
                for _ in row_chunks(_WholeTable(self)):
                    self._gathered(np.empty(0, np.int64))
            lockstep.agree(RankStep.EXPORT)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank {self.rank_group.rank} of {self.rank_group.size}"

    def _n_own_rows(self) -> int:
        group = self.rank_group
        if self.num_embeddings < group.size:
            raise ArgumentError(
                f"{self.name}: {self.num_embeddings} rows over {group.size} ranks; "
                "expected at least one row for each rank"
            )
        return self.owners.n_own(group.rank)

    def _fill(self, fill: Fill) -> None:
        rank = self.rank_group.rank
        owners = self.owners
        store = self._store
        shape = (self.num_embeddings, self.embedding_dim)
        for start, chunk in draw_chunks(fill, shape, TORCH[np.dtype(store.dtype)]):
            rows = owners.own(rank, start, start + len(chunk))
            store.scatter(owners.local(rows), to_numpy(chunk, "init")[rows - start])
        if self.padding_idx is not None and self.padding_idx % owners.size == rank:
            zero_row(store, self.padding_idx // owners.size)

    def _copy_own_rows(self, whole: Store) -> None:
        """Copy this rank's rows of the whole table."""
        owners = self.owners
        for start, stop in row_chunks(whole):
            rows = owners.own(self.rank_group.rank, start, stop)
            values = np.empty((len(rows), *whole.row_shape), whole.dtype)
            whole.gather(rows, values)
            self._store.scatter(owners.local(rows), values)

    def _gathered(self, rows: Rows) -> npt.NDArray[Any]:
        """Return rows of the whole table. All ranks call this at once, each with its own rows."""
        lockstep = self.rank_group.loop_lockstep
        store = self._store
        order, n_wanted = self.owners.by_owner(rows)
        numbers = lockstep.agree(RankStep.READ, numbers=np.array(n_wanted)[:, None])
        n_asked = numbers[:, 0].tolist()
        ids = torch.from_numpy(self.owners.local(rows)[order].reshape(-1, 1))
        asked = lockstep.exchange_rows("reads", [ids], [n_wanted], [n_asked])[0].numpy()[:, 0]
        values = np.empty((len(asked), *store.row_shape), store.dtype)
        store.gather(asked, values)
        lockstep.agree(RankStep.ROWS)
        found = lockstep.exchange_rows("reads", [to_torch(values)], [n_asked], [n_wanted])[0]
        out = np.empty((len(rows), *store.row_shape), store.dtype)
        out[order] = memory_of(found)
        return out

    def _may_read_others(self) -> bool:
        # All ranks read together, but perhaps only one of them has ids that were not announced.
        return False

    def _write_rows(self, file: Any) -> None:
        write_rows(_WholeTable(self), file)


class ShardedEmbeddingBag(ShardedEmbedding, HostEmbeddingBag):
    """A ``ShardedEmbedding`` that reduces the rows of each bag, as ``HostEmbeddingBag`` does.

    It takes the arguments of both classes.

    Examples:
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> words = pinfeed.ShardedEmbeddingBag(1_000, 16, mode="sum", name="words")
        >>> with torch.no_grad():
        ...     sums = words(torch.tensor([1, 2, 3, 4]), offsets=torch.tensor([0, 3]))
        >>> sums.shape
        torch.Size([2, 16])
        >>> torch.distributed.destroy_process_group()
    """


class _WholeTable:
    """The rows of a sharded table on all ranks, for writing them to a file."""

    def __init__(self, table: ShardedEmbedding) -> None:
        self._table = table
        self.n_rows = table.num_embeddings
        self.row_shape = (table.embedding_dim,)
        self.dtype = table.store.dtype

    def gather(self, rows: Rows, out: npt.NDArray[Any]) -> None:
        """Gather rows from the ranks that have them. All ranks call this at once."""
        out[...] = self._table._gathered(rows)


OperatorCall = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A torch operator, its positional arguments and its keyword arguments."""

# torch draws normal numbers on the CPU in groups of sixteen. If the last group is smaller, torch
# draws it together with the numbers before it.
_DRAWN_TOGETHER = 16
_DRAWS = {torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default}
_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default}
_EXPECTED = (
    "a rank has only its own rows; expected a function that draws each number once and separately "
    "(normal, uniform, xavier_*, kaiming_*, ones, zeros), or store= with this rank's rows"
)


class _OperatorRecorder(TorchDispatchMode):
    """Records the operators that are called on a tensor without data."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[OperatorCall] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def draw_chunks(
    fill: Fill, shape: tuple[int, int], dtype: torch.dtype
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the initial rows of a table in chunks.

    The numbers and the final state of torch's generator equal those of one call for all rows.

    Args:
        fill: Initializer. It is called with a tensor of the whole shape, without data.
        shape: Shape of the whole table.
        dtype: Dtype of the table.

    Yields:
        The index of the first row of a chunk, and the rows of the chunk.

    Raises:
        ArgumentError: If the initializer needs the whole table at once.
    """
    calls = _recorded_calls(fill, shape, dtype)
    length = max(1, CHUNK_BYTES // (_DRAWN_TOGETHER * shape[1] * dtype.itemsize)) * _DRAWN_TOGETHER
    # The last chunk is at least as long as the others.
    starts = range(0, shape[0], length)[: max(1, shape[0] // length)]
    for start in starts:
        stop = shape[0] if start == starts[-1] else start + length
        chunk = torch.empty((stop - start, shape[1]), dtype=dtype, device="cpu")
        with torch.no_grad():
            for func, args, kwargs in calls:
                func(chunk, *args[1:], **kwargs)
        yield start, chunk


def _recorded_calls(fill: Fill, shape: tuple[int, int], dtype: torch.dtype) -> list[OperatorCall]:
    """Return the operators that an initializer calls on a table.

    Raises:
        ArgumentError: If they cannot be called chunk by chunk.
    """
    whole = torch.empty(shape, dtype=dtype, device="meta")
    try:
        with torch.no_grad(), _OperatorRecorder() as recorder:
            fill(whole)
    except Exception as error:
        raise ArgumentError(
            f"init failed on a tensor without data ({described(error)}); {_EXPECTED}"
        ) from error
    calls: list[OperatorCall] = recorder.calls
    others = [call[0] for call in calls if not _is_elementwise(call, whole)]
    n_draws = sum(func in _DRAWS for func, _, _ in calls)
    problem = ""
    if others:
        problem = f"calls {others[0]}, which needs the whole table at once"
    elif not calls:
        problem = "has no effect on a tensor without data (like orthogonal and trunc_normal)"
    elif n_draws > 1:
        problem = f"draws the same numbers {n_draws} times"
    if problem:
        raise ArgumentError(f"init {problem}; {_EXPECTED}")
    return calls


def _is_elementwise(call: OperatorCall, whole: torch.Tensor) -> bool:
    """Return whether a call changes each number of the table in place and independently."""
    func, args, kwargs = call
    is_pointwise = torch.Tag.pointwise in func.tags and func._schema.name.endswith("_")
    is_in_place = func in _DRAWS or func in _FILLS or is_pointwise
    others = [*args[1:], *(value for name, value in kwargs.items() if name != "generator")]
    has_tensors = any(isinstance(value, torch.Tensor) for value in others)
    return bool(is_in_place and args and args[0] is whole and not has_tensors)
