"""PinnedStore: rows in page-locked (pinned) memory, which a GPU can read and write directly."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pinfeed.errors import (
    ArgumentError,
    ClosedError,
    DeviceError,
    MissingDependency,
    StoreError,
    logger,
)
from pinfeed.memory.page_locked import REGISTER, page_locked, unlock_freed
from pinfeed.memory.pages import Bytes, anonymous
from pinfeed.native.memory_rows import MemoryRows
from pinfeed.rows.orders import Rows
from pinfeed.rows.runs import Runs
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.npy_store import NpyStore
from pinfeed.stores.store import Array, Store, in_words, shape_to_make
from pinfeed.tensors.argument_types import Source
from pinfeed.tensors.dtypes import dtype_of
from pinfeed.validation.arguments import explain_arguments, real_number, whole_number
from pinfeed.validation.suggestions import install_line

_BY_SHAPE = (
    "create a store by shape and dtype with PinnedStore.zeros(shape, dtype) or "
    "PinnedStore.empty(shape, dtype)"
)
HINTS = {
    "pinned pin_memory page_locked": "give pin=True, pin=False or pin='auto'",
    "shape dtype": _BY_SHAPE,
}
"""Advice for arguments that torch has under these names."""

Pin = Literal["auto"] | bool

# Tables are filled in chunks, so that the peak memory is the table and one chunk.
_CHUNK_BYTES = 16 << 20


class PinnedStore(ArrayStore):
    """Rows in page-locked (pinned) memory, which a GPU can read and write directly.

    CuPy locks the memory, which has exactly the size of the rows, in whole pages. Forked processes
    do not inherit it. ``copy.copy`` returns a store on the same memory; ``copy.deepcopy`` and
    pickle copy the rows to other memory.

    After the last array on the memory is deleted, the next call that takes pinned memory, requests
    a batch or closes a feeder unlocks it. ``PinnedStore.unlock_freed()`` unlocks it at once.

    Args:
        source: A numpy array, a CPU tensor, a path of a .npy file or a Store; its rows are copied
            in chunks.
        pin: True for page-locked memory; False for ordinary memory; ``"auto"`` for page-locked
            memory if CUDA and CuPy are available and the driver can lock it, and for ordinary
            memory otherwise.

    Raises:
        MissingDependency: If ``pin=True`` and CuPy or a CUDA device is missing.
        DeviceError: If ``pin=True`` and the system or the driver refuses to lock the memory.

    Examples:
        >>> table = pinfeed.PinnedStore.normal((10_000, 64), std=0.01, pin="auto")
        >>> with pinfeed.Feeder(table, batch_size=256) as feeder:
        ...     for batch in feeder.batches():
        ...         batch.write_back(batch.data * 0.9)
    """

    page_locked: bool
    """Whether the rows are in page-locked memory."""
    _pid: int

    @explain_arguments(HINTS)
    def __init__(self, source: Source, *, pin: Pin = True) -> None:
        store = source if isinstance(source, Store) else _open(source)
        try:
            self._allocate((store.n_rows, *store.row_shape), store.dtype, pin)
            for start, chunk in _chunks(self._array):
                store.gather(np.arange(start, start + len(chunk), dtype=np.int64), chunk)
        finally:
            if store is not source:
                store.close()

    @classmethod
    def empty(
        cls, shape: tuple[int, ...], dtype: npt.DTypeLike = "float32", *, pin: Pin = True
    ) -> PinnedStore:
        """Create a store of zeros; the system provides its memory when it is first used.

        ``zeros`` is the same method.

        Args:
            shape: Shape (n_rows, *row_shape).
            dtype: Dtype of the rows.
            pin: As for the class.

        Raises:
            StoreError: If the shape has no rows, items that are not whole numbers, or more bytes
                than can be addressed; or if the dtype does not exist.
            MemoryError: If the system does not have enough memory.
            MissingDependency: As for the class.
            DeviceError: As for the class.
        """
        store = cls.__new__(cls)
        store._allocate(shape, dtype_of(dtype, "PinnedStore"), pin)
        return store

    zeros = empty

    @classmethod
    def normal(
        cls,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike = "float32",
        *,
        mean: float = 0.0,
        std: float = 1.0,
        seed: int = 0,
        pin: Pin = True,
    ) -> PinnedStore:
        """Create a store of normally distributed numbers.

        For other numbers, create an ``empty`` store and fill its ``array``.

        Args:
            shape: Shape (n_rows, *row_shape).
            dtype: Floating point dtype of the rows.
            mean: Mean of the numbers.
            std: Standard deviation of the numbers, at least 0.
            seed: Seed of the random numbers; the same seed gives the same rows.
            pin: As for the class.

        Raises:
            ArgumentError: If ``mean`` is not a number, ``std`` is not a number of at least 0, or
                ``seed`` is not a whole number of at least 0.
            StoreError: As for ``empty``, or if the dtype is not floating point.
        """
        seed = whole_number(seed, "seed", least=0)
        mean = real_number(mean, "mean")
        std = real_number(std, "std", least=0)
        rng = np.random.default_rng(seed)
        store = cls.empty(shape, dtype, pin=pin)
        # numpy's kind of bfloat16 is V.
        if store.dtype.kind not in "fV":
            raise StoreError(
                f"PinnedStore: random rows have dtype {store.dtype}; expected a floating point "
                "dtype"
            )
        for _, chunk in _chunks(store.array):
            chunk[...] = rng.normal(mean, std, chunk.shape).astype(store.dtype)
        return store

    def __repr__(self) -> str:
        kind = "page-locked" if self.page_locked else "ordinary"
        return f"<{type(self).__name__}: {in_words(self)}, in {kind} memory>"

    def __copy__(self) -> PinnedStore:
        """Return a store of the same rows in the same memory."""
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> PinnedStore:
        """Return a store of equal rows in new memory, page-locked if this store's memory is."""
        make, arguments = self.__reduce__()
        copied: PinnedStore = make(*arguments)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        pin: Pin = "auto" if self.page_locked else False
        return functools.partial(type(self), pin=pin), (self._array,)

    def gather(self, rows: Rows, out: Array) -> None:
        # The memory is required before the arguments are checked.
        self._require_memory()
        super().gather(rows, out)

    def gather_unchecked(self, rows: Rows, out: Array) -> None:
        self._require_memory()
        super().gather_unchecked(rows, out)

    @property
    def memory_rows(self) -> MemoryRows | None:
        """The rows; None in a forked process, in which ``gather`` raises an error."""
        return super().memory_rows if self._has_memory else None

    def gather_runs(self, runs: Runs, out: Array) -> None:
        self._require_memory()
        super().gather_runs(runs, out)

    def scatter(self, rows: Rows, values: Array) -> None:
        self._require_memory()
        super().scatter(rows, values)

    @staticmethod
    def unlock_freed() -> None:
        """Return the memory of deleted stores to the system now.

        Do not call it while this thread captures a CUDA graph.
        """
        unlock_freed()

    @property
    def _has_memory(self) -> bool:
        return not self.page_locked or self._pid == os.getpid()

    def _require_memory(self) -> None:
        if not self._has_memory:
            # Access to the memory would end the process.
            raise ClosedError(
                "a forked process does not inherit page-locked memory; read the rows before the "
                "fork, or pass a copy"
            )

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any], pin: Pin) -> None:
        shape = shape_to_make(shape, dtype, "PinnedStore")
        nbytes = math.prod(shape) * dtype.itemsize
        runtime = _cuda_runtime(pin)
        self.page_locked = runtime is not None
        self._pid = os.getpid()
        try:
            memory = anonymous(nbytes) if runtime is None else self._locked(nbytes, runtime, pin)
        except MemoryError as error:
            raise MemoryError(
                f"PinnedStore: shape {shape} of {dtype} needs {nbytes:,} bytes, more than the "
                "free memory; use fewer or smaller rows, or keep them in a file: "
                "NpyStore.create(path, shape, dtype), HostEmbedding(..., store=path)"
            ) from error
        self._array: Array = memory[:nbytes].view(dtype).reshape(shape)

    def _locked(self, nbytes: int, runtime: Any, pin: Pin) -> Bytes:
        try:
            return page_locked(
                nbytes,
                lambda address, size: runtime.hostRegister(address, size, REGISTER),
                runtime.hostUnregister,
            )
        except DeviceError as error:
            if pin != "auto":
                raise DeviceError(
                    f"{error}; free memory, raise the limit, or give pin='auto' for ordinary memory"
                ) from error
            logger.warning(
                "%s; the rows are in ordinary memory, and pinfeed copies them through page-locked "
                "buffers",
                error,
            )
        self.page_locked = False
        return anonymous(nbytes)


def check_pin(pin: Any) -> None:
    """Check that an argument is a ``Pin``.

    Raises:
        ArgumentError: If it is not.
    """
    if pin not in (True, False, "auto"):
        raise ArgumentError(f"pin={pin!r}: expected True, False or 'auto'")


def _open(source: Any) -> Store:
    if isinstance(source, tuple) and source and all(isinstance(n, int) for n in source):
        raise StoreError(
            f"PinnedStore: got the tuple {source!r}; expected rows, or the path of a file; "
            f"{_BY_SHAPE}"
        )
    if isinstance(source, (str, os.PathLike)):
        return NpyStore(source)
    return ArrayStore(source, name="PinnedStore")


def _chunks(array: Array) -> Iterator[tuple[int, Array]]:
    """Yield the first row and the rows of each chunk of an array."""
    step = max(1, _CHUNK_BYTES // max(1, array.nbytes // len(array)))
    for start in range(0, len(array), step):
        yield start, array[start : start + step]


def _cuda_runtime(pin: Pin) -> Any:
    """Return CuPy's CUDA runtime, or None for ordinary memory."""
    check_pin(pin)
    if pin is False:
        return None
    try:
        import cupy
    except ImportError:
        problem = (
            f"CuPy is not installed; {install_line('cupy-cuda12x')}, or "
            f"{install_line('cupy-cuda13x')}, to match the driver"
        )
    else:
        if cupy.cuda.is_available():
            return cupy.cuda.runtime
        problem = "CuPy finds no CUDA device or driver"
    if pin == "auto":
        return None
    raise MissingDependency(
        f'PinnedStore needs page-locked memory, but {problem}; give pin="auto" to fall back to '
        "ordinary memory"
    )
