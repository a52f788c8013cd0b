"""StorageTracker: records the storages that a torch program allocates and frees, in order.

With fake tensors, the tracked program itself takes no memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Event = tuple[int, int]
"""Allocation (number of a storage, bytes) or free (number of a storage, minus bytes)."""


class StorageTracker(TorchDispatchMode):
    """Context that records every storage that an operation returns, until the storage dies.

    Attributes:
        events: Allocations and frees, in order.
        marks: Positions in ``events`` at which a phase of the program begins, and the phase.
        kinds: Kind of memory of each storage, by its number.
        activity: Description of the phase for errors, such as ``"the forward pass"``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._phase = ""
        self.events: list[Event] = []
        self.marks: list[tuple[int, str]] = []
        self.kinds: list[str] = []
        self.activity = ""
        self._living: dict[int, tuple[int, int]] = {}
        """Number and bytes of each living storage, by its address."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                self._record(leaf.untyped_storage())
        return out

    def enter(self, phase: str, activity: str) -> None:
        """Begin a phase; its name is the kind of its allocations until ``label`` changes it."""
        self._phase = phase
        self.activity = activity
        self.marks.append((len(self.events), phase))

    def label(self, tensors: Iterable[torch.Tensor | None], kind: str) -> None:
        """Set the kind of memory of these tensors."""
        for tensor in tensors:
            if tensor is None:
                continue
            known = self._living.get(tensor.untyped_storage()._cdata)
            if known is not None:
                self.kinds[known[0]] = kind

    def _record(self, storage: Any) -> None:
        key = storage._cdata
        nbytes = storage.nbytes()
        known = self._living.get(key)
        if known is not None and known[1] == nbytes:
            return
        if known is not None:
            # The storage was resized.
            self.events.append((known[0], -known[1]))
        elif nbytes:
            weakref.finalize(storage, self._forget, key).atexit = False
        if nbytes:
            number = len(self.kinds)
            self.kinds.append(self._phase)
            self._living[key] = number, nbytes
            self.events.append((number, nbytes))
        else:
            self._living.pop(key, None)

    def _forget(self, key: int) -> None:
        if (known := self._living.pop(key, None)) is not None:
            self.events.append((known[0], -known[1]))


def peaks_of(tracker: StorageTracker, round_to: int) -> dict[str, dict[str, int]]:
    """Return the bytes of each kind of memory at the peak of each phase.

    Args:
        tracker: Tracker of the program.
        round_to: Bytes to which the size of each storage is rounded up.
    """
    now: dict[str, int] = {}
    most: dict[str, int] = {}
    peaks: dict[str, dict[str, int]] = {}
    # If several marks have the same position, the last mark counts.
    marks = dict(tracker.marks)
    phase = ""
    total = 0
    for i, (number, nbytes) in enumerate(tracker.events):
        phase = marks.get(i, phase)
        size = -(-abs(nbytes) // round_to) * round_to * (1 if nbytes > 0 else -1)
        kind = tracker.kinds[number]
        now[kind] = now.get(kind, 0) + size
        total += size
        if total > most.get(phase, -1):
            most[phase] = total
            peaks[phase] = now.copy()
    return peaks
