"""HostEmbedding: an embedding table in host memory or in a file, trained row by row."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from pinfeed.errors import ClosedError, StoreError
from pinfeed.rows.indices import check_rows
from pinfeed.rows.orders import Rows
from pinfeed.stores import NpyStore, Store
from pinfeed.stores.pinned import Pin
from pinfeed.tensors.argument_types import Ids, Source
from pinfeed.tensors.numpy_torch import to_torch
from pinfeed.training.embeddings.batch_rows import BatchRows, loops_over, position_in
from pinfeed.training.embeddings.table_arguments import (
    HINTS,
    DeviceCacheSize,
    Fill,
    Init,
    Path,
    check_device_cache,
    check_is_table,
    checked_padding,
    fill_store,
    find_initializer,
    integer_tensor,
    open_pretrained,
    open_table_store,
    zero_row,
)
from pinfeed.training.row_file import atomic_write, write_rows
from pinfeed.validation.arguments import (
    check_file_to_make,
    check_flag,
    explain_arguments,
    real_number,
    whole_number,
)

if TYPE_CHECKING:
    from pinfeed.training.row_loop.loop_table import LoopTable


class HostEmbedding(nn.Module):
    """An embedding table in host memory or in a file, used like ``torch.nn.Embedding``.

    In a loop over ``train_rows``, the rows that a batch looks up are on the device. They are the
    parameter ``weight`` of shape (rows of the batch, embedding_dim), sorted by id. Each id appears
    once, so torch adds the gradients of repeated ids. ``RowOptimizer`` trains ``weight``.
    ``parameters()`` and ``state_dict()`` of a model do not contain it, so a dense optimizer does
    not change it.

    In a loop over ``read_rows``, rows have no gradients and are not written back. Outside a loop,
    lookups need eval mode or ``torch.no_grad()``. They read rows from the store.

    Examples:
        >>> users = pinfeed.HostEmbedding(1_000, 16, name="users")
        >>> optimizer = pinfeed.RowOptimizer(torch.optim.Adam, [users], lr=1e-3)
        >>> loader = [{"user": torch.tensor([3, 7, 3])}]
        >>> for batch in pinfeed.train_rows(loader, {users: "user"}, optimizer=optimizer):
        ...     users(batch["user"]).square().mean().backward()
        ...     optimizer.step()
        >>> users.read([3, 7]).shape
        torch.Size([2, 16])

    Args:
        num_embeddings: Number of rows.
        embedding_dim: Length of a row.
        padding_idx: Row that begins as zeros and whose gradient is zero, as in ``nn.Embedding``.
        max_norm: Largest norm of a row, as in ``nn.Embedding``. A lookup renormalizes longer rows
            that it returns. In a loop over ``train_rows``, a lookup in training mode with gradients
            also renormalizes them in the table. In eval mode or without gradients, and outside such
            a loop, a lookup never changes the table.
        norm_type: Order p of the norm that ``max_norm`` limits.
        scale_grad_by_freq: Whether gradients are divided by the frequency of their id in the batch,
            as in ``nn.Embedding``.
        init: Initial values: the name of a function of ``torch.nn.init`` (``"normal"``,
            ``"xavier_uniform"``), or a function that fills a given tensor in place. Random values
            are from torch's generator as in ``nn.Embedding``, so the same seed gives the same
            table. With None, a given Store keeps its rows, and a new table is ``"normal"``.
        dtype: Dtype of the table, as torch or numpy spells it. None is torch's default dtype.
        store: Location of the rows: a path of a .npy file to create, a Store of shape
            (num_embeddings, embedding_dim), or None for host memory. An existing file of the same
            shape and dtype is opened and not changed. Such a table cannot be used until
            ``checkpoint.resume`` has replaced its rows. The same program can therefore start a run
            and resume it.
        pin: Whether host memory is page-locked (pinned), as in ``PinnedStore``.
        overwrite: Whether an existing file is replaced by a new one immediately.
        name: Name of the table in errors and checkpoints. The default is its type and shape.
        device_cache: Size of a cache that keeps frequently used rows and their optimizer state on
            the device during a loop: bytes as an int or as text (``"4GiB"``), or a share of the
            rows as a float (``0.1``). ``"auto"`` takes a part of the memory that
            ``train_rows(config=...)`` or the free memory leaves. Results are the same with and
            without a cache. None is no cache.

    Raises:
        ArgumentError: If a size, an option or an initializer is invalid, or if ``init`` returns a
            tensor other than the given one.
        UnknownArgument: If an argument does not exist. The message says what to pass instead.
        FileMissing: If the directory of the file that ``store`` names does not exist.
        MemoryError: If the system does not have enough memory.
        StoreError: If the store has another shape, the dtype is not floating point, or a different
            file exists at the path. Also if the table has more bytes than memory or a file can
            have, or if it is used before ``checkpoint.resume`` has replaced existing rows.
    """

    # It is one class because all of it is one nn.Module interface. Stores, initializers and the
    # rows of a batch have modules of their own.

    # The loop over train_rows that uses the table, and the rows of its current batch outside
    # evaluating().
    _training: LoopTable | None = None
    _batch_rows: BatchRows | None = None

    @explain_arguments(HINTS)
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        init: Init | None = None,
        dtype: torch.dtype | npt.DTypeLike | None = None,
        store: Store | Path | None = None,
        pin: Pin = "auto",
        overwrite: bool = False,
        name: str | None = None,
        device_cache: DeviceCacheSize | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings = whole_number(num_embeddings, "num_embeddings", most=sys.maxsize)
        self.embedding_dim = whole_number(embedding_dim, "embedding_dim", most=sys.maxsize)
        self.name = name or f"{type(self).__name__}({num_embeddings}, {embedding_dim})"
        self.padding_idx = checked_padding(padding_idx, self.num_embeddings)
        self.max_norm = None if max_norm is None else real_number(max_norm, "max_norm", least=0)
        self.norm_type = real_number(norm_type, "norm_type")
        check_flag(scale_grad_by_freq, "scale_grad_by_freq")
        check_flag(overwrite, "overwrite")
        self.scale_grad_by_freq = scale_grad_by_freq
        self.device_cache = check_device_cache(device_cache)
        fill = find_initializer(init)
        self.overwrite = overwrite
        self.trainable = True
        # Loops over read_rows, in the order in which they have begun.
        self._readers: dict[LoopTable, None] = {}
        shape = (self._n_own_rows(), self.embedding_dim)
        opened, is_existing = open_table_store(store, self.name, shape, dtype, pin, overwrite)
        self._store = opened
        self._owned = opened is not store
        self.awaits_resume = is_existing
        """Whether ``checkpoint.resume`` has yet to replace the rows of an existing file."""
        # New memory and new files are zeros already.
        needs_fill = init not in ("zeros", "zeros_") if self._owned else init is not None
        if needs_fill and not self.awaits_resume:
            try:
                self._fill(fill)
            except BaseException:
                self.close()
                if isinstance(store, (str, os.PathLike)):
                    # The next attempt would take it for a file of an earlier run.
                    os.remove(store)
                raise

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Source,
        *,
        freeze: bool = True,
        name: str | None = None,
        pin: Pin = "auto",
        **options: Any,
    ) -> Any:
        """Make a table from existing rows, without a copy unless ``pin`` is True.

        Args:
            embeddings: The rows: a 2-d tensor or array, a path of a .npy file, or a Store. A file
                is opened for reading if ``freeze``. Otherwise its rows are trained in place.
            freeze: Whether the rows stay untrained, as in ``nn.Embedding.from_pretrained``.
            name: As for the class.
            pin: Whether to copy the rows into page-locked (pinned) memory, as
                ``PinnedStore(embeddings)`` does, so that a GPU can read them directly. The table
                then trains the copy, which is ``table.store``. With ``"auto"`` or False, the rows
                stay in their memory and are not pinned. Pinning in place is unsafe, because after a
                fork the process and the GPU may see different pages.
            options: As for the class: ``padding_idx``, ``max_norm``, ``norm_type``,
                ``scale_grad_by_freq``, ``device_cache``. ``overwrite`` concerns the files of the
                optimizer state.

        Raises:
            StoreError: If ``embeddings`` are not rows of floating point numbers.
            ArgumentError: If ``freeze`` is neither True nor False, or an option is invalid.
            MissingDependency: If ``pin`` is True, and CuPy or a CUDA device is missing.
            DeviceError: If ``pin`` is True, and the system or the driver refuses to lock the
                memory.
        """
        check_flag(freeze, "freeze")
        store = open_pretrained(embeddings, freeze=freeze, pin=pin)
        is_owned = store is not embeddings
        with contextlib.ExitStack() as undo:
            if is_owned:
                undo.callback(store.close)
            check_is_table(store)
            table = cls(store.n_rows, store.row_shape[0], store=store, name=name, **options)
            undo.pop_all()
        table._owned = is_owned
        return table.requires_grad_(not freeze)

    def forward(self, ids: Ids) -> torch.Tensor:
        """Look up rows.

        In a loop, ids are *announced* if the loop's function for this table returned them for the
        batch. A lookup without training (in a loop over ``read_rows``, or in eval mode without
        gradients) reads other ids from the store, with their present values.

        Args:
            ids: Integers of any dtype and shape, in a tensor, an array or a list.

        Returns:
            The rows in the dtype of the table, shape (*ids.shape, embedding_dim). They are on the
            device of the loop, or outside a loop on the device of ``ids``.

        Raises:
            RowIndexError: If an id is out of range. Also if an id was not announced, and the table
                is sharded, or is used in a loop over ``train_rows`` in training mode or with
                gradients.
            ClosedError: If the table is in training mode with gradients, outside a loop or inside
                ``evaluating()``, where its rows would not be trained.
        """
        positions, weight, padding = self._look_up(integer_tensor(ids, f"{self.name}: ids"))
        return functional.embedding(
            positions,
            weight,
            padding,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self._gives_sparse,
        )

    @property
    def store(self) -> Store:
        """Store of the rows.

        It has all changes of a loop after ``flush_writes()``, and after the end of the loop.
        """
        return self._store

    @property
    def weight(self) -> nn.Parameter:
        """Rows of the current batch on the device, shape (n, embedding_dim), sorted by id.

        The training step may change them in any way. After the step, pinfeed writes them back, and
        the program must not change them. Use ``clone()`` to keep a copy.

        Raises:
            ClosedError: If the program is not in a step of a loop over the table. Inside
                ``evaluating()``, only loops over ``read_rows`` count.
        """
        return self.block.weight

    @property
    def block(self) -> BatchRows:
        """Rows of the current batch, with their row indices.

        Raises:
            ClosedError: If the program is not in a step of a loop over the table. Inside
                ``evaluating()``, only loops over ``read_rows`` count.
        """
        lent = self._batch_rows
        if lent is None:
            read = self._rows_to_read()
            if read:
                return read[0]
            self._refuse_in_evaluation("weight")
            raise ClosedError(
                f"{self.name} has rows on the device only inside a loop over train_rows or "
                "read_rows; outside, use read(ids) or store"
            )
        # The program may change its data, in any mode.
        lent.may_be_trained = True
        return lent

    def requires_grad_(self, requires_grad: bool = True) -> HostEmbedding:
        """Set whether the table is trained, from the next loop on.

        Raises:
            ArgumentError: If ``requires_grad`` is neither True nor False.
        """
        check_flag(requires_grad, "requires_grad")
        self.trainable = requires_grad
        return self

    def read(self, ids: Ids) -> torch.Tensor:
        """Read rows with their present values. In a loop, pending writes are flushed first.

        Args:
            ids: Integers of any shape, in a tensor, an array or a list.

        Returns:
            A copy of the rows on the CPU, shape (*ids.shape, embedding_dim), in the dtype of the
            table, without gradients.

        Raises:
            RowIndexError: If an id is out of range.
            ClosedError: If a loop in another thread trains the table.
            StoreError: If the table is in an existing file that was not resumed.
        """
        array = np.asarray(ids.detach().cpu() if isinstance(ids, torch.Tensor) else ids)
        rows = check_rows(array.reshape(-1), self.num_embeddings, self.name)
        self.require_resumed()
        self.flush_writes()
        return to_torch(self._gathered(rows)).view(*array.shape, self.embedding_dim)

    def flush_writes(self) -> None:
        """Write every change of a running loop to the store. Without a loop, do nothing.

        This includes loops over other tables that share the rows.

        Raises:
            Exception: If a write-back has failed. The original error is raised.
            ClosedError: If the loop runs in another thread.
        """
        sessions = [used.session for used in loops_over(self, [self._store], reads=True)]
        for session in dict.fromkeys(sessions):
            if session is not None and session.is_running:
                session.flush_writes()
            elif session is not None:
                session.release_if_over()

    def require_idle(self) -> None:
        """Check that no loop runs over this table, or over a table that shares its rows.

        Raises:
            ClosedError: If such a loop runs.
        """
        for used in loops_over(self, [self._store], writes=True):
            used.require_compatible()

    def require_not_lent(self) -> None:
        """Check that no loop lends rows of this table; tables that share its rows do not count.

        Raises:
            ClosedError: If a loop does.
        """
        for used in loops_over(self, []):
            used.require_compatible()

    def require_resumed(self) -> None:
        """Check that the rows belong to this run.

        Raises:
            StoreError: If they are in an existing file, and ``checkpoint.resume`` has not replaced
                them.
        """
        if self.awaits_resume and isinstance(self._store, NpyStore):
            path = self._store.paths[0]
            raise StoreError(
                f"{path} existed before {self.name} was made, and its rows are unchanged; expected "
                "checkpoint.resume, which replaces them, before the table is used; to start a new "
                "table, give overwrite=True or another path; to train the existing rows, use "
                f"HostEmbedding.from_pretrained({path!r}, freeze=False)"
            )

    def export(self, path: Path) -> None:
        """Save the table atomically as a .npy file, with the same bytes as ``numpy.save``.

        It writes the rows in chunks of 16 MiB.

        Args:
            path: File to create or replace.

        Raises:
            OSError: If the file system refuses.
            StoreError: If ``path`` is a directory, or the table's own file, which already has the
                rows. Also if the table is in an existing file that was not resumed.
            FileMissing: If the directory of the file does not exist.
            ArgumentError: If ``path`` is not a path.
        """
        check_file_to_make(path)
        self.require_resumed()
        self.flush_writes()
        own_files = self._store.paths if isinstance(self._store, NpyStore) else ()
        if os.path.exists(path) and any(os.path.samefile(path, own) for own in own_files):
            raise StoreError(
                f"export to {os.fspath(path)!r}, which is the file of {self.name} and already has "
                "its rows; expected another path"
            )
        with atomic_write(path) as file:
            self._write_rows(file)

    def to_embedding(self) -> nn.Embedding:
        """Return an ``nn.Embedding`` with a copy of the whole table."""
        whole = self.read(np.arange(self.num_embeddings))
        embedding: nn.Embedding = nn.Embedding.from_pretrained(
            whole,
            freeze=not self.trainable,
            padding_idx=self.padding_idx,
            max_norm=self.max_norm,
            norm_type=self.norm_type,
            scale_grad_by_freq=self.scale_grad_by_freq,
        )
        return embedding

    def reset_parameters(self, init: Init | None = None) -> None:
        """Fill the table with new initial values, as the constructor does.

        Args:
            init: As for the class.

        Raises:
            ClosedError: If a loop over the table is running.
            StoreError: If the table is in an existing file that was not resumed.
        """
        self.require_idle()
        self.require_resumed()
        self._fill(find_initializer(init))

    def close(self) -> None:
        """Flush and close the store, if the table made it. A second call does nothing.

        Raises:
            ClosedError: If a loop over the rows runs, because its last changes would be lost.
        """
        self.require_not_lent()
        if self._owned:
            self._store.close()

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, store={type(self._store).__name__}"

    def _n_own_rows(self) -> int:
        """Return the number of rows in the store of this process."""
        return self.num_embeddings

    def _gathered(self, rows: Rows) -> npt.NDArray[Any]:
        """Return rows of the table, with their values in the store."""
        out = np.empty((len(rows), self.embedding_dim), self._store.dtype)
        self._store.gather(rows, out)
        return out

    def _write_rows(self, file: IO[bytes]) -> None:
        """Write the whole table to an open file, as .npy."""
        write_rows(self._store, file)

    def _fill(self, fill: Fill) -> None:
        """Fill the store, and set the padding row to zeros."""
        fill_store(self._store, fill, self.name)
        if self.padding_idx is not None:
            zero_row(self._store, self.padding_idx)

    def __getstate__(self) -> dict[str, Any]:
        # A copy of a model does not belong to the loop in whose training step it was made.
        return {**self.__dict__, "_training": None, "_readers": {}}

    def _refuse_in_evaluation(self, what: str) -> None:
        """Check that the training step of the table's loop is not inside ``evaluating()``.

        Args:
            what: Name of what the program requested.

        Raises:
            ClosedError: If it is inside.
        """
        if self._is_in_evaluation:
            raise ClosedError(
                f"{what} of {self.name} was requested inside evaluating(), where rows can be read "
                "and not trained; leave evaluating() first"
            )

    @property
    def _is_in_evaluation(self) -> bool:
        """Whether the training step of the table's loop is inside ``evaluating()``."""
        # Read once, because the loop of another thread may end now.
        training = self._training
        session = None if training is None else training.session
        return session is not None and session.is_evaluating

    def _lend(self, rows: BatchRows | None) -> None:
        """Continue with the rows of another batch, or with none."""
        # nn.Module would first search its parameters, buffers and modules for this name.
        object.__setattr__(self, "_batch_rows", rows)

    @property
    def _gives_sparse(self) -> bool:
        """Whether lookups give the rows of the current batch sparse gradients."""
        return self._batch_rows is not None and self._batch_rows.sparse

    @property
    def _is_trained(self) -> bool:
        """Whether a lookup now is one of a training step: in training mode, with gradients."""
        return self.training and torch.is_grad_enabled()

    def _rows_to_read(self) -> list[BatchRows]:
        """Return the rows of loops over ``read_rows`` in this thread, with the newest loop first.

        Only the thread of a loop sees its rows, because on a GPU another thread may use another
        stream.
        """
        if not self._readers:
            return []
        here = threading.get_ident()
        readers = reversed(list(self._readers))
        found = [used.rows for used in readers if used.thread == here]
        return [rows for rows in found if rows is not None]

    def _look_up(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Return positions of ids in some rows, these rows, and the position of the padding row."""
        lent = self._batch_rows
        if lent is not None:
            lent.may_be_trained |= self.training
        every = self._rows_to_read() if lent is None else [lent]
        for rows in every:
            look_for = rows.find if self._may_read_others() else rows.positions
            positions = look_for(ids, self.name)
            if positions is not None:
                weight: torch.Tensor = rows.weight
                if self.max_norm is not None and not (lent is not None and self._is_trained):
                    # torch renormalizes the rows of a lookup in place.
                    weight = weight.clone()
                return positions, weight, position_in(rows.rows, self.padding_idx)
        if not every and self.trainable and self._is_trained:
            self._refuse_in_evaluation("a lookup in training mode with gradients")
            raise ClosedError(
                f"{self.name} was called in training mode outside a loop over train_rows, where "
                "its rows would not be trained; loop over "
                "pinfeed.train_rows(loader, {table: ids_of_batch}, optimizer=...), "
                "or use torch.no_grad() or eval()"
            )
        return self._look_up_in_store(ids, every)

    def _may_read_others(self) -> bool:
        """Return whether a lookup in a loop may read rows that the batch does not have."""
        if self._batch_rows is None:
            return True
        # A copy of the table does not know which changes its store still lacks.
        return self._training is not None and not self.training and not torch.is_grad_enabled()

    def _look_up_in_store(
        self, ids: torch.Tensor, lent: Sequence[BatchRows]
    ) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Look up rows with their present values; some of the rows may be lent.

        Args:
            ids: The ids.
            lent: Rows that loops lend; the rows of a training step are newer than the store.
        """
        rows, positions = np.unique(np.asarray(ids.detach().cpu()), return_inverse=True)
        if self._batch_rows is None:
            weight = self.read(rows).to(lent[0].weight.device if lent else ids.device)
        else:
            check_rows(rows, self.num_embeddings, self.name)
            assert self._training is not None
            assert self._training.session is not None
            # The training step may still change the rows of its batch.
            self._training.session.flush_writes(of_step=False)
            weight = self._batch_rows.newest(rows, to_torch(self._gathered(rows)))
        return (
            torch.from_numpy(positions.reshape(ids.shape)).to(weight.device),
            weight,
            position_in(rows, self.padding_idx),
        )
