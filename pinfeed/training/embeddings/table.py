"""HostEmbedding: a table in host memory or in a file, its batch's rows on the device."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from pinfeed.errors import ArgumentError, ClosedError, RowIndexError, StoreError, described
from pinfeed.rows.indices import check_rows
from pinfeed.rows.orders import Rows
from pinfeed.stores import ArrayStore, MmapStore, PinnedStore, Store
from pinfeed.stores.base import shape_to_make
from pinfeed.stores.file import open_created
from pinfeed.stores.pinned import Pin
from pinfeed.tensors.dtypes import dtype_of
from pinfeed.tensors.numpy_torch import TORCH, to_torch
from pinfeed.training.row_file import Gathered, write_rows
from pinfeed.validation.arguments import (
    check_file_to_make,
    check_flag,
    explain_arguments,
    real_number,
    whole_number,
)

Init = str | Callable[[torch.Tensor], Any]
Path = str | os.PathLike[str]

HINTS = {
    "sparse": "the rows of a batch alone are moved and trained, always; leave it out, and train the table with pinfeed.RowOptimizer",
    "device": "the table stays in host memory or in a file; the device of the loop is train_rows(..., device=...)",
    **dict.fromkeys(
        ("_weight", "weight"), "give the rows to HostEmbedding.from_pretrained(rows, freeze=False)"
    ),
    **dict.fromkeys(
        ("freeze", "_freeze"),
        "give it to HostEmbedding.from_pretrained(rows, freeze=...), or call requires_grad_(False)",
    ),
    "mode": "bags of rows are a HostEmbeddingBag(num_embeddings, embedding_dim, mode=...)",
    **dict.fromkeys(("path", "filename"), "the file of the rows is store="),
}
"""Advice, by the names that torch has for it."""

# Tables are copied in pieces of this size.
_PIECE_BYTES = 16 << 20


class RowLender(Protocol):
    """A loop that lends a table's rows."""

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        ...

    def land(self) -> None:
        """Bring every change so far into the stores. In the loop's thread."""

    def let_go(self) -> None:
        """Give the tables back, if the loop has ended and interrupts kept it from doing so, or if nobody can go on with it."""


class BatchRows:
    """The rows of a table that one batch looks up.

    Args:
        rows: Their numbers, ascending, each once, shape (n,).
        ids: The same on the device, int64.
        weight: Their values on the device, shape (n, embedding_dim).
        positions: Ids that are known to be looked up, and where they are.
    """

    def __init__(
        self,
        rows: Rows,
        ids: torch.Tensor,
        weight: nn.Parameter,
        positions: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self.rows = rows
        self.ids = ids
        self.weight = weight
        self._version = version_of(weight)
        self._known = [(known, version_of(known), where) for known, where in positions]

    @property
    def owned(self) -> nn.Parameter:
        """What an optimizer steps on, and what is written back."""
        return self.weight

    @property
    def touched(self) -> bool:
        """Whether the values were changed in place, as far as torch counts: it does not where ``weight.data`` is changed."""
        return version_of(self.weight) != self._version

    def positions(self, ids: torch.Tensor, name: str) -> torch.Tensor:
        """Where in the block the ids are, in the shape of ``ids``.

        Raises:
            RowIndexError: One is not there. On a GPU, where nobody waits to see, an assertion on
                the device.
        """
        if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype is torch.bool:
            raise RowIndexError(f"{name}: ids of {ids.dtype}; expected integers (mask: ids[mask])")
        for known, version, where in self._known:
            if ids is known and version_of(ids) == version:
                # As they were when the batch was prepared.
                return where
        wanted = ids.to(self.ids.device, torch.int64, non_blocking=True)
        if not len(self.rows):
            if ids.numel():
                raise self._missing(name, int(wanted.reshape(-1)[0]))
            return wanted
        positions = torch.searchsorted(self.ids, wanted).clamp_(max=len(self.rows) - 1)
        found = self.ids[positions] == wanted
        if self.ids.device.type == "cpu":
            if not bool(found.all()):
                raise self._missing(name, int(wanted[~found].reshape(-1)[0]))
        else:
            torch._assert_async(
                found.all(), f"{name}: an id that was not announced to train_rows for this batch"
            )
        return positions

    def collect(self, blocks: Sequence[Any]) -> None:
        """Bring the gradients of ``weight`` to ``owned``, in this block and in others of its kind."""

    def position_of(self, row: int | None) -> int | None:
        """Where in the block a row is; None if it is not."""
        return None if row is None else _position(self.rows, row)

    @staticmethod
    def _missing(name: str, row: int) -> RowIndexError:
        return RowIndexError(
            f"{name}: id {row} was not announced for this batch; expected the function that train_rows was given for this table to return "
            "every id that is looked up (a tuple of tensors for several inputs). For other rows: read(ids)"
        )


class HostEmbedding(nn.Module):
    """An embedding table in host memory or in a file, used like ``torch.nn.Embedding`` in a loop over ``train_rows``.

    In the loop, the rows of the batch are a parameter on the device, ``weight``, shape (rows of the
    batch, embedding_dim): ascending by id, each id once, so that ids that repeat add their
    gradients. It is no parameter of the module: ``parameters()`` and ``state_dict()`` of a model do
    not see it, so that a dense optimizer leaves it alone; ``RowOptimizer`` trains it. Outside a
    loop, rows are read where they are, without gradients.

    Args:
        num_embeddings: Rows.
        embedding_dim: Numbers in a row.
        padding_idx: As in ``nn.Embedding``: this row begins as zeros, and its gradient is zero.
        max_norm: As in ``nn.Embedding``: rows that are longer are renormalised, in the table too,
            when they are looked up in a loop.
        norm_type: Of ``max_norm``.
        scale_grad_by_freq: As in ``nn.Embedding``.
        init: How the table begins: the name of a function of ``torch.nn.init`` (``"normal"``,
            ``"xavier_uniform"``), or a function that fills the tensor that it is given, in place.
            Drawn from torch's generator as ``nn.Embedding`` does: the same seed gives the same
            table. None leaves a Store that is given as it is, and is ``"normal"`` for others.
        dtype: Of the table, as torch or numpy spells it; torch's default if None.
        store: Where the rows are: a path of a .npy file that is created, or a Store of shape
            (num_embeddings, embedding_dim); None for memory. A file of the same shape and dtype
            that is there already stays as it is, and can be used when ``checkpoint.resume`` has
            replaced its rows: so a run is resumed by the program that began it.
        pin: For memory: as in ``PinnedStore``.
        overwrite: Whether a file that is there is replaced by a new one at once.
        name: What errors and checkpoints call it.

    Raises:
        ArgumentError: Sizes, options or an initialiser that cannot be, or an ``init`` that returns
            another tensor than it was given.
        UnknownArgument: There is no such argument. The message says what to give instead.
        FileMissing: The directory of the file that ``store`` names does not exist.
        MemoryError: The system does not have so much memory.
        StoreError: A store of another shape, a dtype that is not floating point, another file that
            is there already, or more bytes than memory or a file can have. If the rows of a file
            that was there already are used before ``checkpoint.resume`` has replaced them.
    """

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
    ) -> None:
        super().__init__()
        self.num_embeddings = whole_number(num_embeddings, "num_embeddings", most=sys.maxsize)
        self.embedding_dim = whole_number(embedding_dim, "embedding_dim", most=sys.maxsize)
        self.name = name or f"{type(self).__name__}({num_embeddings}, {embedding_dim})"
        self.padding_idx = self._checked_padding(padding_idx)
        self.max_norm = None if max_norm is None else real_number(max_norm, "max_norm", least=0)
        self.norm_type = real_number(norm_type, "norm_type")
        check_flag(scale_grad_by_freq, "scale_grad_by_freq")
        check_flag(overwrite, "overwrite")
        self.scale_grad_by_freq = scale_grad_by_freq
        fill = _initialiser(init)
        shape = (self._n_own_rows(), self.embedding_dim)
        self.overwrite = overwrite
        self.trainable = True
        self._block: BatchRows | None = None
        self._lender: RowLender | None = None
        self.awaits_resume = False
        """Whether the rows are those of a file that was there already, and ``checkpoint.resume`` has not replaced them yet."""
        self._store, self._owned = self._opened(store, shape, dtype, pin)
        # New memory and files are zeros.
        is_to_fill = init not in ("zeros", "zeros_") if self._owned else init is not None
        if is_to_fill and not self.awaits_resume:
            try:
                self._fill(fill)
            except BaseException:
                self.close()
                if isinstance(store, (str, os.PathLike)):
                    # It would be refused at the next attempt.
                    os.remove(store)
                raise

    @classmethod
    def from_pretrained(
        cls, embeddings: Any, *, freeze: bool = True, name: str | None = None, **options: Any
    ) -> Any:
        """A table of rows that are there: a 2-d tensor or array, shared, a path of a .npy file, or a Store.

        Args:
            embeddings: The rows. A file is opened for reading if ``freeze``, else its rows are
                trained in place.
            freeze: Whether they stay as they are.
            name: As above.
            options: As above: ``padding_idx``, ``max_norm``, ``norm_type``, ``scale_grad_by_freq``;
                ``overwrite`` for the files of its optimizer's state.

        Raises:
            StoreError: They are not rows of floating point numbers.
            ArgumentError: If ``freeze`` is neither True nor False, or an option cannot be.
        """
        check_flag(freeze, "freeze")
        owned = isinstance(embeddings, (str, os.PathLike))
        if owned:
            store: Store = MmapStore(embeddings, mode="r" if freeze else "r+")
        else:
            store = (
                embeddings
                if isinstance(embeddings, Store)
                else ArrayStore(embeddings, name="embeddings")
            )
        if len(store.row_shape) != 1:
            raise StoreError(
                f"embeddings of shape {(store.n_rows, *store.row_shape)}; expected (num_embeddings, embedding_dim)"
            )
        table = cls(store.n_rows, store.row_shape[0], store=store, name=name, **options)
        table._owned = owned
        return table.requires_grad_(not freeze)

    def forward(self, ids: Any) -> torch.Tensor:
        """The rows of the ids, shape (*ids.shape, embedding_dim), on the device of the loop, or of ``ids`` outside a loop.

        Args:
            ids: Integers of any dtype and shape, in a tensor, an array or a list.

        Raises:
            RowIndexError: An id is out of range, or was not announced to ``train_rows``.
            ClosedError: Outside a loop, where the rows would not be trained, in training and with
                gradients.
        """
        positions, weight, padding = self._looked_up(_integers(ids, f"{self.name}: ids"))
        return functional.embedding(
            positions, weight, padding, self.max_norm, self.norm_type, self.scale_grad_by_freq
        )

    @property
    def store(self) -> Store:
        """The rows themselves; after a loop, or after ``land()`` of it, as they were trained."""
        return self._store

    @property
    def weight(self) -> nn.Parameter:
        """The rows of the batch that is lent, on the device, shape (n, embedding_dim), ascending by id.

        In the body of the loop they may be changed in any way; afterwards they are on their way
        back, and to be left alone (``clone()``).

        Raises:
            ClosedError: There is none.
        """
        return self.block.weight

    @property
    def block(self) -> BatchRows:
        """What is lent now.

        Raises:
            ClosedError: Nothing is.
        """
        if self._block is None:
            raise ClosedError(
                f"{self.name} has rows on the device only in the body of a loop over train_rows; outside: read(ids), store"
            )
        return self._block

    def requires_grad_(self, requires_grad: bool = True) -> HostEmbedding:
        """Let the table be trained, or not. From the next loop on.

        Raises:
            ArgumentError: If ``requires_grad`` is neither True nor False.
        """
        check_flag(requires_grad, "requires_grad")
        self.trainable = requires_grad
        return self

    def read(self, ids: Any) -> torch.Tensor:
        """Rows as they are now, shape (*ids.shape, embedding_dim), on the CPU, without gradients.

        In a loop, what is under way lands first.

        Args:
            ids: A tensor, array or list of integers, of any shape.

        Raises:
            RowIndexError: An id is out of range.
            ClosedError: A loop in another thread has rows of the table under way.
            StoreError: If the table is in a file that was there already, and was not resumed.
        """
        array = np.asarray(ids.detach().cpu() if isinstance(ids, torch.Tensor) else ids)
        rows = check_rows(array.reshape(-1), self.num_embeddings, self.name)
        self.require_resumed()
        self.land()
        return to_torch(self._gathered(rows)).view(*array.shape, self.embedding_dim)

    def land(self) -> None:
        """In a loop, bring every change so far into the store.

        Raises:
            Exception: That of a write-back that failed, as it was.
            ClosedError: The loop runs in another thread.
        """
        if (lender := self._running()) is not None:
            lender.land()

    def require_idle(self) -> None:
        """Check that no loop lends rows of the table.

        Raises:
            ClosedError: One does.
        """
        if self._lender is not None:
            self._lender.let_go()
        if self._lender is not None:
            raise ClosedError(
                f"a loop over rows of {self.name} is running; end it first: leave its body, or close() what train_rows returned"
            )

    def require_resumed(self) -> None:
        """Check that the rows are those of this run.

        Raises:
            StoreError: If they are in a file that was there before the table, and
                ``checkpoint.resume`` has not replaced them.
        """
        if self.awaits_resume and isinstance(self._store, MmapStore):
            path = self._store.paths[0]
            raise StoreError(
                f"{path} was there already when {self.name} was made, and is as it was; expected checkpoint.resume with this table "
                "before it is used, which replaces the rows; or give "
                f"overwrite=True to begin anew, HostEmbedding.from_pretrained({path!r}, freeze=False) to train the rows that are there, or "
                "another path"
            )

    def export(self, path: Path) -> None:
        """Save the table as a .npy file, as ``numpy.save`` would, piece by piece; the file is there whole, or as it was.

        Raises:
            OSError: What the file system says.
            StoreError: It is the table's own file, which has the rows when a loop has ended; or
                this file was not resumed; or ``path`` is a directory.
            FileMissing: If the directory of the file does not exist.
            ArgumentError: If ``path`` is no path.
        """
        check_file_to_make(path)
        self.require_resumed()
        self.land()
        if (
            isinstance(self._store, MmapStore)
            and os.path.exists(path)
            and any(os.path.samefile(path, own) for own in self._store.paths)
        ):
            raise StoreError(
                f"export to {os.fspath(path)!r}, which is {self.name}'s own file and has its rows; expected another path"
            )
        aside = f"{os.fspath(path)}.{os.getpid()}.writing"
        try:
            with open(aside, "wb") as file:
                self._write_rows(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(aside)

    def to_embedding(self) -> nn.Embedding:
        """An ``nn.Embedding`` with a copy of the whole table."""
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
        """Fill the table anew, as the constructor does.

        Raises:
            ClosedError: A loop lends its rows.
            StoreError: If the table is in a file that was there already, and was not resumed.
        """
        self.require_idle()
        self.require_resumed()
        self._fill(_initialiser(init))

    def close(self) -> None:
        """Flush and close the table's own store. Idempotent."""
        if self._owned:
            self._store.close()

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, store={type(self._store).__name__}"

    def _n_own_rows(self) -> int:
        """Rows of the store."""
        return self.num_embeddings

    def _gathered(self, rows: Rows) -> npt.NDArray[Any]:
        """Rows as they are in the store."""
        out = np.empty((len(rows), self.embedding_dim), self._store.dtype)
        self._store.gather(rows, out)
        return out

    def _write_rows(self, file: IO[bytes]) -> None:
        """Write the whole table as a .npy file."""
        write_rows(self._store, file)

    def _fill(self, fill: Callable[[torch.Tensor], Any]) -> None:
        """Fill the whole table at once, where it is: initialisers look at its shape, and draw it in one go."""
        store = self._store
        with torch.no_grad(), contextlib.ExitStack() as stack:
            if isinstance(store, ArrayStore) and store.writable:
                array = store.array
            elif isinstance(store, MmapStore) and store.writable:
                array = stack.enter_context(store.mapped())
            else:
                raise StoreError(
                    f"{self.name}: init cannot fill {'a' if store.writable else 'a read-only'} {type(store).__name__} as a whole; "
                    "fill it before, and leave init out"
                )
            fill(to_torch(array))
        if self.padding_idx is not None:
            store.scatter(
                np.array([self.padding_idx]), np.zeros((1, self.embedding_dim), store.dtype)
            )

    def _take(self, lender: RowLender) -> None:
        """A loop begins to lend rows; no other one does until ``_release``."""
        self.require_idle()
        self._lender = lender

    def _release(self) -> None:
        self._lender = self._block = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy of a model, made in the body of a loop, is not in that loop.
        return {**self.__dict__, "_lender": None}

    def _running(self) -> RowLender | None:
        """The loop that lends rows of the table now."""
        if self._lender is not None and not self._lender.is_running:
            self._lender.let_go()
        return self._lender

    def _looked_up(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Positions, rows, and the position of the padding."""
        block = self._block
        if block is not None:
            return (
                block.positions(ids, self.name),
                block.weight,
                block.position_of(self.padding_idx),
            )
        if self.training and self.trainable and torch.is_grad_enabled():
            raise ClosedError(
                f"{self.name} was called outside a loop over train_rows, where its rows would not be trained; "
                "loop over pinfeed.train_rows(loader, {table: ids_of_batch}, optimizer=...), or use torch.no_grad() or eval()"
            )
        rows, positions = np.unique(np.asarray(ids.detach().cpu()), return_inverse=True)
        weight = self.read(rows)
        padding = None if self.padding_idx is None else _position(rows, self.padding_idx)
        return (
            torch.from_numpy(positions.reshape(ids.shape)).to(ids.device),
            weight.to(ids.device),
            padding,
        )

    def _checked_padding(self, padding: int | None) -> int | None:
        if padding is None:
            return None
        n = self.num_embeddings
        return (
            whole_number(padding, "padding_idx", least=-n, most=n - 1, note=f" (a row of {n:,})")
            % n
        )

    def _opened(
        self, store: Store | Path | None, shape: tuple[int, int], dtype: Any, pin: Pin
    ) -> tuple[Store, bool]:
        """The store, and whether it was made here."""
        wanted = dtype_of(torch.get_default_dtype() if dtype is None else dtype, self.name)
        if not TORCH[wanted].is_floating_point:
            raise StoreError(f"{self.name}: dtype={dtype}; expected a floating point dtype")
        if store is None or isinstance(store, (str, os.PathLike)):
            shape_to_make(shape, wanted, self.name)
        elif not isinstance(store, Store):
            raise ArgumentError(
                f"{self.name}: store={type(store).__name__}; expected a path of a .npy file, or a Store; rows that are there already are "
                "given as pinfeed.ArrayStore(array), or to HostEmbedding.from_pretrained(array, freeze=False)"
            )
        if store is None:
            return PinnedStore.empty(shape, wanted, pin=pin), True
        if isinstance(store, (str, os.PathLike)):
            self.awaits_resume = os.path.lexists(store) and not self.overwrite
            if self.awaits_resume:
                return open_created(store, shape, wanted), True
            return MmapStore.create(store, shape, wanted, overwrite=self.overwrite), True
        if (store.n_rows, *store.row_shape) != shape:
            raise StoreError(
                f"{self.name}: a store of shape {(store.n_rows, *store.row_shape)}; expected {shape}"
            )
        if not TORCH[np.dtype(store.dtype)].is_floating_point or (
            dtype is not None and wanted != store.dtype
        ):
            raise StoreError(
                f"{self.name}: a store of {store.dtype}; expected {dtype or 'a floating point dtype'}"
            )
        return store, False


class HostEmbeddingBag(HostEmbedding):
    """A ``HostEmbedding`` that reduces the rows of each bag, used like ``torch.nn.EmbeddingBag``.

    Where the padding row is not among a batch's, torch sums bags with weights in another order than
    where there is one: the last bit may differ from ``nn.EmbeddingBag``.

    Args:
        num_embeddings: Rows.
        embedding_dim: Numbers in a row.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        include_last_offset: As in ``nn.EmbeddingBag``.
        options: As for ``HostEmbedding``.

    Raises:
        ArgumentError: Another mode.
    """

    @explain_arguments(HINTS)
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        **options: Any,
    ) -> None:
        if mode not in ("sum", "mean", "max"):
            raise ArgumentError(f"mode={mode!r}: expected 'sum', 'mean' or 'max'")
        check_flag(include_last_offset, "include_last_offset")
        super().__init__(num_embeddings, embedding_dim, **options)
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self, ids: Any, offsets: Any = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The reduced rows, shape (bags, embedding_dim).

        Args:
            ids: Shape (bags, ids of a bag), or (n,) with ``offsets``; integers in a tensor, an
                array or a list.
            offsets: Where in ``ids`` each bag begins, shape (bags,); likewise.
            per_sample_weights: Factors of the rows, in the shape of ``ids``; with mode ``"sum"``
                only.

        Raises:
            RowIndexError: As for ``HostEmbedding``.
            ClosedError: As for ``HostEmbedding``.
        """
        positions, weight, padding = self._looked_up(_integers(ids, f"{self.name}: ids"))
        return functional.embedding_bag(
            positions,
            weight,
            offsets
            if offsets is None
            else _integers(offsets, f"{self.name}: offsets").to(positions),
            max_norm=self.max_norm,
            norm_type=self.norm_type,
            scale_grad_by_freq=self.scale_grad_by_freq,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )


def pieces(store: Gathered, nbytes: int = _PIECE_BYTES) -> list[tuple[int, int]]:
    """The rows of a store as ranges [start, stop) of so many bytes."""
    row = max(1, int(np.prod(store.row_shape, dtype=np.int64)) * store.dtype.itemsize)
    step = max(1, nbytes // row)
    return [(start, min(start + step, store.n_rows)) for start in range(0, store.n_rows, step)]


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; torch does not count in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def _position(rows: Rows, row: int) -> int | None:
    """Where in ascending rows one is; None if it is not."""
    at = int(np.searchsorted(rows, row))
    return at if at < len(rows) and rows[at] == row else None


def _integers(values: Any, name: str) -> torch.Tensor:
    """A tensor of integers in a tensor, which it is itself, in an array or in a list.

    Raises:
        RowIndexError: If they are something else than integers, or are of rows of different
            lengths.
    """
    if isinstance(values, torch.Tensor):
        return values
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise RowIndexError(
            f"{name}: {described(error)}; expected integers in a tensor, an array or a list"
        ) from None
    # numpy takes an empty list for floats.
    if array.size and array.dtype.kind not in "iu":
        raise RowIndexError(
            f"{name}: a {type(values).__name__} of {array.dtype}; expected integers in a tensor, an array or a list"
        )
    return torch.from_numpy(array.astype(np.int64))


def _initialiser(init: Init | None) -> Callable[[torch.Tensor], Any]:
    if callable(init):
        return functools.partial(_filled, init)
    name = "normal" if init is None else str(init).removesuffix("_")
    names = [
        key[:-1]
        for key, value in vars(nn.init).items()
        if key.endswith("_") and not key.startswith("_") and _fills_alone(value)
    ]
    if name not in names:
        raise ArgumentError(
            f"init={init!r} is no function of torch.nn.init that needs a tensor alone; expected one of {', '.join(sorted(names))}, "
            "or a function that fills a tensor (functools.partial(nn.init.constant_, val=0.5))"
        )
    found: Callable[[torch.Tensor], Any] = getattr(nn.init, f"{name}_")
    return found


def _filled(init: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> None:
    """Let a user's function fill a tensor.

    Raises:
        ArgumentError: If it returns a tensor of other memory, which nothing would use.
    """
    returned = init(tensor)
    if (
        isinstance(returned, torch.Tensor)
        and returned.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    ):
        raise ArgumentError(
            f"init={init!r} returned another tensor than it was given; expected a function that fills the given tensor in place; give "
            "lambda tensor: tensor.copy_(values), or HostEmbedding.from_pretrained(values, freeze=False)"
        )


def _fills_alone(function: Callable[..., Any]) -> bool:
    """Whether it can be called with a tensor and nothing else."""
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    return True
