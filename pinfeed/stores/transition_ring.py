"""TransitionRing: the latest transitions of a reinforcement learning agent, for replay."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.errors import StoreError
from pinfeed.rows.orders import Rows
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.frame_ring import FrameRing
from pinfeed.stores.npy_store import NpyStore
from pinfeed.stores.ring_layout import RingLayout
from pinfeed.stores.store import Array


@dataclass(eq=False)
class Draw:
    """Transitions that were drawn for a batch, and are protected until they have been gathered."""

    rows: Rows
    """Rows of the ring, shape (n,)."""
    numbers: Rows | None
    """Numbers of the transitions since the first one that was added, shape (n,).

    None for uniform draws of single steps, which do not need them.
    """
    n_added: int
    """Number of steps that had been added."""
    weights: npt.NDArray[np.float32] | None = None
    """Importance weights, shape (n,); None for uniform draws."""
    n_unread: int = 0
    """Number of parts of the batch that have not been gathered."""
    window: tuple[Rows, Rows] | None = field(default=None, repr=False)
    """Number of steps of each n-step window, and its last row; None until they are needed."""


class TransitionRing:
    """The latest transitions: every step that is added replaces the oldest one.

    One thread may add while others draw and gather. Whoever draws transitions protects them: a step
    that would overwrite one of these waits until the batch has been gathered. Batches therefore
    never mix two transitions, and never lose one that was drawn.

    Args:
        layout: Parts of transitions.
        folder: Folder for files of the parts; None to keep them in memory.
    """

    def __init__(self, layout: RingLayout, folder: str | None = None) -> None:
        self.layout = layout
        self.n_added = 0
        """Number of steps that have been added."""
        self.lock = threading.RLock()
        """Guards the ring. It takes a third of the time of ``changed``."""
        self.changed = threading.Condition(self.lock)
        """Has the same lock, and is notified when protected transitions have been gathered."""
        self._protected: list[Draw] = []
        self._folder = folder
        self._frames: dict[str, FrameRing] = {}
        self._which: dict[str, tuple[FrameRing, int]] = {}
        self._stores: dict[str, ArrayStore] = {}
        n_rows = layout.n_steps * layout.n_envs
        for after, now in layout.next_of.items():
            shape, dtype = layout.parts[now]
            n_stacked, frame = (shape[0], shape[1:]) if now in layout.stacked else (1, shape)
            ring_shape = (layout.n_steps, layout.n_envs, n_stacked)
            ring = FrameRing(now, ring_shape, frame, dtype, self._make_array)
            self._frames[now] = ring
            self._which |= {now: (ring, 0), after: (ring, 1)}
        for name, (shape, dtype) in layout.parts.items():
            if name not in self._which:
                array = self._make_array(name, (n_rows, *shape), dtype)
                self._stores[name] = ArrayStore(array)
        self._steps = [
            (name, store.array.reshape(layout.n_steps, *layout.kept_shape(store.row_shape)))
            for name, store in self._stores.items()
        ]
        if layout.window > 1:
            self._powers = layout.gamma ** np.arange(layout.window + 1, dtype=np.float32)

    @property
    def n_kept(self) -> int:
        """Number of steps in the ring."""
        return min(self.n_added, self.layout.n_steps)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = sum(store.array.nbytes for store in self._stores.values())
        return arrays + sum(ring.nbytes for ring in self._frames.values())

    def add(self, values: Mapping[str, Any]) -> int:
        """Add a step, and return its first row. The caller has checked the values.

        The caller holds the lock. The call waits while the oldest step is protected.

        Raises:
            StoreError: If the files need more space for frames than the disk has. Nothing has been
                added then.
        """
        layout = self.layout
        slot = self.n_added % layout.n_steps
        while self._protected and self.n_added >= layout.n_steps and self._is_protected(slot):
            self.changed.wait()
            slot = self.n_added % layout.n_steps
        if self._frames:
            self._add_frames(slot, values)
        for name, array in self._steps:
            array[slot] = values[name]
        self.n_added += 1
        return slot * layout.n_envs

    def _add_frames(self, slot: int, values: Mapping[str, Any]) -> None:
        """Add the observations of a step to the rings of frames."""
        n_steps = self.layout.n_steps
        # If this fails, the oldest step keeps its frames.
        for ring in self._frames.values():
            ring.reserve(ring.stop - ring.first)
        before = (self.n_added - 1) % n_steps if self.n_added else None
        for after, now in self.layout.next_of.items():
            ring = self._frames[now]
            if self.n_added >= n_steps:
                is_only = n_steps == 1
                ring.drop_before(slot if is_only else (slot + 1) % n_steps, int(is_only))
            ring.add(slot, before, values[now], values[after])

    def numbers_of(self, rows: Rows) -> Rows:
        """Return the numbers of the transitions in rows, since the first one that was added."""
        layout = self.layout
        slots, envs = np.divmod(rows, layout.n_envs)
        first = self.n_added - self.n_kept
        return (first + (slots - first) % layout.n_steps) * layout.n_envs + envs

    def rows_of(self, numbers: Rows) -> Rows:
        """Return the rows of transitions, by their numbers."""
        n_rows = self.layout.n_steps * self.layout.n_envs
        return numbers % n_rows

    def is_kept(self, numbers: Rows) -> npt.NDArray[np.bool_]:
        """Return whether transitions with these numbers are in the ring, shape (n,)."""
        n_envs = self.layout.n_envs
        first = (self.n_added - self.n_kept) * n_envs
        return (numbers >= first) & (numbers < self.n_added * n_envs)

    def protect(self, draw: Draw, n_parts: int) -> None:
        """Keep the transitions of a draw until its parts are gathered. The caller has the lock."""
        draw.n_unread = n_parts
        self._protected.append(draw)

    def release(self, draw: Draw, n_parts: int | None = None) -> None:
        """Note that parts of a draw have been gathered; None for all. Any thread may call this."""
        with self.changed:
            draw.n_unread = 0 if n_parts is None else draw.n_unread - n_parts
            if draw.n_unread <= 0 and draw in self._protected:
                self._protected.remove(draw)
                self.changed.notify_all()

    def gather(self, name: str, draw: Draw, out: Array) -> None:
        """Copy a part of the drawn transitions into ``out``, shape (n, *shape)."""
        rows = draw.rows
        if self.layout.window > 1:
            n_steps, last = self._window(draw)
            if name == "reward":
                self._add_rewards(rows, n_steps, out)
                return
            rows = last if self.layout.is_of_last_step(name) else rows
        if name in self._which:
            ring, which = self._which[name]
            ring.gather(which, rows, out)
        else:
            self._stores[name].gather_unchecked(rows, out)

    def discounts(self, draw: Draw, out: Array) -> None:
        """Write the discount of the value after each window into ``out``, shape (n,)."""
        n_steps, _ = self._window(draw)
        out[...] = self._powers[n_steps]

    def state(self) -> tuple[dict[str, Array], dict[str, tuple[Array, Array, int]]]:
        """Return the arrays of the parts, and numbers, frames and first number of each ring."""
        n_rows = self.n_kept * self.layout.n_envs
        arrays = {name: store.array[:n_rows] for name, store in self._stores.items()}
        rings = {
            name: (ring.numbers, ring.frames(), ring.first) for name, ring in self._frames.items()
        }
        return arrays, rings

    def load(
        self,
        n_added: int,
        arrays: Mapping[str, Array],
        rings: Mapping[str, tuple[Array, Array, int]],
    ) -> None:
        """Replace all transitions by those of a state. The caller holds the lock."""
        while self._protected:
            self.changed.wait()
        for name, (_, frames, _) in rings.items():
            self._frames[name].reserve(len(frames))
        self.n_added = n_added
        for name, array in arrays.items():
            self._stores[name].array[: len(array)] = array
        for name, (numbers, frames, first) in rings.items():
            self._frames[name].load(numbers, frames, first)

    def _is_protected(self, slot: int) -> bool:
        """Return whether a draw that is not gathered has a row of a step."""
        n_envs = self.layout.n_envs
        return any((draw.rows // n_envs == slot).any() for draw in self._protected)

    def _window(self, draw: Draw) -> tuple[Rows, Rows]:
        """Return the number of steps of each window of a draw, and its last row, shape (n,).

        A window ends with an episode, or with the latest step at the time of the draw.
        """
        if draw.window is None:
            layout = self.layout
            assert draw.numbers is not None
            first, envs = np.divmod(draw.numbers[:, None], layout.n_envs)
            steps = first + np.arange(layout.window)
            rows = steps % layout.n_steps * layout.n_envs + envs
            # The last column is an end in any case.
            ends = steps >= draw.n_added - 1
            ends[:, -1] = True
            for name in ("done", "truncated"):
                if name in self._stores:
                    ends |= self._stores[name].array[rows].reshape(rows.shape) != 0
            last = ends.argmax(axis=1)
            draw.window = last + 1, rows[np.arange(len(rows)), last]
        return draw.window

    def _add_rewards(self, first: Rows, n_steps: Rows, out: Array) -> None:
        """Write the discounted sums of the rewards of windows into ``out``.

        Args:
            first: First row of each window.
            n_steps: Number of steps of each window.
            out: Shape (n, *shape).
        """
        layout = self.layout
        steps = np.arange(layout.window)
        n_rows = layout.n_steps * layout.n_envs
        rewards = self._stores["reward"].array[(first[:, None] + steps * layout.n_envs) % n_rows]
        shape = (len(first), layout.window, *[1] * (rewards.ndim - 2))
        is_inside = (steps < n_steps[:, None]).reshape(shape)
        weights = self._powers[:-1].reshape(1, *shape[1:])
        # Rewards of later steps may be infinite, or of another episode.
        out[...] = np.where(is_inside, rewards * weights, 0).sum(axis=1)

    def _make_array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array of zeros, in memory or in a file of the folder."""
        if self._folder is None:
            return np.zeros(shape, dtype)
        path = os.path.join(self._folder, f"{name}.npy")
        # Threads may still read an older file, so it keeps its memory map.
        unfinished = f"{path}.unfinished"
        try:
            with NpyStore.create(unfinished, shape, dtype, overwrite=True) as store:
                array = store.map_to_write()
            os.replace(unfinished, path)
        except (OSError, StoreError) as error:
            # Only a ring that is being made has no frames of this name, and only empty files.
            others = [f"{part}.npy" for part in self.layout.parts if name not in self._frames]
            for made in (f"{name}.npy.unfinished", *others):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(os.path.join(self._folder, made))
            raise StoreError(
                f"path={self._folder!r}: a file for {name!r} cannot be made ({error}); expected a "
                "writable folder with free space; give another path"
            ) from error
        return np.asarray(array)
