"""ShardedEmbedding: a table whose rows are spread over the ranks of a job."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from pinfeed.errors import ArgumentError, StoreError
from pinfeed.rows.orders import Rows
from pinfeed.stores import ArrayStore, MmapStore, Store
from pinfeed.tensors.numpy_torch import TORCH, memory_of, to_numpy, to_torch
from pinfeed.training.distributed.initialization import drawn
from pinfeed.training.distributed.lockstep import Step
from pinfeed.training.distributed.process_groups import peers_of
from pinfeed.training.distributed.row_partition import RowPartition
from pinfeed.training.embeddings.table import HostEmbedding, HostEmbeddingBag, Path
from pinfeed.training.row_file import row_chunks, write_rows
from pinfeed.validation.arguments import check_flag

Gradients = Literal["mean", "sum"]

_REFUSED = {
    "max_norm": "changes rows where they are looked up",
    "scale_grad_by_freq": "counts ids in the batches of all ranks",
}


class ShardedEmbedding(HostEmbedding):
    """A ``HostEmbedding`` of which every rank of a job has its share: row r is on rank ``r % world_size``, with its optimizer's state.

    It is used as a ``HostEmbedding`` is, with the same ids, on all ranks at once: each loops over
    batches of its own, and looks up any rows of the table. What the ranks do together is what one
    process does with their batches joined. These are done by all ranks together, in the same order:
    making a table, loops over ``train_rows``, ``read``, ``export``, ``to_embedding``, and look-ups
    outside a loop.

    Args:
        num_embeddings: Rows of the whole table.
        embedding_dim: Numbers in a row.
        process_group: The ranks; None for all of the job. The first table of a group makes two
            groups of gloo beside it, with the timeout of this group.
        gradients: A row's gradient is the ``"mean"`` over ranks, as in ``DistributedDataParallel``:
            right where each rank's loss is a mean over a batch of equal length. Or their ``"sum"``,
            for losses that are sums.
        store: Where this rank's rows are: a Store of this many, a path that gets the rank into its
            name (``users.npy`` is ``users.0-of-4.npy``), or None for memory.
        options: As for ``HostEmbedding``, without ``max_norm`` and ``scale_grad_by_freq``. The
            table begins as a ``HostEmbedding`` does with the same seed of torch's, the same on
            every rank, drawn in pieces of 16 MiB.

    Raises:
        ArgumentError: No ranks, more ranks than rows, an option that a rank cannot do alone, or an
            ``init`` that needs the whole table.
        StoreError: As for ``HostEmbedding``.
        RankError: If another rank did not make the table within the timeout of the process group.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        process_group: Any = None,
        gradients: Gradients = "mean",
        store: Store | Path | None = None,
        **options: Any,
    ) -> None:
        if gradients not in get_args(Gradients):
            raise ArgumentError(f"gradients={gradients!r}: expected 'mean' or 'sum'")
        for option, why in _REFUSED.items():
            if options.get(option):
                raise ArgumentError(
                    f"{option}={options[option]!r} of a sharded table: it {why}; expected none, or a HostEmbedding"
                )
        self.peers = peers_of(process_group)
        self.mean = gradients == "mean"
        if isinstance(store, (str, os.PathLike)):
            path = pathlib.Path(store)
            store = path.with_name(
                f"{path.stem}.{self.peers.rank}-of-{self.peers.size}{path.suffix}"
            )
        super().__init__(num_embeddings, embedding_dim, store=store, **options)

    @classmethod
    def from_pretrained(
        cls, embeddings: Any, *, freeze: bool = True, name: str | None = None, **options: Any
    ) -> Any:
        """A table that begins with the rows of a whole one, which every rank reads its share of.

        Args:
            embeddings: The whole table: a 2-d tensor or array, a path of a .npy file, or a Store.
                It stays as it is.
            freeze: Whether the table's rows stay as they are, too.
            name: As above.
            options: As above.

        Raises:
            StoreError: They are not rows of floating point numbers.
            ArgumentError: If ``freeze`` is neither True nor False, or an option cannot be.
        """
        check_flag(freeze, "freeze")
        opened = isinstance(embeddings, (str, os.PathLike))
        whole: Store = (
            MmapStore(embeddings)
            if opened
            else embeddings
            if isinstance(embeddings, Store)
            else ArrayStore(embeddings)
        )
        try:
            if len(whole.row_shape) != 1:
                raise StoreError(
                    f"embeddings of shape {(whole.n_rows, *whole.row_shape)}; expected (num_embeddings, embedding_dim)"
                )
            dtype = TORCH[np.dtype(whole.dtype)]
            table = cls(
                whole.n_rows, whole.row_shape[0], init="zeros", dtype=dtype, name=name, **options
            )
            # A file that was there already gets its rows from a checkpoint.
            for start, stop in [] if table.awaits_resume else row_chunks(whole):
                rows = table.owners.own(table.peers.rank, start, stop)
                values = np.empty((len(rows), *whole.row_shape), whole.dtype)
                whole.gather(rows, values)
                table.store.scatter(table.owners.here(rows), values)
        finally:
            if opened:
                whole.close()
        return table.requires_grad_(not freeze)

    @property
    def owners(self) -> RowPartition:
        """Which rank has which row."""
        return RowPartition(self.num_embeddings, self.peers.size)

    def read(self, ids: Any) -> torch.Tensor:
        """As that of ``HostEmbedding``.

        All ranks do this at once, each with ids of its own, or none.

        Raises:
            RowIndexError: An id is out of range.
            ClosedError: As that of ``HostEmbedding``.
            RankError: Another rank failed, or does something else.
        """
        # In a thread that is not the loop's this fails, before anything is exchanged there.
        self.land()
        with self.peers.loop.telling():
            return super().read(ids)

    def export(self, path: Path) -> None:
        """Save the whole table as one .npy file, which rank 0 writes, piece by piece; the file is there whole, or as it was.

        All ranks do this at once. When it returns, the file is there.

        Raises:
            OSError: What the file system says, on rank 0.
            RankError: What it says there, on the others.
        """
        self.land()
        with self.peers.loop.telling():
            self.require_resumed()
            if self.peers.rank == 0:
                super().export(path)
            else:
                for _ in row_chunks(self._whole):
                    self._gathered(np.empty(0, np.int64))
            self.peers.loop.meet(Step.EXPORT)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank {self.peers.rank} of {self.peers.size}"

    def _n_own_rows(self) -> int:
        if self.num_embeddings < self.peers.size:
            raise ArgumentError(
                f"{self.name}: {self.num_embeddings} rows over {self.peers.size} ranks; expected a row for each, at least"
            )
        return self.owners.n_own(self.peers.rank)

    def _fill(self, fill: Callable[[torch.Tensor], Any]) -> None:
        rank = self.peers.rank
        owners = self.owners
        store = self._store
        for start, piece in drawn(
            fill, (self.num_embeddings, self.embedding_dim), TORCH[np.dtype(store.dtype)]
        ):
            rows = owners.own(rank, start, start + len(piece))
            store.scatter(owners.here(rows), to_numpy(piece, "init")[rows - start])
        padding = self.padding_idx
        if padding is not None and padding % owners.size == rank:
            store.scatter(
                owners.here(np.array([padding])), np.zeros((1, self.embedding_dim), store.dtype)
            )

    def _gathered(self, rows: Rows) -> npt.NDArray[Any]:
        """Rows of the whole table. All ranks do this at once, each with rows of its own."""
        meeting, store = self.peers.loop, self._store
        order, n_wanted = self.owners.by_owner(rows)
        meeting.meet(Step.READ)
        n_asked = meeting.counts(n_wanted)
        ids = torch.from_numpy(self.owners.here(rows)[order].reshape(-1, 1))
        asked = meeting.send_rows("reads", [ids], [n_wanted], [n_asked])[0].numpy()[:, 0]
        values = np.empty((len(asked), *store.row_shape), store.dtype)
        store.gather(asked, values)
        meeting.meet(Step.ROWS)
        out = np.empty((len(rows), *store.row_shape), store.dtype)
        out[order] = memory_of(
            meeting.send_rows("reads", [to_torch(values)], [n_asked], [n_wanted])[0]
        )
        return out

    def _write_rows(self, file: Any) -> None:
        write_rows(self._whole, file)

    @property
    def _whole(self) -> _Whole:
        return _Whole(self)


class ShardedEmbeddingBag(ShardedEmbedding, HostEmbeddingBag):
    """A ``ShardedEmbedding`` that reduces the rows of each bag, as ``HostEmbeddingBag`` does, with its arguments."""


class _Whole:
    """The whole table, as far as writing it needs a Store."""

    def __init__(self, table: ShardedEmbedding) -> None:
        self._table = table
        self.n_rows = table.num_embeddings
        self.row_shape = (table.embedding_dim,)
        self.dtype = table.store.dtype

    def gather(self, rows: Rows, out: npt.NDArray[Any]) -> None:
        """Bring rows from those who have them."""
        out[...] = self._table._gathered(rows)
