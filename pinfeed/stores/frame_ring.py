"""FrameRing: observations and next observations, whose equal frames are stored once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.rows.orders import Rows
from pinfeed.stores.array import ArrayStore
from pinfeed.stores.store import Array

MakeArray = Callable[[str, tuple[int, ...], np.dtype[Any]], Array]
"""Makes an array of zeros, given its name, shape and dtype, in place of an older one."""

# An episode has one frame more than it has steps. This share is enough for episodes of 16 steps.
_SPARE_SHARE = 16
_GROWTH = 1.25
_COPIED_BYTES = 16 << 20


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
        self._allocate(n_rows + n_rows // _SPARE_SHARE + 2 * self._n_added)
        self._publish()

    @property
    def nbytes(self) -> int:
        """Bytes of the frames, and of their numbers."""
        return self._frames.array.nbytes + self.numbers.nbytes

    def reserve(self, n_frames: int) -> None:
        """Take memory for a number of frames and those of another step.

        Raises:
            StoreError: If a file cannot be made. Nothing has changed then.
        """
        if n_frames + self._n_added > self._n_frames:
            self._grow(int(_GROWTH * n_frames) + self._n_added)

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
        words = zip(now.view(self._word), after.view(self._word), strict=True)
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
        # Another thread may publish a larger array, which has the frames of the rows that are read.
        frames, n_frames = self._state
        numbers = self.numbers[which].reshape(-1, self.n_stacked)[rows].ravel() % n_frames
        frames.gather_unchecked(numbers, out.reshape(len(numbers), *self._frame_shape))

    def frames(self) -> Array:
        """Return a copy of the frames that steps need, in the order of their numbers."""
        return self._frames.array[np.arange(self.first, self.stop) % self._n_frames]

    def load(self, numbers: npt.NDArray[np.int64], frames: Array, first: int) -> None:
        """Replace all frames, as ``numbers`` and ``frames`` of another ring have them."""
        self.reserve(len(frames))
        self.numbers[...] = numbers
        self.first = first
        self.stop = first + len(frames)
        for i in range(0, len(frames), self._n_copied):
            part = frames[i : i + self._n_copied]
            self._frames.array[np.arange(first + i, first + i + len(part)) % self._n_frames] = part
        self._publish()

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
                self._words[self.stop % self._n_frames] = frame
                found.append(self.stop)
                self.stop += 1
        return found

    def _is_run(self, frames: Array, numbers: list[int]) -> bool:
        """Return whether frames have the bytes of those with consecutive numbers."""
        n = len(numbers)
        if numbers != list(range(numbers[0], numbers[0] + n)):
            return False
        begin = numbers[0] % self._n_frames
        # The ring may begin again between these frames.
        if begin + n > self._n_frames:
            return False
        found: bytes = self._words[begin : begin + n].tobytes()
        return found == frames.tobytes()

    def _is(self, frame: Array, number: int) -> bool:
        """Return whether a frame has the bytes of the one with a number."""
        found: bytes = self._words[number % self._n_frames].tobytes()
        return found == frame.tobytes()

    def _grow(self, n_frames: int) -> None:
        old, n_old = self._state
        self._allocate(n_frames)
        for begin in range(self.first, self.stop, self._n_copied):
            numbers = np.arange(begin, min(begin + self._n_copied, self.stop))
            self._words[numbers % self._n_frames] = _words(old.array, self._word)[numbers % n_old]
        self._publish()

    def _allocate(self, n_frames: int) -> None:
        """Take memory for frames, and leave the older memory to the threads that read it."""
        array = self._make_array(self._name, (n_frames, *self._frame_shape), self._dtype)
        nbytes = math.prod(self._frame_shape) * self._dtype.itemsize
        # Bytes are compared, because -0.0 equals 0.0, and NaN does not equal NaN.
        self._word = np.dtype(np.uint64 if nbytes % 8 == 0 else np.uint8)
        self._n_copied = max(1, _COPIED_BYTES // nbytes)
        self._frames = ArrayStore(array)
        self._n_frames = n_frames
        self._words = _words(array, self._word)

    def _publish(self) -> None:
        """Let threads that gather without the lock use the array, which has all frames now."""
        self._state = (self._frames, self._n_frames)


def _words(array: Array, word: np.dtype[Any]) -> Array:
    """Return the bytes of each frame as numbers, shape (n, m)."""
    return array.reshape(len(array), -1).view(word)
