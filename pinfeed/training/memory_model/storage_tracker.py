"""Which memory a torch program takes and gives back, in order, seen from its operations; with fake tensors it takes none."""

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

_KNOWN = frozenset({"aten", "prim", "prims", "profiler", "higher_order"})
"""Namespaces of operations that take their results, and on the CPU the workspace that is known."""

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
"""Prefixes of operations whose libraries take an unknown amount of workspace."""

_PLAIN = ("linalg_vector_norm", "linalg_cross")
"""Operations that match these prefixes but take no workspace."""


class StorageTracker(TorchDispatchMode):
    """Every storage that an operation returns, from then until it dies.

    Attributes:
        events: What came and went.
        marks: Where in ``events`` the program began to do something else, and what.
        kinds: Of each number in ``events``.
        foreign: Operations that are none of torch's own, or whose workspace is not known.
        is_cpu: Whether operations take the workspace that they take on the CPU.
    """

    def __init__(self, *, is_cpu: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_cpu = is_cpu
        self._phase = ""
        self.events: list[Event] = []
        self.marks: list[tuple[int, str]] = []
        self.kinds: dict[int, str] = {}
        self.foreign: set[str] = set()
        # Number and bytes, by storage.
        self._living: dict[int, tuple[int, int]] = {}
        self._n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__
        is_of_library = name.startswith(_LIBRARIES) and not name.startswith(_PLAIN)
        if func.namespace not in _KNOWN or is_of_library:
            self.foreign.add(str(func))
        if self.is_cpu:
            out = workspace.results_of(func, args, out)
        leaves = (leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        found = [leaf for leaf in leaves if leaf.layout is torch.strided]
        n_seen = 0
        for nbytes, n in workspace.stages_of(func, args, out) if self.is_cpu else ():
            self._see_all(found[n_seen:n])
            n_seen = n
            self._pass(nbytes)
        self._see_all(found[n_seen:])
        return out

    def enter(self, phase: str) -> None:
        """What the program does from here on; the kind of memory that comes, until it is known better."""
        self._phase = phase
        self.marks.append((len(self.events), phase))

    def label(self, tensors: Iterable[torch.Tensor | None], kind: str) -> None:
        """Say what the memory of these is, as it turned out."""
        for tensor in tensors:
            if (
                tensor is not None
                and (found := self._living.get(tensor.untyped_storage()._cdata)) is not None
            ):
                self.kinds[found[0]] = kind

    def _see_all(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self._see(tensor.untyped_storage())

    def _pass(self, nbytes: int) -> None:
        """Memory comes and goes at once."""
        if nbytes:
            self._n += 1
            self.kinds[self._n] = "temporary"
            self.events += [(self._n, nbytes), (self._n, -nbytes)]

    def _see(self, storage: Any) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        known = self._living.get(key)
        if known is not None and known[1] == nbytes:
            return
        if known is not None:  # resized
            self._went(known)
        elif nbytes:
            weakref.finalize(storage, self._forget, key).atexit = False
        if nbytes:
            self._n += 1
            self._living[key] = self._n, nbytes
            self.kinds[self._n] = self._phase
            self.events.append((self._n, nbytes))
        else:
            self._living.pop(key, None)

    def _went(self, known: tuple[int, int]) -> None:
        number, nbytes = known
        self.events.append((number, -nbytes))

    def _forget(self, key: int) -> None:
        if (known := self._living.pop(key, None)) is not None:
            self._went(known)


@dataclass(frozen=True)
class Peak:
    """When most memory was taken.

    Attributes:
        kinds: Bytes of each kind then.
        phases: Most bytes in all while the program did each thing.
    """

    kinds: dict[str, int]
    phases: dict[str, int]

    @property
    def nbytes(self) -> int:
        return sum(self.kinds.values())


def peak_of(tracker: StorageTracker, round_to: int) -> Peak:
    """The peak of a program that was tracked, each storage rounded up."""
    now: dict[str, int] = {}
    phases: dict[str, int] = {}
    # The last one, where there are several at a place.
    marks, phase = dict(tracker.marks), ""
    total = 0
    most = -1
    found = {}
    for i, (number, nbytes) in enumerate(tracker.events):
        phase = marks.get(i, phase)
        size = -(-abs(nbytes) // round_to) * round_to * (1 if nbytes > 0 else -1)
        kind = tracker.kinds[number]
        now[kind] = now.get(kind, 0) + size
        total += size
        phases[phase] = max(phases.get(phase, 0), total)
        if total > most:
            most, found = total, dict(now)
    return Peak(found, phases)


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Have operations of the CPU keep for the backward pass what those of CUDA do.

    Dropout keeps a mask of bytes there and one of floats here; attention with dropout keeps nothing
    there and the whole matrix here. The functions are replaced: a TorchFunctionMode is not active
    in the backward pass, where a checkpoint runs the forward pass again.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    low_level = torch.dropout
    dropout = functional.dropout
    attention = functional.scaled_dot_product_attention

    def native(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if isinstance(x, FakeTensor) and training and 0 < p < 1 and not inplace:
            # Other threads compute with real ones.
            return torch.native_dropout(x, p, True)[0]
        return dropout(x, p, training, inplace)

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
