"""TransitionRing: the latest transitions of a reinforcement learning agent, for replay.

FrameRing keeps their observations, whose equal frames are stored once.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pinfeed.errors import StoreError
from pinfeed.rows.orders import Rows
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.npy_store import NpyStore
from pinfeed.stores.ring_layout import RingLayout
from pinfeed.stores.store import Array

MakeArray = Callable[[str, tuple[int, ...], np.dtype[Any]], Array]
"""Makes an array of zeros, given its name, shape and dtype, in place of an older one."""

# An episode has one frame more than it has steps. This share is enough for episodes of 16 steps.
_SPARE_SHARE = 16
_GROWTH = 1.25
_COPIED_BYTES = 16 << 20


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


class FrameRing:
    """Observations of the latest steps, and the observations after them.

    An observation is one frame, or a stack of several. A frame is stored once if its bytes equal
    those of the frame that is expected in its place: the next observation of the step before, or
    the observation of the same step, shifted by one frame. Frames that are not as expected, such as
    those around the end of an episode, are stored in addition. Observations are therefore exact
    whatever the program adds.

    Frames have consecutive numbers. Those that the kept steps need are a range of numbers, because
    no step has older frames than the step before it.

    Args:
        name: Name of the array of frames.
        shape: Number of steps, number of environments, and frames of an observation.
        frame_shape: Shape of a frame.
        dtype: Dtype of the frames.
        make_array: Makes the array of frames.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int, int],
        frame_shape: tuple[int, ...],
        dtype: np.dtype[Any],
        make_array: MakeArray,
    ) -> None:
        self._name = name
        self._make_array = make_array
        self._frame_shape = frame_shape
        self._dtype = dtype
        self.numbers = np.zeros((2, *shape), np.int64)
        """Numbers of the frames of each step: of its observation, and of the next one."""
        self.first = 0
        """Number of the first frame that a step needs."""
        self.stop = 0
        """Number after that of the last frame."""
        n_steps, n_envs, self.n_stacked = shape
        # Each step adds up to two observations before the oldest step is dropped.
        self._n_added = 2 * n_envs * self.n_stacked
        n_rows = n_steps * n_envs
        self._n_copied = max(1, _COPIED_BYTES // (math.prod(frame_shape) * dtype.itemsize))
        self._frames = self._made(n_rows + n_rows // _SPARE_SHARE + 2 * self._n_added)

    @property
    def nbytes(self) -> int:
        """Bytes of the frames, and of their numbers."""
        return self._frames.store.array.nbytes + self.numbers.nbytes

    def reserve(self, n_frames: int) -> None:
        """Take memory for a number of frames and those of another step.

        Raises:
            StoreError: If a file cannot be made. Nothing has changed then.
        """
        old = self._frames
        if n_frames + self._n_added <= old.n:
            return
        new = self._made(int(_GROWTH * n_frames) + self._n_added)
        for begin in range(self.first, self.stop, self._n_copied):
            numbers = np.arange(begin, min(begin + self._n_copied, self.stop))
            new.words[numbers % new.n] = old.words[numbers % old.n]
        self._frames = new

    def add(self, slot: int, before: int | None, now: Any, after: Any) -> None:
        """Store the observations of a step, in place of those of the oldest one.

        The caller has reserved memory for them.

        Args:
            slot: Slot of the step.
            before: Slot of the step before; None if there is none.
            now: Observations, shape (n_envs, n_stacked, *frame_shape).
            after: Next observations, of the same shape.
        """
        n_envs = self.numbers.shape[2]
        now, after = (
            np.ascontiguousarray(one, self._dtype).reshape(n_envs, self.n_stacked, -1)
            for one in (now, after)
        )
        word = self._frames.words.dtype
        words = zip(now.view(word), after.view(word), strict=True)
        for env, (one, other) in enumerate(words):
            expected = [] if before is None else self.numbers[1, before, env].tolist()
            found = self._store(one, expected)
            self.numbers[0, slot, env] = found
            self.numbers[1, slot, env] = self._store(other, found[1:], found[-1])

    def drop_before(self, slot: int, which: int = 0) -> None:
        """Forget the frames that only steps before the one in a slot need.

        Args:
            slot: The slot.
            which: 0 if the observation of this step is needed, 1 if only the next one is.
        """
        self.first = int(self.numbers[which, slot].min())

    def gather(self, which: int, rows: Rows, out: Array) -> None:
        """Copy observations (0) or next observations (1) of rows into ``out``."""
        # Another thread may take larger memory, which has the frames of the rows that are read.
        frames = self._frames
        numbers = self.numbers[which].reshape(-1, self.n_stacked)[rows].ravel() % frames.n
        frames.store.gather_unchecked(numbers, out.reshape(len(numbers), *self._frame_shape))

    def frames(self) -> Array:
        """Return a copy of the frames that steps need, in the order of their numbers."""
        frames = self._frames
        return frames.store.array[np.arange(self.first, self.stop) % frames.n]

    def load(self, numbers: npt.NDArray[np.int64], frames: Array, first: int) -> None:
        """Replace all frames, as ``numbers`` and ``frames`` of another ring have them."""
        self.reserve(len(frames))
        self.numbers[...] = numbers
        self.first = first
        self.stop = first + len(frames)
        for i in range(0, len(frames), self._n_copied):
            part = frames[i : i + self._n_copied]
            numbers = np.arange(first + i, first + i + len(part))
            self._frames.store.array[numbers % self._frames.n] = part

    def _store(self, words: Array, expected: list[int], last: int | None = None) -> list[int]:
        """Return the numbers of the frames of an observation, and store those that are new.

        Args:
            words: Bytes of the frames as numbers, shape (n_stacked, m).
            expected: Numbers of frames that may equal the first ones.
            last: Number of a frame that may equal the first one in any case; None for none.
        """
        n = len(expected)
        # To compare frames one by one takes several times as long.
        found = expected.copy() if n > 1 and self._is_run(words[:n], expected) else []
        for i in range(len(found), self.n_stacked):
            frame = words[i]
            # The first observation of an episode often repeats one frame.
            before = found[-1] if found else last
            if i < n and self._is(frame, expected[i]):
                found.append(expected[i])
            elif before is not None and self._is(frame, before):
                found.append(before)
            else:
                self._frames.words[self.stop % self._frames.n] = frame
                found.append(self.stop)
                self.stop += 1
        return found

    def _is_run(self, frames: Array, numbers: list[int]) -> bool:
        """Return whether frames have the bytes of those with consecutive numbers."""
        n = len(numbers)
        if numbers != list(range(numbers[0], numbers[0] + n)):
            return False
        begin = numbers[0] % self._frames.n
        # The ring may begin again between these frames.
        if begin + n > self._frames.n:
            return False
        found: bytes = self._frames.words[begin : begin + n].tobytes()
        return found == frames.tobytes()

    def _is(self, frame: Array, number: int) -> bool:
        """Return whether a frame has the bytes of the one with a number."""
        found: bytes = self._frames.words[number % self._frames.n].tobytes()
        return found == frame.tobytes()

    def _made(self, n_frames: int) -> _Frames:
        """Return new memory for frames; threads that read older memory keep it."""
        array = self._make_array(self._name, (n_frames, *self._frame_shape), self._dtype)
        return _Frames(ArrayStore(array), n_frames, _words(array))


class _Frames(NamedTuple):
    """Memory of the frames: the one with number i has the place i modulo ``n``."""

    store: ArrayStore
    n: int
    words: Array
    """Bytes of each frame as numbers, shape (n, m)."""


def _words(array: Array) -> Array:
    """Return the bytes of each frame as numbers, shape (n, m)."""
    rows = array.reshape(len(array), -1)
    # Bytes are compared, because -0.0 equals 0.0, and NaN does not equal NaN.
    return rows.view(np.uint64 if rows.nbytes // len(rows) % 8 == 0 else np.uint8)
