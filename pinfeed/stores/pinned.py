"""PinnedStore: rows in page-locked memory, which a GPU can read and write itself."""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pinfeed.errors import ArgumentError, ClosedError, DeviceError, MissingDependency, StoreError
from pinfeed.memory.mapping import Bytes, anonymous
from pinfeed.memory.page_locked import REGISTER, page_locked, unlock_freed
from pinfeed.rows.orders import Rows
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.base import Array, Store, in_words, shape_to_make
from pinfeed.stores.file import MmapStore
from pinfeed.tensors.dtypes import dtype_of
from pinfeed.validation.arguments import explain_arguments, real_number, whole_number
from pinfeed.validation.safe_repr import safe_repr

logger = logging.getLogger("pinfeed")

_OF_A_SHAPE = "a store of a dtype and a shape is PinnedStore.zeros(shape, dtype) or PinnedStore.empty(shape, dtype)"
HINTS = {
    **dict.fromkeys(
        ("pinned", "pin_memory", "page_locked"), "give pin=True, pin=False or pin='auto'"
    ),
    **dict.fromkeys(("shape", "dtype"), _OF_A_SHAPE),
}
"""Advice, by the names that torch has for it."""

Pin = Literal["auto"] | bool

# Tables are filled piecewise: the peak is the table and one piece.
_FILL_BYTES = 16 << 20


class PinnedStore(ArrayStore):
    """Rows in memory that is page-locked through CuPy: exactly as much as they need, in whole pages. Forked processes do not inherit it.

    ``copy.copy`` gives a store of the same memory, ``copy.deepcopy`` and pickle one of other
    memory. When the last array on the memory has died, it is unlocked by the next call of pinfeed
    that takes page-locked memory, asks a loop for a batch, or closes a feeder; or by
    ``PinnedStore.unlock_freed()``.

    Args:
        source: A numpy array, a CPU tensor, a path of a .npy file or a Store; copied piece by
            piece.
        pin: True to page-lock, ``"auto"`` to do so where CUDA and CuPy are there and the driver
            agrees, and take ordinary memory elsewhere, False for ordinary memory.

    Raises:
        MissingDependency: ``pin=True`` without CuPy or without a CUDA device.
        DeviceError: ``pin=True``, and the system or the driver refused to lock so much.
    """

    page_locked: bool
    """Whether the rows are in page-locked memory."""
    _pid: int

    @explain_arguments(HINTS)
    def __init__(self, source: Any, *, pin: Pin = True) -> None:
        store = source if isinstance(source, Store) else _open(source)
        try:
            self._allocate((store.n_rows, *store.row_shape), store.dtype, pin)
            step = _rows_per_piece(self._array)
            for start in range(0, store.n_rows, step):
                rows = np.arange(start, min(start + step, store.n_rows), dtype=np.int64)
                store.gather(rows, self._array[start : start + step])
        finally:
            if store is not source:
                store.close()

    @classmethod
    def empty(
        cls, shape: tuple[int, ...], dtype: npt.DTypeLike = "float32", *, pin: Pin = True
    ) -> PinnedStore:
        """Rows of any contents, ``shape`` (n_rows, *row_shape); the system gives zeros.

        Raises:
            StoreError: If the shape has no rows, or something else than whole numbers, or more
                bytes than an address can tell.
            StoreError: If there is no such dtype.
            MemoryError: If the system does not have so much memory.
            MissingDependency: As for the class.
            DeviceError: As for the class.
        """
        store = cls.__new__(cls)
        store._allocate(shape, dtype_of(dtype, "PinnedStore"), pin)
        return store

    @classmethod
    def zeros(
        cls, shape: tuple[int, ...], dtype: npt.DTypeLike = "float32", *, pin: Pin = True
    ) -> PinnedStore:
        """Rows of zeros."""
        # An anonymous mapping is zero-filled.
        return cls.empty(shape, dtype, pin=pin)

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
        """Rows of normally distributed numbers, the same for the same seed.

        Raises:
            ArgumentError: If ``mean`` is no number, ``std`` is no number of at least 0, or ``seed``
                no whole number of at least 0.
            StoreError: As for ``empty``, or if the dtype is not floating point.
        """
        seed = whole_number(seed, "seed", least=0)
        mean, std = real_number(mean, "mean"), real_number(std, "std", least=0)
        rng = np.random.default_rng(seed)
        return cls.empty(shape, dtype, pin=pin)._fill(lambda size: rng.normal(mean, std, size))

    @classmethod
    def uniform(
        cls,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike = "float32",
        *,
        low: float = 0.0,
        high: float = 1.0,
        seed: int = 0,
        pin: Pin = True,
    ) -> PinnedStore:
        """Rows of numbers evenly distributed over [low, high), the same for the same seed.

        Raises:
            ArgumentError: If ``low`` or ``high`` is no number, ``high`` is below ``low``, or
                ``seed`` is no whole number of at least 0.
            StoreError: As for ``empty``, or if the dtype is not floating point.
        """
        seed = whole_number(seed, "seed", least=0)
        low = real_number(low, "low")
        high = real_number(high, "high", least=low, note=f" (low={low:g})")
        rng = np.random.default_rng(seed)
        return cls.empty(shape, dtype, pin=pin)._fill(lambda size: rng.uniform(low, high, size))

    @safe_repr
    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {in_words(self)}, in {'page-locked' if self.page_locked else 'ordinary'} memory>"

    def __copy__(self) -> PinnedStore:
        """Return a store of the same rows in the same memory."""
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> PinnedStore:
        """Return a store of equal rows in other memory, which is page-locked if this one's is."""
        make, arguments = self.__reduce__()
        copied: PinnedStore = make(*arguments)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), pin="auto" if self.page_locked else False), (
            self._array,
        )

    def gather(self, rows: Rows, out: Array) -> None:
        self._require_memory()
        super().gather(rows, out)

    def scatter(self, rows: Rows, values: Array) -> None:
        self._require_memory()
        super().scatter(rows, values)

    @staticmethod
    def unlock_freed() -> None:
        """Give the memory of stores that were dropped back to the system now.

        Do not call it while this thread captures a CUDA graph.
        """
        unlock_freed()

    def _require_memory(self) -> None:
        if self.page_locked and self._pid != os.getpid():
            # Where the first touch would end the process.
            raise ClosedError(
                "a forked process does not inherit page-locked memory; read the rows before the fork, or hand over a copy"
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
                f"PinnedStore: shape {shape} of {dtype} takes {nbytes:,} bytes of memory, which the system does not have; make fewer or "
                "smaller rows, or keep them in a file: MmapStore.create(path, shape, dtype), HostEmbedding(..., store=path)"
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
                "%s; the rows are in ordinary memory, and are copied through page-locked buffers",
                error,
            )
        self.page_locked = False
        return anonymous(nbytes)

    def _fill(self, draw: Callable[[tuple[int, ...]], Array]) -> PinnedStore:
        if self.dtype.kind not in "fV":
            # V: bfloat16
            raise StoreError(
                f"PinnedStore: random rows of {self.dtype}; expected a floating point dtype"
            )
        step = _rows_per_piece(self._array)
        for start in range(0, self.n_rows, step):
            piece = self._array[start : start + step]
            piece[...] = draw(piece.shape).astype(self.dtype)
        return self


def _open(source: Any) -> Store:
    if isinstance(source, tuple) and source and all(isinstance(n, int) for n in source):
        raise StoreError(
            f"PinnedStore: got the tuple {source!r}; expected rows, or a path of them; {_OF_A_SHAPE}"
        )
    return (
        MmapStore(source)
        if isinstance(source, (str, os.PathLike))
        else ArrayStore(source, name="PinnedStore")
    )


def _rows_per_piece(array: Array) -> int:
    return max(1, _FILL_BYTES // max(1, array.nbytes // len(array)))


def _cuda_runtime(pin: Pin) -> Any:
    """CuPy's CUDA runtime, or None for ordinary memory."""
    if pin not in (True, False, "auto"):
        raise ArgumentError(f"pin={pin!r}: expected True, False or 'auto'")
    if pin is False:
        return None
    try:
        import cupy
    except ImportError:
        problem = 'CuPy is not installed: pip install "pinfeed[cuda12]" or "pinfeed[cuda13]", to match the driver'
    else:
        if cupy.cuda.is_available():
            return cupy.cuda.runtime
        problem = "CuPy finds no CUDA device or driver"
    if pin == "auto":
        return None
    raise MissingDependency(
        f'PinnedStore needs page-locked memory, and {problem}; give pin="auto" for ordinary memory where there is none'
    )
