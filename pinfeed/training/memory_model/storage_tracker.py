"""StorageTracker: records the storages that a torch program allocates and frees, in order.

With fake tensors, the tracked program itself takes no memory.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pinfeed.training.memory_model import workspace
from pinfeed.training.memory_model.caching_allocator import Event
from pinfeed.training.memory_model.cublas_workspaces import is_product

_KNOWN = frozenset({"aten", "prim", "prims", "profiler", "higher_order"})
"""Namespaces of operations that allocate their results and, on the CPU, a known workspace."""

_LIBRARIES = (
    "_cdist",
    "_ctc_loss",
    "_euclidean_dist",
    "_fft_",
    "_linalg_",
    "cholesky",
    "geqrf",
    "linalg_",
    "lu_",
    "ormqr",
)
"""Prefixes of operations that call libraries with an unknown amount of workspace."""

_PLAIN = ("linalg_vector_norm", "linalg_cross")
"""Operations that match these prefixes but take no workspace."""


class StorageTracker(TorchDispatchMode):
    """Context that records every storage that an operation returns, until the storage dies.

    Attributes:
        events: Allocations and frees, in order.
        marks: Positions in ``events`` at which a phase of the program begins, and the phase.
        kinds: Kind of memory of each number in ``events``.
        foreign: Operations that are not torch's own, or that have an unknown workspace.
        multiplying: Phases with matrix products, for which a GPU needs a workspace.
        is_cpu: Whether to record the workspace that operations take on the CPU.
    """

    def __init__(self, *, is_cpu: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_cpu = is_cpu
        self._phase = ""
        self.events: list[Event] = []
        self.marks: list[tuple[int, str]] = []
        self.kinds: dict[int, str] = {}
        self.foreign: set[str] = set()
        self.multiplying: set[str] = set()
        self._living: dict[int, tuple[int, int]] = {}
        """Number and bytes of each living storage, by its address."""
        self._n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__
        is_of_library = name.startswith(_LIBRARIES) and not name.startswith(_PLAIN)
        if func.namespace not in _KNOWN or is_of_library:
            self.foreign.add(str(func))
        if is_product(name.split(".")[0]):
            self.multiplying.add(self._phase)
        if self.is_cpu:
            out = workspace.results_of(func, args, out)
        leaves = (leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        found = [leaf for leaf in leaves if leaf.layout is torch.strided]
        n_seen = 0
        for nbytes, n in workspace.stages_of(func, args, out) if self.is_cpu else ():
            self._record_all(found[n_seen:n])
            n_seen = n
            self._record_temporary(nbytes)
        self._record_all(found[n_seen:])
        return out

    def enter(self, phase: str) -> None:
        """Begin a phase; its name is the kind of its allocations until ``label`` changes it."""
        self._phase = phase
        self.marks.append((len(self.events), phase))

    def label(self, tensors: Iterable[torch.Tensor | None], kind: str) -> None:
        """Set the kind of memory of these tensors."""
        for tensor in tensors:
            if tensor is None:
                continue
            known = self._living.get(tensor.untyped_storage()._cdata)
            if known is not None:
                self.kinds[known[0]] = kind

    def _record_all(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self._record(tensor.untyped_storage())

    def _record_temporary(self, nbytes: int) -> None:
        """Record memory that is allocated and freed at once."""
        if nbytes:
            self._n += 1
            self.kinds[self._n] = "temporary"
            self.events += [(self._n, nbytes), (self._n, -nbytes)]

    def _record(self, storage: Any) -> None:
        key = storage._cdata
        nbytes = storage.nbytes()
        known = self._living.get(key)
        if known is not None and known[1] == nbytes:
            return
        if known is not None:
            # The storage was resized.
            self._record_free(known)
        elif nbytes:
            weakref.finalize(storage, self._forget, key).atexit = False
        if nbytes:
            self._n += 1
            self._living[key] = self._n, nbytes
            self.kinds[self._n] = self._phase
            self.events.append((self._n, nbytes))
        else:
            self._living.pop(key, None)

    def _record_free(self, known: tuple[int, int]) -> None:
        number, nbytes = known
        self.events.append((number, -nbytes))

    def _forget(self, key: int) -> None:
        if (known := self._living.pop(key, None)) is not None:
            self._record_free(known)


@dataclass(frozen=True)
class Peak:
    """The moment with the largest memory.

    Attributes:
        kinds: Bytes of each kind at that moment.
        phases: Largest number of bytes in each phase of the program.
    """

    kinds: dict[str, int]
    phases: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes at the peak."""
        return sum(self.kinds.values())


def peak_of(tracker: StorageTracker, round_to: int) -> Peak:
    """Return the peak of a tracked program, with each storage rounded up to ``round_to`` bytes."""
    now: dict[str, int] = {}
    phases: dict[str, int] = {}
    # If several marks have the same position, the last mark counts.
    marks = dict(tracker.marks)
    phase = ""
    total = 0
    most = -1
    at_peak: dict[str, int] = {}
    for i, (number, nbytes) in enumerate(tracker.events):
        phase = marks.get(i, phase)
        size = -(-abs(nbytes) // round_to) * round_to * (1 if nbytes > 0 else -1)
        kind = tracker.kinds[number]
        now[kind] = now.get(kind, 0) + size
        total += size
        phases[phase] = max(phases.get(phase, 0), total)
        if total > most:
            most = total
            at_peak = dict(now)
    return Peak(at_peak, phases)


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Make CPU operations save the same tensors for the backward pass as CUDA operations.

    Dropout saves a mask of bytes on CUDA, and a mask of floats on the CPU. Attention with dropout
    saves nothing on CUDA, and the whole matrix on the CPU. This context replaces the functions,
    because a TorchFunctionMode is not active in the backward pass, where a checkpoint runs the
    forward pass again.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    low_level = torch.dropout
    dropout = functional.dropout
    attention = functional.scaled_dot_product_attention

    def native(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if isinstance(x, FakeTensor) and training and 0 < p < 1 and not inplace:
            # Other threads compute with real tensors, which are not affected.
            return torch.native_dropout(x, p, True)[0]
        return dropout(x, p, training, inplace)

    # The parameters are those of torch's function.
    def attend(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return attention(
            query,
            key,
            value,
            attn_mask,
            0.0 if isinstance(query, FakeTensor) else dropout_p,
            *args,
            **kwargs,
        )

    torch.dropout = native  # type: ignore[assignment]
    functional.dropout = native  # type: ignore[assignment]
    functional.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        torch.dropout = low_level
        functional.dropout = dropout
        functional.scaled_dot_product_attention = attention
